"""Tiles of scores: their size by the device, their order, and the memory that one after another uses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from ..core.problem import Problem
from .mask_tiles import BatchLayout, BlockRow, batch_layouts, split_slice, union_layout

MIN_TILE_SIDE = 64
"""Rows and columns of the smallest tile whose products are still worth their calls."""
SCORES_PER_TILE = 2**18
"""The number of scores in a tile on a CPU, over all batches and heads: a megabyte, which fits into a core's cache."""
SCORES_PER_MULTIPROCESSOR = 2**15
"""The scores of a tile on a GPU for each of its multiprocessors, of which an operator reads and writes 8 bytes each.

A multiprocessor moves 8 (RTX 4090), 18 (A100) to 36 bytes (H200) a nanosecond, as the memory's bandwidth, divided by
their number, says: so many scores take an operator some 7 to 30 microseconds, and to launch it takes 5. By arithmetic;
not measured.
"""
BYTES_OF_A_SCORE = 32
"""What a score takes while its tile is computed: score, weight, dropout, gradients and copies, in float32."""
SHARE_OF_MEMORY = 1 / 64
"""The most of a GPU's memory that a tile may take."""


def scores_on_gpu(multiprocessors: int, memory: int) -> int:
    """The number of scores in a tile on a GPU of so many multiprocessors and bytes of memory: a power of 2.

    As many as keep an operator busy for longer than it takes to launch it, but of a small share of the memory.

    >>> [scores_on_gpu(132, 80 * 2**30), scores_on_gpu(20, 4 * 2**30)] == [2**22, 2**19]
    True
    """
    fitting = int(SHARE_OF_MEMORY * memory) // BYTES_OF_A_SCORE
    most = min(SCORES_PER_MULTIPROCESSOR * multiprocessors, fitting)
    return max(2 ** (max(most, 1).bit_length() - 1), SCORES_PER_TILE)


@cache
def scores_per_tile(device: torch.device) -> int:
    """The number of scores in a tile of torch's operators on a device, over all batches and heads."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return SCORES_PER_TILE
    properties = torch.cuda.get_device_properties(device)
    return scores_on_gpu(properties.multi_processor_count, properties.total_memory)


def batches_per_tile(problem: Problem, tile: int) -> int:
    """The number of batches that are computed at once in 128 × 128 tiles of at most `tile` scores; at least one."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    return max(tile // (max(heads, 1) * 128 * 128), 1)


def tile_size(problem: Problem, tile: int) -> tuple[int, int]:
    """Rows and columns of a tile: at most `tile` scores over heads and batches at once, but MIN_TILE_SIDE each.

    At most 256 rows and 512 columns where it is a CPU's tile or smaller, and of a larger one in proportion.
    """
    heads = problem.weights_shape[-3] if problem.heads else 1
    leading = max(min(problem.batch.numel(), batches_per_tile(problem, tile)) * heads, 1)
    side = max(math.isqrt(tile // leading), 1)
    if side < MIN_TILE_SIDE:
        return (MIN_TILE_SIDE, MIN_TILE_SIDE) if tile >= MIN_TILE_SIDE**2 else (side, side)
    times = max(math.isqrt(tile // SCORES_PER_TILE), 1)
    rows = min(side // MIN_TILE_SIDE * MIN_TILE_SIDE, 256 * times)
    return rows, min(tile // (leading * rows) // MIN_TILE_SIDE * MIN_TILE_SIDE, 512 * times)


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
