"""The tiles of a mask as runs of columns, with a bit for each pair of the tiles that the mask cuts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, reduce

import numpy as np
import torch
from torch import Tensor

from ..core.batched_problem import BatchedProblem
from ..core.grid import Grid
from ..core.problem import Problem
from ..masks import Mask
from ..masks.base import And
from .diagonals import distances
from .key_lists import chosen_keys
from .mask_tiles import BatchLayout, TileLayout, batch_layouts, sampled_layouts
from .memo import memoize
from .row_spans import first_key_position

BLOCK = 64
"""Rows and columns of a tile, as in flash.h."""


@dataclass(frozen=True, eq=False, slots=True)
class TileBits:
    """The tiles of BLOCK rows and `width` columns with unmasked pairs, and which of their pairs exist.

    Shapes: first (R + 1,) int64: the runs of block row r are first[r] to first[r + 1]. runs (·, 3) int64: the first
    column, a multiple of the width, the column after the last, and the number of the first tile among those with bits;
    -1 where all pairs exist. bits (B or 1, H or 1, T, BLOCK) uint64: a word for each row of a tile, its lowest bit the
    first column's; those beyond the width say nothing.
    """

    first: np.ndarray
    runs: np.ndarray
    bits: np.ndarray
    width: int = BLOCK


TILE_SIZE = (BLOCK, BLOCK)
MIN_FULL_RUN = 1
"""Tiles all of whose pairs exist need no bits, however few lie side by side."""


MAX_MEMO_BYTES = 2**22
"""The most bytes of bits that are memoized for a mask and a size; more are computed in each call."""


def packed_tiles(batched: BatchedProblem, width: int = BLOCK) -> tuple[tuple[slice, TileBits], ...]:
    """The tiles with unmasked pairs of a mask, as runs and bits, batch by batch where they differ.

    width: columns of a tile, BLOCK at most.
    """

    def compute() -> tuple[tuple[slice, TileBits], ...]:
        return tuple(
            (part.batch, _tiles(batched, part, width))
            for part in batch_layouts(batched.problem, (BLOCK, width), MIN_FULL_RUN)
        )

    return memoize(
        batched.problem,
        ("bits", width),
        compute,
        when=lambda found: sum(tiles.bits.nbytes for _, tiles in found) <= MAX_MEMO_BYTES,
    )


@lru_cache(maxsize=1024)
def all_tiles(queries: int, keys: int, width: int = BLOCK) -> TileBits:
    """All tiles, without bits: every pair exists."""
    rows, runs = -(-queries // BLOCK), int(keys > 0)
    table = np.tile(np.array([[0, keys, -1]], dtype=np.int64), (rows * runs, 1))
    return TileBits(
        np.arange(rows + 1, dtype=np.int64) * runs, table, np.zeros((1, 1, 1, BLOCK), dtype=np.uint64), width
    )


def masked_pairs(problem: Problem) -> int:
    """The largest number of pairs that need a bit, over batches with different tiles; of many tiles about that."""
    share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
    return round(share * max((part.layout.masked_pairs for part in found), default=0))


def _tiles(batched: BatchedProblem, part: BatchLayout, width: int) -> TileBits:
    layout = part.layout
    first = np.cumsum([0, *(len(row.runs) for row in layout.rows)], dtype=np.int64)
    runs, count = [], 0
    for row in layout.rows:
        for run in row.runs:
            runs.append((run.columns.start, run.columns.stop, count if run.masked else -1))
            count += -(-(run.columns.stop - run.columns.start) // width) if run.masked else 0
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    if not count:
        bits = np.zeros((1, 1, 1, BLOCK), dtype=np.uint64)
    elif (cut := _cutting_mask(batched.problem, part.batch, width)) is not None and cut.by_distance:
        bits = _by_distance(replace(batched.problem, mask=cut), first, table, width)
    else:
        bits = _pair_by_pair(batched.part(part.batch), layout, count, width)
    return TileBits(first, table, np.ascontiguousarray(bits), width)


def _cutting_mask(problem: Problem, batch: slice, width: int) -> Mask | None:
    """The mask that decides on pairs within tiles of some batches, of equally spaced positions; None for no one mask.

    It is the whole mask, without blocks that are whole tiles: of these a tile has all pairs or none.
    """
    if problem.mask is None or problem.shift is None or problem.mask.by_distance:
        return problem.mask if problem.shift is not None else None
    found = chosen_keys(problem.mask)
    if found is None or batch.stop - batch.start > 1:
        return None
    chosen, others = found
    whole = chosen.rows % BLOCK == chosen.columns % width == first_key_position(problem) % width == 0
    shared = chosen.indices.ndim < 3 or chosen.indices.shape[-3] == 1 or not problem.heads
    return reduce(And, others) if others and whole and shared else None


def _by_distance(problem: Problem, first: np.ndarray, runs: np.ndarray, width: int) -> np.ndarray:
    """One line of bits for all tiles: the word of a row is the 64 bits of the line from its first pair on."""
    queries = problem.queries
    along = distances(problem)
    grid = Grid(torch.zeros(1, dtype=torch.int64, device="cpu"), along, heads=False)
    line = np.zeros(len(along) + 2 * BLOCK, dtype=bool)  # rows and columns of padding lie beyond both ends
    kept = problem.mask.evaluate(grid).view(-1)  # type: ignore[union-attr]
    torch.from_numpy(line)[BLOCK : BLOCK + len(along)] = kept  # not by `numpy()`, after which writes are not counted
    words = _packed(np.lib.stride_tricks.sliding_window_view(line, BLOCK))[:, 0]
    rows = np.repeat(np.arange(len(first) - 1), np.diff(first)) * BLOCK
    columns = [
        (row, column)
        for row, (start, stop, number) in zip(rows.tolist(), runs.tolist(), strict=True)
        if number >= 0
        for column in range(start, stop, width)
    ]
    row, column = np.array(columns, dtype=np.int64).T
    at = BLOCK + queries - 1 - (row[:, None] + np.arange(BLOCK)) + column[:, None]
    return np.where(row[:, None] + np.arange(BLOCK) < queries, words[at], np.uint64(0))[None, None]


def _pair_by_pair(batched: BatchedProblem, layout: TileLayout, count: int, width: int) -> np.ndarray:
    """The bits of each masked run, from the mask's pairs: (B or 1, H or 1, T, BLOCK)."""
    found: list[Tensor] = []
    for row in layout.rows:
        for run in row.runs:
            keep = batched.keep(row.rows, run.columns) if run.masked else None
            if keep is not None:
                size = row.rows.stop - row.rows.start, run.columns.stop - run.columns.start
                found.append(keep.expand(*keep.shape[:2], *size))
    leading = np.broadcast_shapes(*{tuple(keep.shape[:2]) for keep in found})
    bits = np.zeros((*leading, count, BLOCK), dtype=np.uint64)
    number = 0
    for keep in found:
        rows, columns = keep.shape[-2:]
        tiles = -(-columns // width)
        padded = np.zeros((*keep.shape[:2], rows, tiles * width), dtype=bool)
        torch.from_numpy(padded)[..., :columns] = keep  # not by `numpy()`: it may be a view of the mask's own tensor
        words = _packed(padded.reshape(*keep.shape[:2], rows, tiles, width))[..., 0]
        bits[:, :, number : number + tiles, :rows] = words.swapaxes(-1, -2)
        number += tiles
    return bits


def _packed(pairs: np.ndarray) -> np.ndarray:
    """Pack (..., BLOCK) booleans, or fewer, into one word, (..., 1); the first is the lowest bit."""
    packed = np.packbits(pairs, axis=-1, bitorder="little")
    if packed.shape[-1] < BLOCK // 8:
        packed = np.pad(packed, [(0, 0)] * (packed.ndim - 1) + [(0, BLOCK // 8 - packed.shape[-1])])
    return packed.view("<u8")
