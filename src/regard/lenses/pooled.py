"""A map of all weights that is as small as one likes."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from .. import native
from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Frame, Look, Reduction, Tile, check_memory
from .weight_sums import GroupSums

Reduce = Literal["mean", "max", "sum"]


@dataclass(frozen=True)
class Pooled:
    """The mean, largest weight or sum over each cell of a coarse grid: (..., heads, rows of cells, columns of cells).

    cells: how many rows and columns of cells there are, or one number for both; at most as many as rows and columns.
    Cell c of C over M rows has the rows ⌊c·M/C⌋ to ⌊(c+1)·M/C⌋ - 1: sizes differ by one at the most. reduce: over all
    pairs of the cell, masked ones too, whose weight is 0: the mean times the size of its cell is the sum, and the sums
    of a row of cells are together the number of its rows that attend to something, less what a sink takes.

    A row that attends to NaN makes its row of cells NaN. With dropout: of the weights before it. Computed without
    autograd.

    Raises:
        ConfigurationError: cells that are no two whole numbers of at least 1; another `reduce`; when used, more cells
            than there are rows or columns, or than the device has memory for.

    >>> import torch, regard
    >>> coarse = regard.lenses.Pooled(2, reduce="sum")
    >>> q = torch.zeros(4, 8)
    >>> regard.observe(q, q, q, coarse, mask=regard.masks.causal())[coarse]
    tensor([[2.0000, 0.0000],
            [1.1667, 0.8333]])
    """

    cells: int | tuple[int, int]
    reduce: Reduce = "mean"

    def __post_init__(self) -> None:
        both = self.cells if isinstance(self.cells, tuple) else (self.cells, self.cells)
        if len(both) != 2 or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in both):
            raise ConfigurationError(
                "Pooled needs cells as a whole number of at least 1, or two of them for rows and columns, such as "
                f"Pooled((256, 256)); they are {self.cells!r}"
            )
        if self.reduce not in get_args(Reduce):
            raise ConfigurationError(f"Pooled needs reduce as 'mean', 'max' or 'sum'; it is {self.reduce!r}")
        object.__setattr__(self, "cells", both)

    def start(self, problem: Problem) -> Look[Tensor]:
        """Begin to look."""
        frame = Frame.of(problem)
        rows, columns = (
            _edges(name, length, cells)
            for name, length, cells in zip(("rows", "columns"), (frame.queries, frame.keys), self._both(), strict=True)
        )
        check_memory(
            "Pooled of {} cells",
            problem,
            self._both(),
            each=frame.itemsize if self.reduce == "max" else frame.itemsize_of_sums,
            instead="ask for fewer cells, such as Pooled((256, 256))",
        )
        if self.reduce == "max":
            return _Maxima(frame, rows, columns)
        return _Sums(frame, rows, columns, mean=self.reduce == "mean")

    def _both(self) -> tuple[int, int]:
        return self.cells if isinstance(self.cells, tuple) else (self.cells, self.cells)


def _edges(name: str, length: int, cells: int) -> list[int]:
    """Where each cell begins, and the last one ends."""
    if cells > length:
        raise ConfigurationError(
            f"Pooled has {cells:,} cells for {length:,} {name}, and each needs one at least: ask for at most {length:,}"
            + (", or for the Weights themselves" if length else "; there is nothing to pool")
        )
    return [cell * length // cells for cell in range(cells + 1)]


class _Sums:
    """Sums over cells, and what they are divided by."""

    def __init__(self, frame: Frame, rows: list[int], columns: list[int], *, mean: bool) -> None:
        heights, widths = (torch.tensor(edges, device=frame.device).diff() for edges in (rows, columns))
        cells = _cells(rows, frame)[None], _cells(columns, frame)[None]
        self.groups = GroupSums(frame, *cells, (len(heights), len(widths)))
        self.areas = heights[:, None] * widths if mean else None
        self.reductions = (self.groups,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        sums = self.groups.sums if self.areas is None else self.groups.sums.div_(self.areas)
        return self.groups.frame.shown(sums.masked_fill_(self.groups.broken(lse), math.nan))


class _Maxima:
    """The largest weight of each cell so far."""

    terms = False

    def __init__(self, frame: Frame, rows: list[int], columns: list[int]) -> None:
        self.frame, self.rows, self.columns = frame, rows, columns
        sizes = frame.batch, frame.heads, len(rows) - 1, len(columns) - 1
        self.largest = torch.zeros(sizes, dtype=frame.dtype, device=frame.device)

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: Tile) -> None:
        rows, heights = _pieces(self.rows, tile.rows)
        columns, widths = _pieces(self.columns, tile.columns)
        largest = _largest(_largest(tile.weights, heights, -2), widths, -1)
        cells = self.largest[tile.batch, :, rows, columns]
        torch.maximum(cells, largest, out=cells)

    def native(self) -> native.Cells:
        return native.Cells(_cells(self.rows, self.frame), _cells(self.columns, self.frame), self.largest)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.frame.broken(lse)
        broken = torch.stack([broken[..., above:below].any(-1) for above, below in pairwise(self.rows)], -1)
        return self.frame.shown(self.largest.masked_fill_(broken[..., None], math.nan))


def _cells(edges: list[int], frame: Frame) -> Tensor:
    """The cell of each row or column."""
    sizes = torch.tensor(edges, device=frame.device).diff()
    return torch.arange(len(sizes), device=frame.device).repeat_interleave(sizes)


def _pieces(edges: list[int], stretch: slice) -> tuple[slice, list[int]]:
    """Which cells a stretch meets, and how long it is in each of them."""
    first, last = bisect_right(edges, stretch.start) - 1, bisect_right(edges, stretch.stop - 1)
    inside = [stretch.start, *edges[first + 1 : last], stretch.stop]
    return slice(first, last), [end - start for start, end in pairwise(inside)]


def _largest(weights: Tensor, sizes: list[int], axis: int) -> Tensor:
    """The largest of each piece along an axis."""
    if len(set(sizes)) == 1:
        return weights.unflatten(axis, (len(sizes), sizes[0])).amax(axis)
    return torch.stack([piece.amax(axis) for piece in weights.split(sizes, axis)], axis)
