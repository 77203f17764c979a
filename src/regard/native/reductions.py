"""Reductions of the weights of dot-product attention: sums, maxima and the largest weights; no weights are stored.

A sum over rows, columns or cells names a term of the table in reductions.h. A new one is one function there and a
dataclass here; how many sums are computed in one pass, and by which threads, is the same for all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .flash import BLOCK, BLOCKS, LEAST_WORK, FlashProblem, FlashTiles, write_all
from .library import check_cpu
from .threads import run_units, thread_count

TERMS = "weight", "weight_log2_weight", "weight_distance"
"""What each weight contributes to a sum: the table of reductions.h, in its order."""

MAX_DISTANCE = 2**23
"""The largest distance of positions: distances are computed in float32."""

UNITS = 64
"""Strips of all heads together, at least, where there are rows enough: for many threads, and never by their number."""

Sizes: TypeAlias = tuple[int, int, int, int]
"""(B, H, M, N)."""
Layout: TypeAlias = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""The shape and dtype of each tensor of a reduction."""


class CellMapStruct(ctypes.Structure):
    """The structure `cell_map` of reductions.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("row_cells", "first_pieces", "pieces")),
        *((name, c_int64) for name in ("height", "width", "term")),
        *((name, c_void_p) for name in ("sums", "maxima", "continued", "continued_sums", "continued_maxima")),
    )


class TopKStruct(ctypes.Structure):
    """The structure `topk` of reductions.h."""

    _fields_ = (("k", c_int64), ("weights", c_void_p), ("columns", c_void_p))


class DistancesStruct(ctypes.Structure):
    """The structure `distances` of reductions.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("queries", "keys", "row_ranges", "column_ranges")),
        *(("bins", c_int64), ("edges", c_void_p), ("histogram", c_void_p)),
    )


class ReductionsStruct(ctypes.Structure):
    """The structure `reductions` of reductions.h."""

    _fields_ = (
        *((name, c_int64) for name in ("strips", "map_count", "topk_count")),
        *(("strip_blocks", c_void_p), ("cuts", c_void_p)),
        *(("row_sums", c_void_p * len(TERMS)), ("column_sums", c_void_p * len(TERMS))),
        *((name, c_void_p) for name in ("maps", "topks", "distances")),
    )


@dataclass(frozen=True, eq=False, slots=True)
class RowSums:
    """Σ_j term(w_ij) is added to `into`, (B, H, M) float64."""

    term: ClassVar[str] = "weight"
    into: Tensor

    def part(self, batch: slice) -> RowSums:
        """The same sums of some batches."""
        return type(self)(self.into[batch])

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": (sizes[:3], torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class EntropySums(RowSums):
    """Σ_j w_ij · log₂ w_ij is added to `into`, (B, H, M) float64."""

    term: ClassVar[str] = "weight_log2_weight"


@dataclass(frozen=True, eq=False, slots=True)
class ColumnWeightSums:
    """Σ_i w_ij is added to `into`, (B, H, N) float64."""

    term: ClassVar[str] = "weight"
    into: Tensor

    def part(self, batch: slice) -> ColumnWeightSums:
        """The same sums of some batches."""
        return type(self)(self.into[batch])

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": ((*sizes[:2], sizes[3]), torch.float64)}


@dataclass(frozen=True, eq=False, slots=True)
class CellReduction:
    """Accumulate into `into` the sum or the maximum of w_ij over the rows of cell r and the columns of cell c.

    Shapes: rows (M,) int64, the cell of each row, which never decreases; columns (N,) int64, that of each column; from
    0, and below 0 in none. into (B, H, R, C): float64 for sums, float32 for maxima.
    """

    term: ClassVar[str] = "weight"
    rows: Tensor
    columns: Tensor
    into: Tensor

    def part(self, batch: slice) -> CellReduction:
        """The same cells of some batches."""
        return type(self)(self.rows, self.columns, self.into[batch])

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

    queries: Tensor
    keys: Tensor
    edges: Tensor
    mass: Tensor
    moments: Tensor
    histogram: Tensor

    def part(self, batch: slice) -> DistanceSums:
        """The same sums of some batches."""
        sums = (sums[batch] for sums in (self.mass, self.moments, self.histogram))
        return DistanceSums(self.queries, self.keys, self.edges, *sums)

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        positions: Layout = {
            name: ((size,), torch.int64)
            for name, size in zip(("queries", "keys", "edges"), (*sizes[2:], len(self.edges)), strict=True)
        }
        lengths = {"mass": sizes[2], "moments": sizes[2], "histogram": len(self.edges) + 1}
        return positions | {name: ((*sizes[:2], length), torch.float64) for name, length in lengths.items()}


