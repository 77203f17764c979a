"""What the kernel of the lens pass adds up, each as one named tuple; a field that is None is a result nobody wants.

All tensors are contiguous but that of the matrix. Sums are float64, numbers of cells, positions and ranges int32.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .kernel_arguments import PairStrides, StridedRows


class TermSums(NamedTuple):
    """Sums of each term of `lenses.forms.TERMS`."""

    weight: Tensor | None = None
    weight_log2_weight: Tensor | None = None
    weight_distance: Tensor | None = None


class PositionsArgument(NamedTuple):
    """The positions of queries (M,) and keys (N,), as numbers from the first key's on."""

    queries: Tensor | None = None
    keys: Tensor | None = None


class CellsArgument(NamedTuple):
    """Sums and maxima (B, H, height, width), the latter as the bits of float32, over cells of rows and columns.

    rows (M,), columns (N,): the cell of each, below 0 for none. row_ranges, column_ranges (·, 2): the first and last
    cell of each tile's rows and columns.
    """

    sums: TermSums = TermSums()
    maxima: Tensor | None = None
    rows: Tensor | None = None
    columns: Tensor | None = None
    row_ranges: Tensor | None = None
    column_ranges: Tensor | None = None
    height: int = 0
    width: int = 0


class HistogramArgument(NamedTuple):
    """Sums (B, H, bins) by distance: bin b has distances from ends[b] to below ends[b + 1]; see `CellsArgument`."""

    sums: Tensor | None = None
    ends: Tensor | None = None
    query_ranges: Tensor | None = None
    key_ranges: Tensor | None = None
    bins: int = 0


class LargestArgument(NamedTuple):
    """The largest weights (B, H, M, K) float32 of each row, and their columns, int64."""

    weights: Tensor | None = None
    columns: Tensor | None = None


class MatrixArgument(NamedTuple):
    """The weights (B, H, M, N), float32, and in memory of the same strides their products with their exponents."""

    weights: StridedRows = StridedRows(None)
    logs: Tensor | None = None


class KeepArgument(NamedTuple):
    """Which pairs exist, beside the mask: (B or 1, H or 1, M or 1, N or 1) uint8, with `pair_strides`."""

    pairs: Tensor | None = None
    strides: PairStrides | None = None


class WantedSums(NamedTuple):
    """All that one launch adds up."""

    rows: TermSums = TermSums()
    columns: TermSums = TermSums()
    cells: CellsArgument = CellsArgument()
    histogram: HistogramArgument = HistogramArgument()
    largest: LargestArgument = LargestArgument()
    matrix: MatrixArgument = MatrixArgument()
    positions: PositionsArgument = PositionsArgument()
