"""Convert a problem to the inputs of the native flash code, and list features that it does not support.

Masks are packed to one bit per pair of a cut tile, memoized for each mask and size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from .. import native
from ..biases import RelativeBias
from ..core.grid import Grid
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..native.flash import BLOCK, FlashTiles
from .batched_problem import BatchedProblem
from .mask_tiles import BatchLayout, TileLayout, batch_layouts, memoize, sampled_layouts
from .tile_scores import bias_along, distances

TILE_SIZE = (BLOCK, BLOCK)
MIN_FULL_RUN = 1
"""Tiles all of whose pairs exist need no bits, however few lie side by side."""
MAX_MEMO_BYTES = 2**22
"""The most bytes of bits that are memoized for a mask and a size; more are computed in each call."""


def packed_tiles(batched: BatchedProblem) -> tuple[tuple[slice, FlashTiles], ...]:
    """The tiles with unmasked pairs as runs and bits, batch by batch where they differ."""
    queries, keys = batched.shape[2:]
    if batched.problem.mask is None:
        return ((slice(0, batched.problem.batch.numel()), _all_tiles(queries, keys)),)

    def compute() -> tuple[tuple[slice, FlashTiles], ...]:
        return tuple(
            (part.batch, _tiles(batched, part)) for part in batch_layouts(batched.problem, TILE_SIZE, MIN_FULL_RUN)
        )

    return memoize(
        batched.problem,
        "bits",
        compute,
        when=lambda found: sum(tiles.bits.nbytes for _, tiles in found) <= MAX_MEMO_BYTES,
    )


@lru_cache(maxsize=1024)
def _all_tiles(queries: int, keys: int) -> FlashTiles:
    """All tiles, without bits: every pair exists."""
    rows, runs = -(-queries // BLOCK), int(keys > 0)
    table = np.tile(np.array([[0, keys, -1]], dtype=np.int64), (rows * runs, 1))
    return FlashTiles(np.arange(rows + 1, dtype=np.int64) * runs, table, np.zeros((1, 1, 1, BLOCK), dtype=np.uint64))


def masked_pairs(problem: Problem) -> int:
    """The largest number of pairs that need a bit, over batches with different tiles; of many tiles about that."""
    share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
    return round(share * max((part.layout.masked_pairs for part in found), default=0))


def _tiles(batched: BatchedProblem, part: BatchLayout) -> FlashTiles:
    layout, mask = part.layout, batched.problem.mask
    first = np.cumsum([0, *(len(row.runs) for row in layout.rows)], dtype=np.int64)
    runs, count = [], 0
    for row in layout.rows:
        for run in row.runs:
            runs.append((run.columns.start, run.columns.stop, count if run.masked else -1))
            count += -(-(run.columns.stop - run.columns.start) // BLOCK) if run.masked else 0
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    if not count:
        bits = np.zeros((1, 1, 1, BLOCK), dtype=np.uint64)
    elif mask is not None and mask.by_distance and batched.problem.shift is not None:
        bits = _by_distance(batched.problem, first, table)
    else:
        bits = _pair_by_pair(batched.part(part.batch), layout, count)
    return FlashTiles(first, table, np.ascontiguousarray(bits))


def _by_distance(problem: Problem, first: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """One line of bits for all tiles: the word of a row is the 64 bits of the line from its first pair on."""
    queries = problem.queries
    along = distances(problem)
    grid = Grid(torch.zeros(1, dtype=torch.int64, device="cpu"), along, heads=False)
    line = np.zeros(len(along) + 2 * BLOCK, dtype=bool)  # rows and columns of padding lie beyond both ends
    line[BLOCK : BLOCK + len(along)] = problem.mask.evaluate(grid).view(-1).numpy()  # type: ignore[union-attr]
    words = _packed(np.lib.stride_tricks.sliding_window_view(line, BLOCK))[:, 0]
    rows = np.repeat(np.arange(len(first) - 1), np.diff(first)) * BLOCK
    columns = [
        (row, column)
        for row, (start, stop, number) in zip(rows.tolist(), runs.tolist(), strict=True)
        if number >= 0
        for column in range(start, stop, BLOCK)
    ]
    row, column = np.array(columns, dtype=np.int64).T
    at = BLOCK + queries - 1 - (row[:, None] + np.arange(BLOCK)) + column[:, None]
    return np.where(row[:, None] + np.arange(BLOCK) < queries, words[at], np.uint64(0))[None, None]


def _pair_by_pair(batched: BatchedProblem, layout: TileLayout, count: int) -> np.ndarray:
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
        tiles = -(-columns // BLOCK)
        padded = np.zeros((*keep.shape[:2], rows, tiles * BLOCK), dtype=bool)
        padded[..., :columns] = keep.numpy()
        words = _packed(padded.reshape(*keep.shape[:2], rows, tiles, BLOCK))[..., 0]
        bits[:, :, number : number + tiles, :rows] = words.swapaxes(-1, -2)
        number += tiles
    return bits


def _packed(pairs: np.ndarray) -> np.ndarray:
    """Pack (..., BLOCK) booleans into one word, (..., 1); the first is the lowest bit."""
    return np.packbits(pairs, axis=-1, bitorder="little").view("<u8")


MAX_BITS = 2**31
"""Masked pairs for which bits are kept: 256 MiB of them."""


def native_reasons(problem: Problem) -> list[str]:
    """Scores, dtypes, devices and biases that the native flash code does not support."""
    reasons, value = [], problem.value
    if problem.operator != "softmax":
        reasons.append(f"its code computes softmax attention; this is {problem.operator}")
    if not isinstance(problem.pairs, DotPairs):
        reasons.append("its code computes dot products; this score is additive")
    if value.dtype not in native.DTYPES:
        reasons.append(f"its code reads {native.DTYPE_NAMES}; this is {str(value.dtype).removeprefix('torch.')}")
    if not value.is_cpu:
        reasons.append(f"its code runs on the CPU; this is on {value.device}")
    if problem.bias is not None and not _has_distance_bias(problem):
        reasons.append("of all biases its code adds those by distance alone, of consecutive positions")
    if reason := native.why_not():
        reasons.append(f"there is no native code: {reason}")
    if not reasons and problem.mask is not None and (pairs := masked_pairs(problem)) > MAX_BITS:
        reasons.append(f"the mask cuts tiles of {pairs:,} pairs, each of which would be kept as a bit")
    return reasons


def native_problems(batched: BatchedProblem) -> Iterator[tuple[slice, native.FlashProblem]]:
    """The native problem of each slice of batches with the same tiles."""
    pairs, problem = batched.pairs, batched.problem
    if not isinstance(pairs, DotPairs):
        raise TypeError("native code over tiles computes dot products")
    line = bias_along(problem, problem.bias).float() if isinstance(problem.bias, RelativeBias) else None
    for batch, tiles in _one_by_one(packed_tiles(batched)) if _differ_in_columns(batched) else packed_tiles(batched):
        own = pairs.query[batch], pairs.key[batch], batched.value[batch]
        yield (
            batch,
            native.FlashProblem(*own, pairs.scale, tiles, problem.softcap, line, _dropout_hashes(batched, batch)),
        )


def _differ_in_columns(batched: BatchedProblem) -> bool:
    """Whether dropout hashes of columns differ between batches; native code reads one line of them for all."""
    return batched.problem.dropout is not None and batched.grid.key_positions.ndim > 1


def _one_by_one(found: Iterable[tuple[slice, FlashTiles]]) -> Iterator[tuple[slice, FlashTiles]]:
    """The tiles of each batch separately."""
    for batch, tiles in found:
        for at in range(batch.start, batch.stop):
            bits = tiles.bits if len(tiles.bits) == 1 else tiles.bits[at - batch.start : at - batch.start + 1]
            yield slice(at, at + 1), replace(tiles, bits=np.ascontiguousarray(bits))


def _dropout_hashes(batched: BatchedProblem, batch: slice) -> native.DropoutHashes | None:
    """The dropout hashes of some batches; None without dropout."""
    dropout = batched.problem.dropout
    if dropout is None:
        return None
    rows, columns = dropout.hashes(*batched.problem.dropout_indices(batched.grid, batch))
    return native.DropoutHashes(rows, columns.view(-1), dropout.threshold, 1.0 - dropout.probability)


def _has_distance_bias(problem: Problem) -> bool:
    """Whether the bias is a function of the distance, over consecutive positions."""
    return (
        isinstance(problem.bias, RelativeBias)
        and problem.shift is not None
        and problem.queries > 0
        and problem.keys > 0
    )