@dataclass(frozen=True, eq=False, slots=True)
class WeightMatrix:
    """w_ij is written to `into`, (B, H, M, N) float32 zeros; masked pairs are not written."""

    into: Tensor

    def part(self, batch: slice) -> WeightMatrix:
        """The same of some batches."""
        return WeightMatrix(self.into[batch])

    def layout(self, sizes: Sizes) -> Layout:
        """The shape and dtype that each tensor needs."""
        return {"into": (sizes, torch.float32)}


Reduction: TypeAlias = RowSums | ColumnWeightSums | CellReduction | LargestWeights | DistanceSums | WeightMatrix


def reduce_weights(problem: FlashProblem, lse: Tensor, reductions: Sequence[Reduction]) -> None:
    """Reductions of w_ij = exp(s_ij - lse_i) over the pairs of a problem's tiles, in one pass over the weights.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. All tensors are on the CPU, those that are
    written to contiguous. Results do not depend on the number of threads. Without autograd.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as its reduction says; several of `DistanceSums` have
            other positions.
    """
    (batch, heads, rows, _), columns = problem.query.shape, problem.key.shape[2]
    if tuple(lse.shape) != (batch, heads, rows):
        raise ShapeError(f"lse has shape {tuple(lse.shape)}; it needs {(batch, heads, rows)}")
    for reduction in reductions:
        _check(reduction, (batch, heads, rows, columns))
        if isinstance(reduction, WeightMatrix):
            write_all(problem, lse, reduction.into)
    reductions = [reduction for reduction in reductions if not isinstance(reduction, WeightMatrix)]
    if reductions:
        _reduce(problem, lse, reductions)


def _reduce(problem: FlashProblem, lse: Tensor, reductions: Sequence[Reduction]) -> None:
    """All reductions but `WeightMatrix`, whose weights are not stored."""
    (batch, heads, rows, _), columns = problem.query.shape, problem.key.shape[2]
    strips = _strips(problem.tiles, batch * heads)
    count = len(strips) - 1
    by_distance = [reduction for reduction in reductions if isinstance(reduction, DistanceSums)]
    distances = _DistanceBuffers(by_distance, count) if by_distance else None
    row_targets = [(reduction.term, reduction.into) for reduction in reductions if isinstance(reduction, RowSums)]
    for reduction in by_distance:
        row_targets += [("weight", reduction.mass), ("weight_distance", reduction.moments)]
    column_targets = [(each.term, each.into) for each in reductions if isinstance(each, ColumnWeightSums)]
    row_sums = _SumBuffers(row_targets, (batch, heads, 1, rows))
    column_sums = _SumBuffers(column_targets, (batch, heads, count, columns))
    maps = [_CellBuffers(reduction, strips) for reduction in reductions if isinstance(reduction, CellReduction)]
    topks = [
        TopKStruct(reduction.weights.shape[-1], reduction.weights.data_ptr(), reduction.columns.data_ptr())
        for reduction in reductions
        if isinstance(reduction, LargestWeights)
    ]
    cuts, lse = _cuts([cells.rows for cells in maps], rows), lse.float().contiguous()
    map_structs, topk_structs = (
        (CellMapStruct * len(maps))(*(m.struct() for m in maps)),
        (TopKStruct * len(topks))(*topks),
    )
    distance_struct = None if distances is None else distances.struct()
    struct = ReductionsStruct(
        strips=count,
        map_count=len(maps),
        topk_count=len(topks),
        strip_blocks=strips.ctypes.data,
        cuts=cuts.ctypes.data,
        row_sums=row_sums.addresses(),
        column_sums=column_sums.addresses(),
        maps=ctypes.addressof(map_structs),
        topks=ctypes.addressof(topk_structs),
        distances=None if distance_struct is None else ctypes.addressof(distance_struct),
    )
    units = batch * heads * count
    work, _held = problem.arguments(units, BLOCKS, lse=lse.data_ptr(), reductions=ctypes.addressof(struct))
    run_units(library.current().flash_reductions, work, thread_count(problem.flops(), LEAST_WORK))
    for buffers in (row_sums, column_sums, *maps, *([] if distances is None else [distances])):
        buffers.finish()


