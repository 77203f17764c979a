"""Reductions of the weights of dot-product attention: sums, maxima and the largest weights; no weights are stored.

A sum over rows, columns or cells names a term: the contribution of one weight. A new sum is a name in the tables here
and in reductions.h, a C function in reduce_tile.h and a dataclass here with that `term`; the pass over the tiles, the
threads and the positions that a term may read are the same for all.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from ...errors import ShapeError
from ...lenses.forms import (
    NO_POSITIONS,
    TERMS,
    CellReduction,
    ColumnSums,
    DistanceSums,
    LargestWeights,
    RowSums,
    Sizes,
    TermPositions,
    WeightForm,
    WeightMatrix,
    check_form,
)
from ...tiles.tile_bits import BLOCK, TileBits
from . import library
from .flash_tiles import LEAST_WORK, ROW_BLOCKS, FlashProblem, rows_struct
from .library import check_cpu
from .threads import run_units, thread_count
from .write_weights import write_all

UNITS = 64
"""The least number of strips of all heads together, where there are rows enough. Results depend on the strips, and so
their number does not depend on the number of threads."""


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
        *((name, c_void_p) for name in ("row_ranges", "column_ranges")),
        *(("bins", c_int64), ("edges", c_void_p), ("histogram", c_void_p)),
    )


class ReductionsStruct(ctypes.Structure):
    """The structure `reductions` of reductions.h."""

    _fields_ = (
        *((name, c_int64) for name in ("strips", "map_count", "topk_count")),
        *(("strip_blocks", c_void_p), ("cuts", c_void_p)),
        *(("row_sums", c_void_p * len(TERMS)), ("column_sums", c_void_p * len(TERMS))),
        *((name, c_void_p) for name in ("maps", "topks", "query_positions", "key_positions", "distances")),
    )


def reduce_weights(problem: FlashProblem, lse: Tensor, reductions: Sequence[WeightForm]) -> None:
    """Reductions of w_ij = exp(s_ij - lse_i) over the pairs of a problem's tiles, in one pass over the weights.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. All tensors are on the CPU, those that are
    written to contiguous. Results do not depend on the number of threads. Without autograd.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as its reduction says; positions are missing, or not
            the same in all reductions.
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


def _reduce(problem: FlashProblem, lse: Tensor, reductions: Sequence[WeightForm]) -> None:
    """All reductions but `WeightMatrix`, whose weights are not stored."""
    (batch, heads, rows, _), columns = problem.query.shape, problem.key.shape[2]
    strips = _strips(problem.tiles, batch * heads)
    count = len(strips) - 1
    by_distance = [reduction for reduction in reductions if isinstance(reduction, DistanceSums)]
    positions = _PositionBuffers.from_reductions(reductions)
    distances = _DistanceBuffers(by_distance, positions, count) if by_distance and positions is not None else None
    row_targets = [(reduction.term, reduction.into) for reduction in reductions if isinstance(reduction, RowSums)]
    for reduction in by_distance:
        row_targets += [("weight", reduction.mass), ("weight_distance", reduction.moments)]
    column_targets = [(each.term, each.into) for each in reductions if isinstance(each, ColumnSums)]
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
        query_positions=None if positions is None else positions.queries.data_ptr(),
        key_positions=None if positions is None else positions.keys.data_ptr(),
        distances=None if distance_struct is None else ctypes.addressof(distance_struct),
    )
    units = batch * heads * count
    work, _held = problem.arguments(
        units, row_blocks=ROW_BLOCKS, lse=rows_struct(lse), reductions=ctypes.addressof(struct)
    )
    run_units(library.current().flash_reductions, work, thread_count(problem.flops(), LEAST_WORK))
    for buffers in (row_sums, column_sums, *maps, *([] if distances is None else [distances])):
        buffers.finish()


