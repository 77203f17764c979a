"""The tiles that a mask leaves, as rows of blocks and contiguous runs of columns: which pairs a kernel has to visit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from ..tiles import EMPTY, FULL, PARTIAL


@dataclass(frozen=True, slots=True)
class Run:
    """Contiguous columns that some pairs of a block row are in; not `masked` where every pair exists."""

    columns: slice
    masked: bool


@dataclass(frozen=True, slots=True)
class BlockRow:
    """Some rows, and the runs of columns that they attend to, from left to right."""

    rows: slice
    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True)
class Layout:
    """All block rows of a problem. `visited` counts the pairs that lie in them, `masked` those that need the mask."""

    rows: tuple[BlockRow, ...]
    visited: int
    masked: int

    @classmethod
    def of(cls, verdicts: np.ndarray, size: tuple[int, int], shape: tuple[int, int], *, apart: int) -> Layout:
        """The layout of verdicts (R, C) on tiles of `size`, for `shape` pairs.

        Neighbours are one run. A stretch without masked tiles that is at least `apart` columns wide is a run of its
        own, which needs no mask; a shorter one is cheaper to visit together with the masked tiles beside it.
        """
        (height, width), (queries, keys) = size, shape
        rows = []
        for index, line in enumerate(verdicts):
            runs = tuple(
                Run(slice(start * width, min(stop * width, keys)), masked)
                for start, stop, masked in _runs(line, -(-apart // width))
            )
            rows.append(BlockRow(slice(index * height, min((index + 1) * height, queries)), runs))
        visited = [_count(row, masked_only=False) for row in rows], [_count(row, masked_only=True) for row in rows]
        return cls(tuple(rows), sum(visited[0]), sum(visited[1]))

    @classmethod
    def whole(cls, height: int, shape: tuple[int, int]) -> Layout:
        """The layout of blocks of so many rows where every pair exists."""
        queries, keys = shape
        runs = (Run(slice(0, keys), masked=False),) if keys else ()
        rows = (BlockRow(slice(start, min(start + height, queries)), runs) for start in range(0, queries, height))
        return cls(tuple(rows), queries * keys, 0)


def cut(columns: slice, width: int) -> Iterator[slice]:
    """Columns in stretches of at most `width`."""
    for start in range(columns.start, columns.stop, width):
        yield slice(start, min(start + width, columns.stop))


def _count(row: BlockRow, *, masked_only: bool) -> int:
    wide = sum(run.columns.stop - run.columns.start for run in row.runs if run.masked or not masked_only)
    return wide * (row.rows.stop - row.rows.start)


def _runs(line: np.ndarray, apart: int) -> list[tuple[int, int, bool]]:
    """(start, stop, masked) of the runs of one line of tiles."""
    stretches = [list(stretch) for stretch in _alike(line) if stretch[2] != EMPTY]
    runs: list[list[int]] = []
    for start, stop, verdict in stretches:
        masked = verdict == PARTIAL or (
            verdict == FULL and stop - start < apart and _touches_partial(line, start, stop)
        )
        if runs and runs[-1][1] == start and runs[-1][2] == masked:
            runs[-1][1] = stop
        else:
            runs.append([start, stop, masked])
    return [(start, stop, bool(masked)) for start, stop, masked in runs]


def _alike(line: np.ndarray) -> list[tuple[int, int, int]]:
    """Stretches of equal verdicts."""
    if not len(line):
        return []
    edges = [0, *(np.flatnonzero(np.diff(line)) + 1).tolist(), len(line)]
    return [(start, stop, int(line[start])) for start, stop in pairwise(edges)]


def _touches_partial(line: np.ndarray, start: int, stop: int) -> bool:
    return (start > 0 and line[start - 1] == PARTIAL) or (stop < len(line) and line[stop] == PARTIAL)
