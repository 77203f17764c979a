"""Forms of what lenses add up over the weights: sums over rows, columns and cells, maxima, the largest weights.

A backend that has a pass over the tiles fills the tensors of these forms without storing weights. A sum names a term:
the contribution of one weight, whose names are in `TERMS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError

TERMS = {"weight": False, "weight_log2_weight": False, "weight_distance": True}
"""Whether each term reads positions, by name: the table of reductions.h, in its order."""
MAX_DISTANCE = 2**23
"""The largest difference of two positions: distances are computed in float32."""


Sizes: TypeAlias = tuple[int, int, int, int]
"""(B, H, M, N)."""
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor of a reduction."""


@dataclass(frozen=True, eq=False, slots=True)
class TermPositions:
    """The positions of queries (M,) and keys (N,), int64, at most `MAX_DISTANCE` apart."""

    queries: Tensor
    keys: Tensor

    def equal(self, other: TermPositions) -> bool:
        """Whether both have the same positions."""
        return self.queries.equal(other.queries) and self.keys.equal(other.keys)


@dataclass(frozen=True, eq=False, slots=True)
class RowSums:
    """Σ_j term(w_ij) is added to `into`, (B, H, M) float64. positions: required where the term reads them."""

    term: ClassVar[str] = "weight"
    written: ClassVar[tuple[str, ...]] = ("into",)
    into: Tensor
    positions: TermPositions | None = None

    def part(self, batch: slice) -> RowSums:
        """The same sums of some batches."""
        return type(self)(self.into[batch], self.positions)

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": (sizes[:3], torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class EntropySums(RowSums):
    """Σ_j w_ij · log₂ w_ij is added to `into`, (B, H, M) float64."""

    term: ClassVar[str] = "weight_log2_weight"


@dataclass(frozen=True, eq=False, slots=True)
class ColumnSums:
    """Σ_i term(w_ij) is added to `into`, (B, H, N) float64. positions: as in `RowSums`."""

    term: ClassVar[str] = "weight"
    written: ClassVar[tuple[str, ...]] = ("into",)
    into: Tensor
    positions: TermPositions | None = None

    def part(self, batch: slice) -> ColumnSums:
        """The same sums of some batches."""
        return type(self)(self.into[batch], self.positions)

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": ((*sizes[:2], sizes[3]), torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class CellReduction:
    """Accumulate into `into` the sum of term(w_ij) or the maximum of w_ij over rows of cell r and columns of cell c.

    positions: as in `RowSums`.

    Shapes: rows (M,) int64, the cell of each row, which never decreases; columns (N,) int64, that of each column; from
    0, and below 0 in none; both are on the CPU. into (B, H, R, C): float64 for sums, float32 for maxima.
    """

    term: ClassVar[str] = "weight"
    written: ClassVar[tuple[str, ...]] = ("into",)
    rows: Tensor
    columns: Tensor
    into: Tensor
    positions: TermPositions | None = None

    def part(self, batch: slice) -> CellReduction:
        """The same cells of some batches."""
        return type(self)(self.rows, self.columns, self.into[batch], self.positions)

    @property
    def is_sum(self) -> bool:
        """Whether weights are summed; else it is their maximum."""
        return self.into.dtype == torch.float64

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        into = (*sizes[:2], *self.into.shape[2:]), torch.float64 if self.is_sum else torch.float32
        return {"rows": (sizes[2:3], torch.int64), "columns": (sizes[3:], torch.int64), "into": into}


@dataclass(frozen=True, eq=False, slots=True)
class LargestWeights:
    """The k largest w_ij of each row in descending order, and their columns, written over earlier values.

    Shapes: weights (B, H, M, k) float32, 0 where there are fewer; columns likewise, int64, without meaning there.
    """

    written: ClassVar[tuple[str, ...]] = ("weights", "columns")
    weights: Tensor
    columns: Tensor

    def part(self, batch: slice) -> LargestWeights:
        """The same of some batches."""
        return LargestWeights(self.weights[batch], self.columns[batch])

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        shape = (*sizes[:3], *self.weights.shape[3:])
        return {"weights": (shape, torch.float32), "columns": (shape, torch.int64)}


