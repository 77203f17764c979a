"""What native code can add weights to, as values: numbers for each row, each column, each cell, each distance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from .library import check_cpu

FARTHEST = 2**23
"""How far positions may be apart: distances are computed in float32."""

Sizes: TypeAlias = tuple[int, int, int, int]
"""(B, H, M, N)."""
Wanted: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor."""


@dataclass(frozen=True, eq=False, slots=True)
class RowTerms:
    """Σ_j w_ij · log₂ w_ij is added to `into`, (B, H, M) float64."""

    into: Tensor

    def part(self, batch: slice) -> RowTerms:
        """Of some batches."""
        return RowTerms(self.into[batch])

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        return {"into": (sizes[:3], torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSums:
    """Σ_i w_ij is added to `into`, (B, H, N) float64."""

    into: Tensor

    def part(self, batch: slice) -> ColumnSums:
        """Of some batches."""
        return ColumnSums(self.into[batch])

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        return {"into": ((*sizes[:2], sizes[3]), torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class Cells:
    """Σ w_ij over the rows of cell r and the columns of cell c, or the largest of them, joins what is in `into`.

    Shapes: rows (M,) int64, the cell of each row, which grows from row to row; columns (N,) int64, that of each column;
    from 0, and below 0 in none. into (B, H, R, C): float64 for sums, float32 where the largest is asked for.
    """

    rows: Tensor
    columns: Tensor
    into: Tensor

    def part(self, batch: slice) -> Cells:
        """Of some batches."""
        return Cells(self.rows, self.columns, self.into[batch])

    @property
    def sums(self) -> bool:
        """Whether it is sums."""
        return self.into.dtype == torch.float64

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        into = (*sizes[:2], *self.into.shape[2:]), torch.float64 if self.sums else torch.float32
        return {"rows": (sizes[2:3], torch.int64), "columns": (sizes[3:], torch.int64), "into": into}


@dataclass(frozen=True, eq=False, slots=True)
class Largest:
    """The k largest w_ij of each row, from the largest on, and their columns: they replace what is there.

    Shapes: weights (B, H, M, k) float32, 0 where there are fewer; columns likewise, int64, without meaning there.
    """

    weights: Tensor
    columns: Tensor

    def part(self, batch: slice) -> Largest:
        """Of some batches."""
        return Largest(self.weights[batch], self.columns[batch])

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        shape = (*sizes[:3], *self.weights.shape[3:])
        return {"weights": (shape, torch.float32), "columns": (shape, torch.int64)}


@dataclass(frozen=True, eq=False, slots=True)
class Reach:
    """How far the weights of each row reach: distances are d_ij = |queries_i - keys_j|.

    Σ_j w_ij is added to `mass`, Σ_j w_ij · d_ij to `moments`, both (B, H, M), and Σ w_ij over the pairs of each bin to
    `histogram`, (B, H, E + 1), all float64. queries (M,) and keys (N,) int64: positions, which are at most `FARTHEST`
    apart. edges (E,) int64: where bins but the first begin, growing, from 1.
    """

    queries: Tensor
    keys: Tensor
    edges: Tensor
    mass: Tensor
    moments: Tensor
    histogram: Tensor

    def part(self, batch: slice) -> Reach:
        """Of some batches."""
        return Reach(self.queries, self.keys, self.edges, *(of[batch] for of in self._sums()))

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        given: Wanted = {
            name: ((size,), torch.int64)
            for name, size in zip(("queries", "keys", "edges"), (*sizes[2:], len(self.edges)), strict=True)
        }
        ends = {"mass": sizes[2], "moments": sizes[2], "histogram": len(self.edges) + 1}
        return given | {name: ((*sizes[:2], size), torch.float64) for name, size in ends.items()}

    def _sums(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.mass, self.moments, self.histogram


@dataclass(frozen=True, eq=False, slots=True)
class AllWeights:
    """w_ij is written to `into`, (B, H, M, N) float32, zeros before: where no pair exists nothing is touched."""

    into: Tensor

    def part(self, batch: slice) -> AllWeights:
        """Of some batches."""
        return AllWeights(self.into[batch])

    def wanted(self, sizes: Sizes) -> Wanted:
        """What the tensors need to be."""
        return {"into": (sizes, torch.float32)}


Reduction: TypeAlias = RowTerms | ColumnSums | Cells | Largest | Reach | AllWeights


def check(reduction: Reduction, sizes: Sizes) -> None:
    """Refuse a reduction whose tensors native code would read or write wrongly.

    Raises:
        ShapeError, DtypeError, DeviceError: they are not as the reduction says.
    """
    for name, (shape, dtype) in reduction.wanted(sizes).items():
        tensor, of = getattr(reduction, name), f"{name} of {type(reduction).__name__}"
        check_cpu(of, tensor)
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{of} has shape {tuple(tensor.shape)}; it needs {shape}")
        if tensor.dtype != dtype:
            raise DtypeError(f"{of} is {tensor.dtype}; native code takes {dtype}")
        if not tensor.is_contiguous():
            raise ShapeError(f"{of} needs to be contiguous; its strides are {tensor.stride()}")
    if isinstance(reduction, Cells):
        _check_cells(reduction)
    if isinstance(reduction, Reach) and not near(reduction.queries, reduction.keys):
        raise ShapeError(f"positions of Reach are more than {FARTHEST:,} apart")


def _check_cells(cells: Cells) -> None:
    for name, of, count in zip(("rows", "columns"), (cells.rows, cells.columns), cells.into.shape[2:], strict=True):
        if of.numel() and int(of.max()) >= count:
            raise ShapeError(f"{name} of Cells has cell {int(of.max())}; into has {count} of them")
    if not grow(cells.rows):
        raise ShapeError("rows of Cells need to grow from row to row, but for those of none")


def grow(cells: Tensor) -> bool:
    """Whether the cells (M,) grow from row to row, but for those below 0, so that `Cells` takes them."""
    return bool((cells[cells >= 0].diff() >= 0).all())


def near(queries: Tensor, keys: Tensor) -> bool:
    """Whether positions are near enough to each other for `Reach`."""
    both = torch.cat([queries, keys])
    return not both.numel() or int(both.max() - both.min()) <= FARTHEST
