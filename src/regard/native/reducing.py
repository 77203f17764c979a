"""Reductions of the weights of dot-product attention, by the C functions of `library`: no weight is kept in memory.

What the fields of the structures mean is in reductions.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from ..errors import ShapeError
from . import library
from .flash import BLOCK, BLOCKS, LEAST_WORK, FlashProblem, Tiles
from .reductions import AllWeights, Cells, ColumnSums, Largest, Reach, Reduction, RowTerms, check
from .threads import together, workers
from .weights import write_all

UNITS = 64
"""Strips of all heads together, at least, where there are rows enough: for many threads, and never by their number."""


class MapWork(ctypes.Structure):
    """The structure `map` of reductions.h."""

    _fields_ = (
        *((name, c_void_p) for name in ("rows", "first", "pieces")),
        *((name, c_int64) for name in ("height", "width")),
        *((name, c_void_p) for name in ("sums", "largest", "begun", "begun_sums", "begun_largest")),
    )


class TopWork(ctypes.Structure):
    """The structure `top` of reductions.h."""

    _fields_ = (("most", c_int64), ("weights", c_void_p), ("columns", c_void_p))


class ReachWork(ctypes.Structure):
    """The structure `reach` of reductions.h."""

    _fields_ = (
        ("bins", c_int64),
        *((name, c_void_p) for name in ("edges", "queries", "keys", "of_rows", "of_columns")),
        *((name, c_void_p) for name in ("mass", "moments", "histogram")),
    )


class ReductionsWork(ctypes.Structure):
    """The structure `reductions` of reductions.h."""

    _fields_ = (
        *((name, c_int64) for name in ("strips", "maps", "tops")),
        *((name, c_void_p) for name in ("strip", "cuts", "terms", "column_sums", "map", "top", "reach")),
    )


def reduce_weights(problem: FlashProblem, lse: Tensor, reductions: Sequence[Reduction]) -> None:
    """Reductions of w_ij = exp(s_ij - lse_i) over the pairs of its tiles: one pass for all sums, one for each map.

    lse (B, H, M) float32: rows where it is no finite number have weights 0. All tensors are on the CPU, those that are
    written to contiguous. What comes out does not depend on the number of threads. Autograd sees nothing of it.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as its reduction says; several of `Reach` have other
            positions.
    """
    (batch, heads, rows, _), columns = problem.query.shape, problem.key.shape[2]
    if tuple(lse.shape) != (batch, heads, rows):
        raise ShapeError(f"lse has shape {tuple(lse.shape)}; it needs {(batch, heads, rows)}")
    for each in reductions:
        check(each, (batch, heads, rows, columns))
        if isinstance(each, AllWeights):
            write_all(problem, lse, each.into)
    if not all(isinstance(each, AllWeights) for each in reductions):
        _add_up(problem, lse, reductions)


def _add_up(problem: FlashProblem, lse: Tensor, reductions: Sequence[Reduction]) -> None:
    """Those that are sums, or the largest, of weights that are not kept."""
    (batch, heads, rows, _), columns = problem.query.shape, problem.key.shape[2]
    strips = _strips(problem.tiles, batch * heads)
    count = len(strips) - 1
    terms = _Sums([each.into for each in reductions if isinstance(each, RowTerms)], (batch, heads, 1, rows))
    sums = _Sums([each.into for each in reductions if isinstance(each, ColumnSums)], (batch, heads, count, columns))
    maps = [_Map(each, strips) for each in reductions if isinstance(each, Cells)]
    reaches = [each for each in reductions if isinstance(each, Reach)]
    reach = _Reaches(reaches, count) if reaches else None
    tops = [
        TopWork(each.weights.shape[-1], each.weights.data_ptr(), each.columns.data_ptr())
        for each in reductions
        if isinstance(each, Largest)
    ]
    cuts, lse = _cuts([each.rows for each in maps], rows), lse.float().contiguous()
    of_maps, of_tops = (MapWork * len(maps))(*(each.structure() for each in maps)), (TopWork * len(tops))(*tops)
    of_reach = None if reach is None else reach.structure()
    asked = ReductionsWork(
        strips=count,
        maps=len(maps),
        tops=len(tops),
        strip=strips.ctypes.data,
        cuts=cuts.ctypes.data,
        terms=terms.place(),
        column_sums=sums.place(),
        map=ctypes.addressof(of_maps),
        top=ctypes.addressof(of_tops),
        reach=None if of_reach is None else ctypes.addressof(of_reach),
    )
    work, _held = problem.arguments(
        batch * heads * count, BLOCKS, lse=lse.data_ptr(), reductions=ctypes.addressof(asked)
    )
    together(library.current().flash_reductions, work, workers(problem.flops(), LEAST_WORK))
    for each in (terms, sums, *maps, *([] if reach is None else [reach])):
        each.finish()


class _Sums:
    """What the C code adds up once, strip by strip, for all that ask for it: (B, H, strips, ·)."""

    def __init__(self, into: list[Tensor], sizes: tuple[int, ...]) -> None:
        self.into = into
        self.sums = torch.zeros(sizes if into else 0, dtype=torch.float64)

    def place(self) -> int | None:
        """Where the C code adds to, if anywhere."""
        return self.sums.data_ptr() if self.into else None

    def finish(self) -> None:
        """All strips together are added to what asked for them."""
        if self.into:
            added = self.sums.sum(2)
            for into in self.into:
                into.add_(added)


class _Map:
    """Cells as the C code takes them, and what it writes apart."""

    def __init__(self, of: Cells, strips: np.ndarray) -> None:
        self.of = of
        self.rows = np.ascontiguousarray(of.rows.numpy(), dtype=np.int32)
        self.first, self.pieces = _pieces(of.columns.numpy())
        self.begun = _begun(self.rows, strips)
        batch, heads, _, width = of.into.shape
        self.apart = of.into.new_zeros(batch, heads, len(self.begun), width)

    def structure(self) -> MapWork:
        """The structure of reductions.h, as long as this object lives."""
        into, apart, sums = self.of.into.data_ptr(), self.apart.data_ptr(), self.of.sums
        return MapWork(
            rows=self.rows.ctypes.data,
            first=self.first.ctypes.data,
            pieces=self.pieces.ctypes.data,
            height=self.of.into.shape[2],
            width=self.of.into.shape[3],
            sums=into if sums else None,
            largest=None if sums else into,
            begun=self.begun.ctypes.data,
            begun_sums=apart if sums else None,
            begun_largest=None if sums else apart,
        )

    def finish(self) -> None:
        """What strips have written apart joins the rest, strip by strip."""
        join = torch.add if self.of.sums else torch.maximum
        for strip, cell in enumerate(self.begun.tolist()):
            if cell >= 0:
                into = self.of.into[:, :, cell]
                join(into, self.apart[:, :, strip], out=into)


class _Reaches:
    """Distances as the C code takes them, with the edges of all that ask for them: bins are put together again."""

    def __init__(self, asked: list[Reach], strips: int) -> None:
        queries, keys = asked[0].queries, asked[0].keys
        if not all(each.queries.equal(queries) and each.keys.equal(keys) for each in asked):
            raise ShapeError("several of Reach have other positions; they need the same, or to be asked for apart")
        self.asked = asked
        self.edges = torch.cat([each.edges for each in asked]).unique()
        self.ends = torch.tensor([-1.0, *self.edges.tolist(), float("inf")])
        both = torch.cat([queries, keys])
        origin = int(both.min()) if both.numel() else 0
        self.queries, self.keys = ((of - origin).float() for of in (queries, torch.nn.functional.pad(keys, (0, BLOCK))))
        self.of_rows, self.of_columns = _ranges(self.queries), _ranges(self.keys[: len(keys)])
        batch, heads, rows = asked[0].mass.shape
        self.mass, self.moments = torch.zeros(2, batch, heads, rows, dtype=torch.float64).unbind()
        self.histogram = torch.zeros(batch, heads, strips, len(self.edges) + 1, dtype=torch.float64)

    def structure(self) -> ReachWork:
        """The structure of reductions.h, as long as this object lives."""
        return ReachWork(
            bins=len(self.edges) + 1,
            edges=self.ends.data_ptr(),
            queries=self.queries.data_ptr(),
            keys=self.keys.data_ptr(),
            of_rows=self.of_rows.data_ptr(),
            of_columns=self.of_columns.data_ptr(),
            mass=self.mass.data_ptr(),
            moments=self.moments.data_ptr(),
            histogram=self.histogram.data_ptr(),
        )

    def finish(self) -> None:
        """Each gets the bins between its own edges."""
        histogram = self.histogram.sum(2)
        begins = torch.cat([self.edges.new_zeros(1), self.edges])
        for each in self.asked:
            each.mass.add_(self.mass)
            each.moments.add_(self.moments)
            each.histogram.index_add_(-1, torch.bucketize(begins, each.edges, right=True), histogram)


def _ranges(positions: Tensor) -> Tensor:
    """The least and the largest position of each block: (blocks, 2)."""
    if not len(positions):
        return positions.new_zeros(0, 2)
    filled = torch.cat([positions, positions[-1:].expand(-len(positions) % BLOCK)]).view(-1, BLOCK)
    return torch.stack(filled.aminmax(dim=-1), -1).contiguous()


def _strips(tiles: Tiles, pairs: int) -> np.ndarray:
    """Where strips begin and the last one ends, in blocks of rows: about as many tiles in each."""
    widths = -(-(tiles.runs[:, 1] - tiles.runs[:, 0]) // BLOCK)
    spent = np.concatenate([[0], np.cumsum(widths)])[tiles.first] + np.arange(len(tiles.first))
    blocks = len(tiles.first) - 1
    count = min(-(-UNITS // max(pairs, 1)), -(-blocks // BLOCKS))
    cuts = np.searchsorted(spent, spent[-1] * np.arange(1, count) / max(count, 1))
    return np.unique([0, *(cuts // BLOCKS * BLOCKS), blocks]).astype(np.int64)


def _cuts(maps: Sequence[np.ndarray], rows: int) -> np.ndarray:
    """A word for each block of rows: a bit for each row after which another cell begins, or no row comes."""
    ends = np.zeros(-(-rows // BLOCK) * BLOCK, dtype=bool)
    ends[BLOCK - 1 :: BLOCK] = True
    ends[rows - 1 : rows] = True
    for cells in maps:
        ends[: rows - 1] |= cells[1:] != cells[:-1]
    return np.packbits(ends, bitorder="little").view("<u8")


def _pieces(cells: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The columns of each block, cut where another cell begins: the first piece of each, and (from, to, cell)."""
    begins = np.ones(len(cells), dtype=bool)
    begins[1:] = cells[1:] != cells[:-1]
    begins[::BLOCK] = True
    start = np.flatnonzero(begins)
    stop = np.append(start[1:], len(cells))
    start, stop = (of[cells[start] >= 0] for of in (start, stop))
    pieces = np.stack([start % BLOCK, (stop - 1) % BLOCK + 1, cells[start]], -1).astype(np.int32)
    first = np.searchsorted(start, np.arange(-(-len(cells) // BLOCK) + 1) * BLOCK)
    return first.astype(np.int64), np.ascontiguousarray(pieces)


def _begun(rows: np.ndarray, strips: np.ndarray) -> np.ndarray:
    """For each strip the cell that an earlier one has begun and that goes on in it, or -1."""
    begun = np.full(len(strips) - 1, -1, dtype=np.int32)
    for strip, row in enumerate((strips[1:-1] * BLOCK).tolist(), 1):
        before, after = rows[:row].max(initial=-1), rows[row:]
        if before >= 0 and (after == before).any():
            begun[strip] = before
    return begun
