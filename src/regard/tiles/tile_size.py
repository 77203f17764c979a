"""Tiles whose scores fit into a core's cache: their size, their order, and the memory that one after another uses."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor

from ..core.problem import Problem
from .mask_tiles import BatchLayout, BlockRow, batch_layouts, split_slice, union_layout

MIN_TILE_SIDE = 64
"""Rows and columns of the smallest tile whose products are still worth their calls."""
SCORES_PER_TILE = 2**18
"""The number of scores in a tile, over all batches and heads: a megabyte, which fits into a core's cache."""


def batches_per_tile(problem: Problem, tile: int) -> int:
    """The number of batches that are computed at once in 128 × 128 tiles of at most `tile` scores; at least one."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    return max(tile // (max(heads, 1) * 128 * 128), 1)


def tile_size(problem: Problem, tile: int) -> tuple[int, int]:
    """Rows and columns of a tile: at most `tile` scores over heads and batches at once, but MIN_TILE_SIDE each."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    leading = max(min(problem.batch.numel(), batches_per_tile(problem, tile)) * heads, 1)
    side = max(math.isqrt(tile // leading), 1)
    if side < MIN_TILE_SIDE:
        return (MIN_TILE_SIDE, MIN_TILE_SIDE) if tile >= MIN_TILE_SIDE**2 else (side, side)
    rows = min(side // MIN_TILE_SIDE * MIN_TILE_SIDE, 256)
    return rows, min(tile // (leading * rows) // MIN_TILE_SIDE * MIN_TILE_SIDE, 512)


def reused_buffer(buffer: Tensor | None, like: Tensor, numbers: int) -> Tensor:
    """The buffer if it holds enough numbers, else a larger one."""
    return like.new_empty(numbers) if buffer is None or buffer.numel() < numbers else buffer


def block_rows(problem: Problem, tile: int, *, together: bool = False) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
    """Block rows of batches with the same tiles, as many batches at once as suit the tile size, or all of them."""
    size = tile_size(problem, tile)[0], MIN_TILE_SIDE
    if together:
        yield slice(0, problem.batch.numel()), union_layout(problem, size, 1).rows
        return
    yield from split_batches(problem, batch_layouts(problem, size, 1), tile)


def split_batches(
    problem: Problem, layouts: tuple[BatchLayout, ...], tile: int
) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
    """Slices of batches that are computed at once, and their block rows."""
    for part in layouts:
        for batch in split_slice(part.batch, batches_per_tile(problem, tile)):
            yield batch, part.layout.rows