class _SumBuffers:
    """Sums over rows or columns, computed once for each term: (B, H, strips, ·)."""

    def __init__(self, targets: list[tuple[str, Tensor]], sizes: tuple[int, ...]) -> None:
        self.targets = targets
        self.sums: Mapping[str, Tensor] = {
            term: torch.zeros(sizes, dtype=torch.float64) for term in dict.fromkeys(term for term, _ in targets)
        }

    def addresses(self) -> ctypes.Array[c_void_p]:
        """The address of the sums of each term, null where it is not requested."""
        return (c_void_p * len(TERMS))(*(self.sums[term].data_ptr() if term in self.sums else None for term in TERMS))

    def finish(self) -> None:
        """Add all strips to the tensors of the reductions."""
        totals = {term: sums.sum(2) for term, sums in self.sums.items()}
        for term, into in self.targets:
            into.add_(totals[term])


class _CellBuffers:
    """A cell reduction in the layout of the C code, and the cells that continue from strip to strip."""

    def __init__(self, reduction: CellReduction, strips: np.ndarray) -> None:
        self.reduction = reduction
        self.rows = np.ascontiguousarray(reduction.rows.numpy(), dtype=np.int32)
        self.first, self.pieces = _pieces(reduction.columns.numpy())
        self.continued = _continued_cells(self.rows, strips)
        batch, heads, _, width = reduction.into.shape
        self.apart = reduction.into.new_zeros(batch, heads, len(self.continued), width)

    def struct(self) -> CellMapStruct:
        """The C structure, valid as long as this object lives."""
        into, apart, is_sum = self.reduction.into.data_ptr(), self.apart.data_ptr(), self.reduction.is_sum
        return CellMapStruct(
            row_cells=self.rows.ctypes.data,
            first_pieces=self.first.ctypes.data,
            pieces=self.pieces.ctypes.data,
            height=self.reduction.into.shape[2],
            width=self.reduction.into.shape[3],
            term=TERMS.index(self.reduction.term),
            sums=into if is_sum else None,
            maxima=None if is_sum else into,
            continued=self.continued.ctypes.data,
            continued_sums=apart if is_sum else None,
            continued_maxima=None if is_sum else apart,
        )

    def finish(self) -> None:
        """Join the cells that strips have continued, strip by strip."""
        join = torch.add if self.reduction.is_sum else torch.maximum
        for strip, cell in enumerate(self.continued.tolist()):
            if cell >= 0:
                into = self.reduction.into[:, :, cell]
                join(into, self.apart[:, :, strip], out=into)


class _DistanceBuffers:
    """Positions in the layout of the C code, and one histogram with the edges of all reductions by distance."""

    def __init__(self, reductions: list[DistanceSums], strips: int) -> None:
        queries, keys = reductions[0].queries, reductions[0].keys
        if not all(each.queries.equal(queries) and each.keys.equal(keys) for each in reductions):
            raise ShapeError("several of DistanceSums have other positions; they need the same, or calls of their own")
        self.reductions = reductions
        self.edges = torch.cat([reduction.edges for reduction in reductions]).unique()
        self.ends = torch.tensor([-1.0, *self.edges.tolist(), float("inf")])
        both = torch.cat([queries, keys])
        origin = int(both.min()) if both.numel() else 0
        # C reads whole vectors, and whole groups of rows.
        self.queries, self.keys = (
            (torch.nn.functional.pad(positions, (0, BLOCK)) - origin).float() for positions in (queries, keys)
        )
        self.row_ranges, self.column_ranges = _ranges(self.queries[: len(queries)]), _ranges(self.keys[: len(keys)])
        batch, heads, _ = reductions[0].mass.shape
        self.histogram = torch.zeros(batch, heads, strips, len(self.edges) + 1, dtype=torch.float64)

    def struct(self) -> DistancesStruct:
        """The C structure, valid as long as this object lives."""
        return DistancesStruct(
            queries=self.queries.data_ptr(),
            keys=self.keys.data_ptr(),
            row_ranges=self.row_ranges.data_ptr(),
            column_ranges=self.column_ranges.data_ptr(),
            bins=len(self.edges) + 1,
            edges=self.ends.data_ptr(),
            histogram=self.histogram.data_ptr(),
        )

    def finish(self) -> None:
        """Add the bins between the edges of each reduction to its own histogram."""
        histogram = self.histogram.sum(2)
        begins = torch.cat([self.edges.new_zeros(1), self.edges])
        for reduction in self.reductions:
            reduction.histogram.index_add_(-1, torch.bucketize(begins, reduction.edges, right=True), histogram)


def _ranges(positions: Tensor) -> Tensor:
    """The smallest and largest position of each block: (blocks, 2)."""
    if not len(positions):
        return positions.new_zeros(0, 2)
    filled = torch.cat([positions, positions[-1:].expand(-len(positions) % BLOCK)]).view(-1, BLOCK)
    return torch.stack(filled.aminmax(dim=-1), -1).contiguous()


