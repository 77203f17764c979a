"""The tiles of a problem's mask in bits, as native code reads them: worked out once for each mask and size."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..native.flash import BLOCK, Tiles
from ..problem import Problem
from ..tiles import Grid
from .flat import Flat
from .layout import Layout
from .tiling import Part, parts, remembered

SIZE = (BLOCK, BLOCK)
APART = 1
"""Tiles all of whose pairs exist need no bits, however few lie side by side."""
REMEMBERED = 2**22
"""Bytes of bits that are remembered for a mask and a size; more are worked out for each call."""


def tiles_of(flat: Flat) -> tuple[tuple[slice, Tiles], ...]:
    """The tiles of a flat problem, batch by batch where these see different ones."""

    def compute() -> tuple[tuple[slice, Tiles], ...]:
        return tuple((part.batch, _tiles(flat, part)) for part in parts(flat.problem, SIZE, APART))

    return remembered(
        flat.problem, "bits", compute, when=lambda found: sum(tiles.bits.nbytes for _, tiles in found) <= REMEMBERED
    )


def masked_pairs(problem: Problem) -> int:
    """The pairs that need a bit each, for all batches and heads that the mask tells apart."""
    return max((part.layout.masked for part in parts(problem, SIZE, APART)), default=0)


def _tiles(flat: Flat, part: Part) -> Tiles:
    layout, mask = part.layout, flat.problem.mask
    first = np.cumsum([0, *(len(row.runs) for row in layout.rows)], dtype=np.int64)
    runs, count = [], 0
    for row in layout.rows:
        for run in row.runs:
            runs.append((run.columns.start, run.columns.stop, count if run.masked else -1))
            count += -(-(run.columns.stop - run.columns.start) // BLOCK) if run.masked else 0
    table = np.array(runs, dtype=np.int64).reshape(-1, 3)
    placed = flat.problem.query_positions is not None or flat.problem.key_positions is not None
    if not count:
        bits = np.zeros((1, 1, 1, BLOCK), dtype=np.uint64)
    elif mask is not None and mask.by_distance and not placed:
        bits = _by_distance(flat.problem, first, table)
    else:
        bits = _pair_by_pair(flat.part(part.batch), layout, count)
    return Tiles(first, table, np.ascontiguousarray(bits))


def _by_distance(problem: Problem, first: np.ndarray, runs: np.ndarray) -> np.ndarray:
    """One line of bits for all tiles: the word of a row is the 64 bits of the line from its first pair on."""
    queries, keys = problem.queries, problem.keys
    distances = torch.arange(1 - keys, queries)
    grid = Grid(torch.zeros(1, dtype=torch.int64), distances, heads=False)
    line = np.zeros(len(distances) + 2 * BLOCK, dtype=bool)  # rows and columns of padding lie beyond both ends
    line[BLOCK : BLOCK + len(distances)] = problem.mask.keep(grid).view(-1).numpy()  # type: ignore[union-attr]
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


def _pair_by_pair(flat: Flat, layout: Layout, count: int) -> np.ndarray:
    """The mask asked for each masked run: (B or 1, H or 1, T, BLOCK)."""
    found: list[Tensor] = []
    for row in layout.rows:
        for run in row.runs:
            keep = flat.keep(row.rows, run.columns) if run.masked else None
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
    """(..., BLOCK) pairs as one word, (..., 1): the first of them is the lowest bit."""
    return np.packbits(pairs, axis=-1, bitorder="little").view("<u8")