class _SumBuffers:
    """Sums over rows or columns, computed once for each term: (B, H, strips, ·)."""

    def __init__(self, targets: list[tuple[str, Tensor]], sizes: tuple[int, ...]) -> None:
        self.targets = targets
        self.sums: Mapping[str, Tensor] = {
            term: torch.zeros(sizes, dtype=torch.float64, device="cpu")
            for term in dict.fromkeys(term for term, _ in targets)
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
            term=list(TERMS).index(self.reduction.term),
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


class _PositionBuffers:
    """Positions in the layout of the C code: float32, from the smallest on, padded to whole blocks."""

    def __init__(self, positions: TermPositions) -> None:
        both = torch.cat([positions.queries, positions.keys])
        origin = int(both.min()) if both.numel() else 0
        # C reads whole vectors, and whole groups of rows.
        self.queries, self.keys = (
            (torch.nn.functional.pad(each, (0, BLOCK)) - origin).float() for each in (positions.queries, positions.keys)
        )
        self.row_ranges = _ranges(self.queries[: len(positions.queries)])
        self.column_ranges = _ranges(self.keys[: len(positions.keys)])

    @classmethod
    def from_reductions(cls, reductions: Sequence[WeightForm]) -> _PositionBuffers | None:
        """The positions that the reductions have in common; None where none of them reads any."""
        found = [reduction.positions for reduction in reductions if not isinstance(reduction, NO_POSITIONS)]
        known = [positions for positions in found if positions is not None]
        if not known:
            return None
        first, *others = known
        if not all(positions.equal(first) for positions in others):
            raise ShapeError("several reductions have other positions; they need the same, or calls of their own")
        return cls(first)


class _DistanceBuffers:
    """One histogram with the edges of all reductions by distance, in the layout of the C code."""

    def __init__(self, reductions: list[DistanceSums], positions: _PositionBuffers, strips: int) -> None:
        self.reductions, self.positions = reductions, positions
        self.edges = torch.cat([reduction.edges for reduction in reductions]).unique()
        self.ends = torch.tensor([-1.0, *self.edges.tolist(), float("inf")], device="cpu")
        batch, heads, _ = reductions[0].mass.shape
        self.histogram = torch.zeros(batch, heads, strips, len(self.edges) + 1, dtype=torch.float64, device="cpu")

    def struct(self) -> DistancesStruct:
        """The C structure, valid as long as this object lives."""
        return DistancesStruct(
            row_ranges=self.positions.row_ranges.data_ptr(),
            column_ranges=self.positions.column_ranges.data_ptr(),
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


def _strips(tiles: TileBits, pairs: int) -> np.ndarray:
    """Boundaries of strips in blocks of rows, balanced by the number of tiles."""
    widths = -(-(tiles.runs[:, 1] - tiles.runs[:, 0]) // BLOCK)
    spent = np.concatenate([[0], np.cumsum(widths)])[tiles.first] + np.arange(len(tiles.first))
    blocks = len(tiles.first) - 1
    count = min(-(-UNITS // max(pairs, 1)), -(-blocks // ROW_BLOCKS))
    cuts = np.searchsorted(spent, spent[-1] * np.arange(1, count) / max(count, 1))
    return np.unique([0, *(cuts // ROW_BLOCKS * ROW_BLOCKS), blocks]).astype(np.int64)


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


def _check(reduction: WeightForm, sizes: Sizes) -> None:
    """Raise unless the tensors of a reduction are as the C code reads and writes them.

    Raises:
        ShapeError, DtypeError, DeviceError: they are not as the reduction says.
    """
    name = type(reduction).__name__
    tensors = {label: getattr(reduction, label) for label in reduction.layout(sizes)}
    if not isinstance(reduction, NO_POSITIONS) and (positions := reduction.positions) is not None:
        tensors |= {"queries": positions.queries, "keys": positions.keys}
    for label, tensor in tensors.items():
        check_cpu(f"{label} of {name}", tensor)
    check_form(reduction, sizes)