def _strips(tiles: FlashTiles, pairs: int) -> np.ndarray:
    """Boundaries of strips in blocks of rows, balanced by the number of tiles."""
    widths = -(-(tiles.runs[:, 1] - tiles.runs[:, 0]) // BLOCK)
    spent = np.concatenate([[0], np.cumsum(widths)])[tiles.first] + np.arange(len(tiles.first))
    blocks = len(tiles.first) - 1
    count = min(-(-UNITS // max(pairs, 1)), -(-blocks // BLOCKS))
    cuts = np.searchsorted(spent, spent[-1] * np.arange(1, count) / max(count, 1))
    return np.unique([0, *(cuts // BLOCKS * BLOCKS), blocks]).astype(np.int64)


def _cuts(maps: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """A word for each block of rows: the bit of a row is set if the next row is in another cell, or does not exist."""
    ends = np.zeros(-(-rows // BLOCK) * BLOCK, dtype=bool)
    ends[BLOCK - 1 :: BLOCK] = True
    ends[rows - 1 : rows] = True
    for cells in maps:
        ends[: rows - 1] |= cells[1:] != cells[:-1]
    return np.packbits(ends, bitorder="little").view("<u8")


def _pieces(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns of each block, split at cell boundaries: the first piece of each, and (begin, end, cell)."""
    begins = np.ones(len(cells), dtype=bool)
    begins[1:] = cells[1:] != cells[:-1]
    begins[::BLOCK] = True
    start = np.flatnonzero(begins)
    stop = np.append(start[1:], len(cells))
    start, stop = (bound[cells[start] >= 0] for bound in (start, stop))
    pieces = np.stack([start % BLOCK, (stop - 1) % BLOCK + 1, cells[start]], -1).astype(np.int32)
    first = np.searchsorted(start, np.arange(-(-len(cells) // BLOCK) + 1) * BLOCK)
    return first.astype(np.int64), np.ascontiguousarray(pieces)


def _continued_cells(rows: np.ndarray, strips: np.ndarray) -> np.ndarray:
    """For each strip the cell that began in an earlier one and continues in it, or -1."""
    continued = np.full(len(strips) - 1, -1, dtype=np.int32)
    for strip, row in enumerate((strips[1:-1] * BLOCK).tolist(), 1):
        before, after = rows[:row].max(initial=-1), rows[row:]
        if before >= 0 and (after == before).any():
            continued[strip] = before
    return continued


def _check(reduction: Reduction, sizes: Sizes) -> None:
    """Raise unless the tensors of a reduction are as the C code reads and writes them.

    Raises:
        ShapeError, DtypeError, DeviceError: they are not as the reduction says.
    """
    for name, (shape, dtype) in reduction.layout(sizes).items():
        tensor, label = getattr(reduction, name), f"{name} of {type(reduction).__name__}"
        check_cpu(label, tensor)
        if tuple(tensor.shape) != shape:
            raise ShapeError(f"{label} has shape {tuple(tensor.shape)}; it needs {shape}")
        if tensor.dtype != dtype:
            raise DtypeError(f"{label} is {tensor.dtype}; native code takes {dtype}")
        if not tensor.is_contiguous():
            raise ShapeError(f"{label} needs to be contiguous; its strides are {tensor.stride()}")
    if isinstance(reduction, CellReduction):
        _check_cells(reduction)
    if isinstance(reduction, DistanceSums) and not within_max_distance(reduction.queries, reduction.keys):
        raise ShapeError(f"positions of DistanceSums are more than {MAX_DISTANCE:,} apart")


def _check_cells(reduction: CellReduction) -> None:
    named = zip(("rows", "columns"), (reduction.rows, reduction.columns), reduction.into.shape[2:], strict=True)
    for name, cells, count in named:
        if cells.numel() and int(cells.max()) >= count:
            raise ShapeError(f"{name} of CellReduction has cell {int(cells.max())}; into has {count} of them")
    if not never_decrease(reduction.rows):
        raise ShapeError("rows of CellReduction need cells that never decrease, but for those below 0")


def never_decrease(cells: Tensor) -> bool:
    """Whether the cells (M,) never decrease from row to row, but for those below 0, as `CellReduction` needs them."""
    return bool((cells[cells >= 0].diff() >= 0).all())


def within_max_distance(queries: Tensor, keys: Tensor) -> bool:
    """Whether positions are near enough to each other for `DistanceSums`."""
    both = torch.cat([queries, keys])
    return not both.numel() or int(both.max() - both.min()) <= MAX_DISTANCE
