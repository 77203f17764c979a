"""All weights pooled to a coarse grid of cells."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import compress, pairwise
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import LensState, Reduction, RowShard, WeightsLayout, WeightTile, check_memory
from .forms import CellReduction, never_decrease
from .weight_sums import GroupSums

Reduce = Literal["mean", "max", "sum"]


@dataclass(frozen=True)
class Pooled:
    """The mean, largest weight or sum over each cell of a coarse grid: (..., heads, rows of cells, columns of cells).

    cells: the number of rows and columns of cells, or one number for both; at most the rows and columns of weights.
    Cell c of C over M rows has the rows ⌊c·M/C⌋ to ⌊(c+1)·M/C⌋ - 1: sizes differ by at most one. reduce: over all
    pairs of the cell, masked ones too, whose weight is 0. So the mean times the size of its cell is the sum, and the
    sums of a row of cells add up to the number of its rows that attend to something, less the weight of sinks.

    A row that attends to NaN makes its row of cells NaN. Dropout is not applied. No autograd.

    Raises:
        ConfigurationError: cells that are no two whole numbers of at least 1; another `reduce`; when it starts, more
            cells than there are rows or columns, or than the device has memory for.

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

    def start(self, problem: Problem) -> LensState[Tensor]:
        """The state of one run."""
        return self._start(problem, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> LensState[Tensor]:
        """The state of one run over the rows of one process; cells are those of all rows."""
        return self._start(problem, WeightsLayout.from_problem(problem, shard))

    def _start(self, problem: Problem, layout: WeightsLayout) -> LensState[Tensor]:
        rows, columns = (
            _edges(name, length, cells)
            for name, length, cells in zip(
                ("rows", "columns"), (layout.all_queries, layout.keys), self._both(), strict=True
            )
        )
        check_memory(
            "Pooled of {} cells",
            problem,
            self._both(),
            itemsize=layout.result_itemsize if self.reduce == "max" else layout.sum_itemsize,
            advice="ask for fewer cells, such as Pooled((256, 256))",
        )
        return cell_state(layout, rows, columns, self.reduce)

    def _both(self) -> tuple[int, int]:
        return self.cells if isinstance(self.cells, tuple) else (self.cells, self.cells)


def cell_state(layout: WeightsLayout, rows: list[int], columns: list[int], reduce: Reduce) -> LensState[Tensor]:
    """The state of cells whose first rows and columns, and the end of the last, are given."""
    if reduce == "max":
        return _CellMaxState(layout, rows, columns)
    return _CellSumState(layout, rows, columns, mean=reduce == "mean")


def _edges(name: str, length: int, cells: int) -> list[int]:
    """The first row or column of each cell, and the end of the last."""
    if cells > length:
        raise ConfigurationError(
            f"Pooled has {cells:,} cells for {length:,} {name}, and each needs one at least: ask for at most {length:,}"
            + (", or for the Weights themselves" if length else "; there is nothing to pool")
        )
    return [cell * length // cells for cell in range(cells + 1)]


class _CellSumState:
    """The sum of each cell, and for the mean the number of its pairs."""

    def __init__(self, layout: WeightsLayout, rows: list[int], columns: list[int], *, mean: bool) -> None:
        heights, widths = (torch.tensor(edges, device="cpu").diff() for edges in (rows, columns))
        cells = layout.own_rows(_cells(rows))[None], _cells(columns)[None]
        self.groups = GroupSums(layout, *cells, (len(heights), len(widths)))
        self.areas = (heights[:, None] * widths).to(layout.device, non_blocking=True) if mean else None
        self.reductions = (self.groups,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        layout = self.groups.layout
        sums = layout.total(self.groups.sums.masked_fill_(self.groups.nan_groups(lse), math.nan))
        return layout.to_result(sums if self.areas is None else sums.div_(self.areas))


class _CellMaxState:
    """The largest weight of each cell."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout, rows: list[int], columns: list[int]) -> None:
        self.layout, self.rows, self.columns = layout, rows, columns
        self.row_cells = layout.own_rows(_cells(rows))
        sizes = layout.batch, layout.heads, len(rows) - 1, len(columns) - 1
        self.largest = torch.zeros(sizes, dtype=layout.dtype, device=layout.device)

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        rows, heights = _overlaps(self.rows, self.layout.row_indices(tile.rows))
        columns, widths = _overlaps(self.columns, tile.columns)
        largest = _piecewise_max(_piecewise_max(tile.weights, heights, -2), widths, -1)
        if isinstance(rows, slice) and isinstance(columns, slice):
            cells = self.largest[tile.batch, :, rows, columns]
            torch.maximum(cells, largest, out=cells)
            return
        at = tile.batch, slice(None), _numbers(rows, largest.device).unsqueeze(-1), _numbers(columns, largest.device)
        self.largest[at] = torch.maximum(self.largest[at], largest.to(self.largest.dtype))

    def native(self) -> CellReduction | None:
        """Supported where the cells of rows never decrease."""
        if not never_decrease(self.row_cells):
            return None
        return CellReduction(self.row_cells, _cells(self.columns), self.largest)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken, layout = self.layout.nan_rows(lse), self.layout
        counts = torch.zeros(self.largest.shape[:3], dtype=torch.int32, device=layout.device)
        counts.index_add_(-1, self.row_cells.to(layout.device, non_blocking=True), broken.int())
        # No weight is infinite, and unlike NaN infinity is the maximum of any other number and itself.
        largest = layout.maximum(self.largest.masked_fill_((counts > 0).unsqueeze(-1), math.inf))
        return layout.to_result(largest.masked_fill_(largest == math.inf, math.nan))


def _cells(edges: list[int]) -> Tensor:
    """The cell of each row or column, on the CPU."""
    sizes = torch.tensor(edges, device="cpu").diff()
    return torch.arange(len(sizes), device="cpu").repeat_interleave(sizes)


def _numbers(cells: slice | list[int], device: torch.device) -> Tensor:
    """The numbers of some cells, as an index."""
    numbers = list(range(cells.start, cells.stop)) if isinstance(cells, slice) else cells
    return torch.tensor(numbers, device="cpu").to(device, non_blocking=True)


def _overlaps(edges: list[int], span: slice) -> tuple[slice | list[int], list[int]]:
    """The cells that some rows or columns lie in, and how many of them lie in each."""
    step = span.step or 1
    chosen = range(span.start, span.stop, step)
    first, last = bisect_right(edges, chosen[0]) - 1, bisect_right(edges, chosen[-1])
    bounds = [0, *(-(-(edge - span.start) // step) for edge in edges[first + 1 : last]), len(chosen)]
    sizes = [end - start for start, end in pairwise(bounds)]
    if step == 1 or all(sizes):
        return slice(first, last), sizes
    return list(compress(range(first, last), sizes)), [size for size in sizes if size]


def _piecewise_max(weights: Tensor, sizes: list[int], axis: int) -> Tensor:
    """The maximum of each piece along an axis; `sizes` are their lengths."""
    if len(set(sizes)) == 1:
        return weights.unflatten(axis, (len(sizes), sizes[0])).amax(axis)
    return torch.stack([piece.amax(axis) for piece in weights.split(sizes, axis)], axis)
