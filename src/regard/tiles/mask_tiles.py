"""The tiles with unmasked pairs, as rows of blocks and runs of columns; memoized for each mask and size.

Kernels visit the pairs in these runs and no others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ..core.finite import waits
from ..core.grid import Blocks, Grid
from ..core.intervals import EMPTY, FULL, PARTIAL
from ..core.problem import Problem
from ..core.symbolic_positions import BlockPositions
from ..core.torch_modes import under_dispatch_mode
from ..utils.pytree import tree_tensors
from .memo import memoize


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous columns that a block row attends to; `masked` unless every pair in them exists."""

    columns: slice
    masked: bool


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Some rows, and the runs of columns that they attend to, from left to right."""

    rows: slice
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class TileLayout:
    """All block rows of a problem; `visited_pairs` counts pairs in their runs, `masked_pairs` those in masked runs."""

    rows: tuple[BlockRow, ...]
    visited_pairs: int
    masked_pairs: int

    @classmethod
    def from_verdicts(
        cls, verdicts: np.ndarray, size: tuple[int, int], shape: tuple[int, int], *, min_full_width: int
    ) -> TileLayout:
        """The layout of verdicts (R, C) on tiles of `size`, for `shape` pairs.

        Adjacent tiles form one run. FULL tiles of at least `min_full_width` columns together are a run of their own,
        which needs no mask; fewer are cheaper to compute together with the masked tiles beside them.
        """
        (height, width), (queries, keys) = size, shape
        rows, visited, under_mask = [], 0, 0
        for index, stretches in enumerate(_stretches(verdicts)):
            block = slice(index * height, min((index + 1) * height, queries))
            runs = []
            for start, stop, masked in _runs(stretches, -(-min_full_width // width)):
                columns = slice(start * width, min(stop * width, keys))
                pairs = (block.stop - block.start) * (columns.stop - columns.start)
                visited, under_mask = visited + pairs, under_mask + pairs * masked
                runs.append(Run(columns, masked))
            rows.append(BlockRow(block, tuple(runs)))
        return cls(tuple(rows), visited, under_mask)

    @classmethod
    def unmasked(cls, height: int, shape: tuple[int, int]) -> TileLayout:
        """The layout of a problem without a mask, in blocks of `height` rows."""
        queries, keys = shape
        runs = (Run(slice(0, keys), masked=False),) if keys else ()
        rows = (BlockRow(slice(start, min(start + height, queries)), runs) for start in range(0, queries, height))
        return cls(tuple(rows), queries * keys, 0)


def split_slice(columns: slice, width: int) -> Iterator[slice]:
    """Split a slice into slices of at most `width`."""
    for start in range(columns.start, columns.stop, width):
        yield slice(start, min(start + width, columns.stop))


Stretch: TypeAlias = tuple[int, int, int]
"""The first tile of a line, the one after the last, and the verdict that they share."""


def _stretches(verdicts: np.ndarray) -> list[list[Stretch]]:
    """Maximal stretches of equal verdicts but EMPTY, for each line of (R, C)."""
    lines: list[list[Stretch]] = [[] for _ in verdicts]
    if not verdicts.size:
        return lines
    begins = np.ones(verdicts.shape, dtype=bool)
    begins[:, 1:] = verdicts[:, 1:] != verdicts[:, :-1]
    rows, starts = begins.nonzero()
    stops = np.append(starts[1:], 0)
    stops[stops == 0] = verdicts.shape[1]  # where the next stretch begins a line, this one ends its own
    for row, start, stop, verdict in zip(
        *(each.tolist() for each in (rows, starts, stops, verdicts[begins])), strict=True
    ):
        if verdict != EMPTY:
            lines[row].append((start, stop, verdict))
    return lines


def _runs(stretches: list[Stretch], min_full_width: int) -> list[tuple[int, int, bool]]:
    """(start, stop, masked) of the runs of one line, from its stretches that are not EMPTY.

    A FULL stretch that is too narrow belongs to its neighbours, which are PARTIAL, if it has any.
    """
    runs: list[tuple[int, int, bool]] = []
    for at, (start, stop, verdict) in enumerate(stretches):
        masked = verdict == PARTIAL
        if not masked and stop - start < min_full_width:
            masked = (at > 0 and stretches[at - 1][1] == start) or (
                at + 1 < len(stretches) and stretches[at + 1][0] == stop
            )
        if runs and runs[-1][1:] == (start, masked):
            start = runs.pop()[0]
        runs.append((start, stop, masked))
    return runs


MAX_WASTED_PAIRS = 2**16
"""The most masked pairs, of all heads, that a slice of batches visits before it is split in two: they take as long as
the calls of another slice."""
MAX_COUNTED_TILES, MIN_SAMPLED_ROWS = 2**14, 32
"""Tiles up to which all are counted for a price, and the fewest block rows that are counted of more."""


@dataclass(frozen=True, slots=True)
class BatchLayout:
    """A slice of batches, of all leading axes merged, with the same tiles."""

    batch: slice
    layout: TileLayout


def batch_layouts(problem: Problem, size: tuple[int, int], min_full_width: int) -> tuple[BatchLayout, ...]:
    """The tiles of `size` with unmasked pairs, batch by batch where they differ, for all heads together."""
    return memoize(problem, (size, min_full_width), lambda: _parts(problem, size, min_full_width))


def sampled_layouts(
    problem: Problem, size: tuple[int, int], min_full_width: int
) -> tuple[float, tuple[BatchLayout, ...]]:
    """`batch_layouts` for prices: all block rows, or an even sample of them, and how many each sampled one stands for.

    A sample where there are more than MAX_COUNTED_TILES, of consecutive queries. It is exact where pairs grow linearly
    from row to row, as those of causal masks and of windows do.
    """
    height, width = size
    rows, positions = problem.queries // height, problem.query_positions
    tiles_per_row = -(-problem.keys // width)
    sampled = max(MAX_COUNTED_TILES // max(tiles_per_row, 1), MIN_SAMPLED_ROWS)
    consecutive = isinstance(positions, range) and positions.step == 1
    if rows <= 2 * sampled or problem.mask is None or not problem.mask.by_position:
        return 1.0, batch_layouts(problem, size, min_full_width)
    if not consecutive and (positions is not None or problem.key_positions is not None):
        return 1.0, batch_layouts(problem, size, min_full_width)
    start = positions.start if isinstance(positions, range) else problem.keys - problem.queries
    step = rows // sampled
    skipped = (rows - 1 - step * (sampled - 1)) // 2
    blocks = BlockPositions(start + skipped * height, step * height, sampled, height)
    query = problem.pairs.query  # of which the tiles need the shape alone
    fewer = torch.empty((*query.shape[:-2], sampled * height, query.shape[-1]), device="meta")
    some = replace(problem, pairs=replace(problem.pairs, query=fewer), query_positions=blocks)
    return problem.queries / (sampled * height), batch_layouts(some, size, min_full_width)


def union_layout(problem: Problem, size: tuple[int, int], min_full_width: int) -> TileLayout:
    """The tiles that are not EMPTY for some batch and head."""
    found = batch_layouts(problem, size, min_full_width)
    if len(found) == 1:
        return found[0].layout
    return _layout(_verdicts(problem, size), problem, size, min_full_width)


def count_visited_pairs(problem: Problem, size: tuple[int, int] = (64, 64)) -> int:
    """The number of pairs in tiles that are not EMPTY, over all batches, for one head; of many tiles about that."""
    share, found = sampled_layouts(problem, size, 1)
    visited = sum((part.batch.stop - part.batch.start) * part.layout.visited_pairs for part in found)
    return round(share * visited)


def distinct_matrices(problem: Problem) -> tuple[int, int]:
    """The number of distinct mask matrices and bias matrices over batches and heads; 0 without a mask or bias."""
    masks, bias = 0, None
    if problem.mask is not None:
        masks = memoize(problem, "distinct masks", lambda: _distinct_masks(problem))
    if problem.bias is not None:
        bias = problem.bias_values(problem.grid().tile(slice(0, 1), slice(0, 1)))
    return masks, (0 if bias is None else bias.shape[:-2].numel())


def _distinct_masks(problem: Problem) -> int:
    with _grid_with_values(problem) as grid:
        keep = problem.keep(grid.tile(slice(0, 1), slice(0, 1)))
    return 0 if keep is None else keep.shape[:-2].numel()


def _parts(problem: Problem, size: tuple[int, int], min_full_width: int) -> tuple[BatchLayout, ...]:
    if problem.mask is None:
        whole = TileLayout.unmasked(size[0], (problem.queries, problem.keys))
        return (BatchLayout(slice(0, problem.batch.numel()), whole),)
    verdicts, batches = _verdicts(problem, size), problem.batch.numel()
    if len(verdicts) != batches:
        return (BatchLayout(slice(0, batches), _layout(verdicts, problem, size, min_full_width)),)
    return tuple(
        BatchLayout(slice(start, stop), _layout(verdicts[start:stop], problem, size, min_full_width))
        for start, stop in pairwise(_edges(verdicts, problem, size))
    )


def _edges(verdicts: np.ndarray, problem: Problem, size: tuple[int, int]) -> list[int]:
    """Batch indices where tiles change: neighbours are merged unless that visits more than MAX_WASTED_PAIRS."""
    taken = verdicts != EMPTY
    if len(verdicts) and (taken == taken[0]).all():
        return [0, len(verdicts)]  # all see the same tiles: the usual case of a padded batch
    heads = problem.weights_shape[-3] if problem.heads else 1
    areas = Blocks.from_grid(problem.grid(), size).areas.cpu().numpy()
    seen = [int(areas[verdict != EMPTY].sum()) for verdict in verdicts]
    edges, together = [0], verdicts[:1]
    for at in range(1, len(verdicts)):
        both = np.concatenate([together, verdicts[at : at + 1]])
        visited = int(areas[_combine(both) != EMPTY].sum()) * (at + 1 - edges[-1])
        if (visited - sum(seen[edges[-1] : at + 1])) * heads <= MAX_WASTED_PAIRS:
            together = _combine(both)[None]
        else:
            edges.append(at)
            together = verdicts[at : at + 1]
    return [*edges, len(verdicts)] if len(verdicts) else edges


def _layout(verdicts: np.ndarray, problem: Problem, size: tuple[int, int], min_full_width: int) -> TileLayout:
    """The union of the tiles of several verdicts (·, R, C)."""
    return TileLayout.from_verdicts(
        _combine(verdicts), size, (problem.queries, problem.keys), min_full_width=min_full_width
    )


def _verdicts(problem: Problem, size: tuple[int, int]) -> np.ndarray:
    """(batches or 1, R, C) verdicts on tiles; a tile is EMPTY or FULL if it is so for each head.

    Layouts of one size differ in their full runs alone: few verdicts are memoized for the next of them.
    """
    return memoize(
        problem, ("verdicts", size), lambda: _new_verdicts(problem, size), lambda found: found.size <= MAX_COUNTED_TILES
    )


def _new_verdicts(problem: Problem, size: tuple[int, int]) -> np.ndarray:
    each = verdicts_by_head(problem, size)
    if each.shape[1] == 1:
        return each[:, 0]
    together = [_combine(batch) for batch in each]  # of no batch there is nothing to stack
    return np.array(together, dtype=np.int8).reshape(len(each), *each.shape[2:])


def verdicts_by_head(problem: Problem, size: tuple[int, int]) -> np.ndarray:
    """(batches or 1, heads or 1, R, C) verdicts on tiles, computed anew."""
    if problem.mask is None:
        return np.full((1, 1, -(-problem.queries // size[0]), -(-problem.keys // size[1])), FULL, dtype=np.int8)
    with _grid_with_values(problem) as grid:
        problem.keep(grid.tile(slice(0, 1), slice(0, 1)))  # says so if the mask does not fit
        blocks = Blocks.from_grid(grid, size)
        verdicts = problem.mask.verdicts(blocks).cpu().numpy()
    heads, tiles, batch = 1, verdicts.shape[-2:], tuple(problem.batch)
    if verdicts.ndim > 2 and not problem.heads:
        verdicts = np.broadcast_to(verdicts, (*batch, *tiles))
    elif verdicts.ndim > 2:
        heads = verdicts.shape[-3]
        verdicts = np.broadcast_to(verdicts, (*batch, heads, *tiles)) if verdicts.ndim > 3 else verdicts[None]
    batches = math.prod(verdicts.shape[: -3 if problem.heads else -2])
    return verdicts.reshape(batches, heads, *tiles)


@contextmanager
def _grid_with_values(problem: Problem) -> Iterator[Grid]:
    """The grid of a problem, on the CPU where mask and positions are formulas without tensors of another device.

    So no device is waited for, and a choice can be made for fake tensors: the block is outside of dispatch modes.
    """
    positions = problem.query_positions, problem.key_positions
    if any(isinstance(each, Tensor) for each in positions) or any(map(waits, tree_tensors(problem.mask))):
        yield problem.grid()
    else:
        with _disable_current_modes() if under_dispatch_mode() else nullcontext():
            yield problem.grid(torch.device("cpu"))


def _combine(verdicts: np.ndarray) -> np.ndarray:
    """Combine verdicts: EMPTY or FULL where all agree, PARTIAL elsewhere; EMPTY for none."""
    if not len(verdicts):
        return np.full(verdicts.shape[1:], EMPTY, dtype=np.int8)
    return np.where(verdicts.min(0) == verdicts.max(0), verdicts[0], PARTIAL).astype(np.int8)