@dataclass(frozen=True, eq=False, slots=True)
class DistanceSums:
    """Sums by the distance d_ij = |queries_i - keys_j|.

    Σ_j w_ij is added to `mass`, Σ_j w_ij · d_ij to `moments`, both (B, H, M), and Σ w_ij over the pairs of each bin to
    `histogram`, (B, H, E + 1), all float64. queries (M,) and keys (N,) int64: positions, at most `MAX_DISTANCE` apart.
    edges (E,) int64: where bins but the first begin, ascending, from 1.
    """

    written: ClassVar[tuple[str, ...]] = ("mass", "moments", "histogram")
    queries: Tensor
    keys: Tensor
    edges: Tensor
    mass: Tensor
    moments: Tensor
    histogram: Tensor

    @property
    def positions(self) -> TermPositions:
        """The positions that distances are taken of."""
        return TermPositions(self.queries, self.keys)

    def part(self, batch: slice) -> DistanceSums:
        """The same sums of some batches."""
        sums = (sums[batch] for sums in (self.mass, self.moments, self.histogram))
        return DistanceSums(self.queries, self.keys, self.edges, *sums)

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        edges: Layout = {"edges": ((len(self.edges),), torch.int64)}
        lengths = {"mass": sizes[2], "moments": sizes[2], "histogram": len(self.edges) + 1}
        return edges | {name: ((*sizes[:2], length), torch.float64) for name, length in lengths.items()}


@dataclass(frozen=True, eq=False, slots=True)
class WeightMatrix:
    """w_ij is written to `into`, (B, H, M, N) float32 zeros; masked pairs are not written."""

    written: ClassVar[tuple[str, ...]] = ("into",)
    into: Tensor

    def part(self, batch: slice) -> WeightMatrix:
        """The same of some batches."""
        return WeightMatrix(self.into[batch])

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": (sizes, torch.float32)}


WeightForm: TypeAlias = RowSums | ColumnSums | CellReduction | LargestWeights | DistanceSums | WeightMatrix
"""A reduction in the form of the C code, which `native()` of a lens's reduction returns."""
NO_POSITIONS = LargestWeights, WeightMatrix
"""The reductions that no positions can be passed to."""


def never_decrease(cells: Tensor) -> bool:
    """Whether the cells (M,) never decrease from row to row, but for those below 0, as `CellReduction` needs them."""
    return bool((cells[cells >= 0].diff() >= 0).all())


def check_form(form: WeightForm, sizes: Sizes) -> None:
    """Check that the tensors of a form are as it says, for weights of these sizes. Positions on a device are not read.

    Raises:
        ShapeError, DtypeError: they are not.
    """
    for name, (shape, dtype) in form.layout(sizes).items():
        tensor, label = getattr(form, name), f"{name} of {type(form).__name__}"
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{label} has shape {tuple(tensor.shape)}; it needs {shape}")
        if tensor.dtype != dtype:
            raise DtypeError(f"{label} is {tensor.dtype}; native code takes {dtype}")
        if not tensor.is_contiguous():
            raise ShapeError(f"{label} needs to be contiguous; its strides are {tensor.stride()}")
    if isinstance(form, CellReduction):
        _check_cells(form)
    if not isinstance(form, NO_POSITIONS):
        _check_positions(form, sizes)


def _check_positions(form: RowSums | ColumnSums | CellReduction | DistanceSums, sizes: Sizes) -> None:
    name, positions = type(form).__name__, form.positions
    if positions is None:
        if not isinstance(form, DistanceSums) and TERMS[form.term]:
            raise ShapeError(
                f"{name} sums {form.term}, which reads positions: it needs positions=TermPositions(queries, keys)"
            )
        return
    for label, tensor, size in (("queries", positions.queries, sizes[2]), ("keys", positions.keys, sizes[3])):
        if tuple(tensor.shape) != (size,):
            raise ShapeError(f"{label} of {name} has shape {tuple(tensor.shape)}; it needs {(size,)}")
        if tensor.dtype != torch.int64:
            raise DtypeError(f"{label} of {name} is {tensor.dtype}; native code takes {torch.int64}")
    if not within_max_distance(positions.queries, positions.keys):
        raise ShapeError(f"positions of {name} are more than {MAX_DISTANCE:,} apart")


def _check_cells(form: CellReduction) -> None:
    named = zip(("rows", "columns"), (form.rows, form.columns), form.into.shape[2:], strict=True)
    for name, cells, count in named:
        if cells.numel() and int(cells.max()) >= count:
            raise ShapeError(f"{name} of CellReduction has cell {int(cells.max())}; into has {count} of them")
    if not never_decrease(form.rows):
        raise ShapeError("rows of CellReduction need cells that never decrease, but for those below 0")


def within_max_distance(queries: Tensor, keys: Tensor) -> bool:
    """Whether positions are near enough to each other for `DistanceSums`; those on another device are not read."""
    if not (queries.is_cpu and keys.is_cpu):
        return True
    both = torch.cat([queries, keys])
    return not both.numel() or int(both.max() - both.min()) <= MAX_DISTANCE


FAR = 1e30
"""The number in place of infinity in a logarithm of base 2: 2 to minus it is 0, and 0 times it is 0, not NaN."""
