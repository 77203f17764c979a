"""Additive scores, a tile at a time, by the C functions of `library`.

The layouts and what the fields of the structures mean are in additive.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .library import check_cpu, last_contiguous
from .threads import parts, share, together, workers

STRIP = 64  # additive.h has the same
FEATURES_AT_ONCE = 16
WHOLE = slice(None)

# Up to so many queries for each key, tanh of each pair is faster than to prepare the keys.
FEW_QUERIES = 2

# Features times pairs that are worth a thread of their own: some 20 microseconds.
LEAST_WORK = 2**19
LEAST_ENTRIES = 2**15

EXPONENTIALS, TANGENTS, DIRECT = range(3)

ADDITIVE = (
    *(("taken", c_int64), ("units", c_int64)),
    *((name, c_int64) for name in ("heads", "key_heads", "rows", "columns", "features", "padded", "form")),
    *(("query", c_void_p), ("query_head", c_int64), ("query_row", c_int64)),
    *(("key", c_void_p), ("key_head", c_int64), ("key_row", c_int64)),
    *((name, c_void_p) for name in ("weight", "prepared_query", "query_bound", "prepared_key", "key_bound")),
    *(("weight_sum", c_float), ("weight_bound", c_float)),
)
TILE = (
    *((name, c_int64) for name in ("row_begin", "row_end", "column_begin", "column_end", "begin", "end")),
    *(("pairs", c_void_p), ("pairs_head", c_int64), ("pairs_row", c_int64)),
)


class AdditiveWork(ctypes.Structure):
    """The structure `additive` of additive.h."""

    _fields_ = ADDITIVE


class Tile(ctypes.Structure):
    """The structure `tile` of additive.h."""

    _fields_ = TILE


class Prepared:
    """Queries, keys and a weight made ready for tiles of score(i, j) = Σ_a weight_a · tanh(query_ia + key_ja).

    The exponentials are taken here, once per token; a pair then costs one multiply-add and a fourth of a division for
    each feature, by tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y). Where all entries are within [-1, 1], tanh(x + y) is
    (tanh x + tanh y) / (1 + tanh x · tanh y) instead, whose error is relative: small scores stay exact.

    query (H, M, A), key (Hk, N, A), weight (A,): float32 on the CPU. Hk divides H, and query head h meets key head
    ⌊h / (H / Hk)⌋. Heads and rows may have any stride; a last axis that is not contiguous is copied. Any size may be
    0. They must not change while this is in use. Autograd does not see what is done here.

    NaN in a query or key gives NaN in its own row or column of the scores; infinity is what tanh makes of it.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """

    def __init__(self, query: Tensor, key: Tensor, weight: Tensor) -> None:
        _check(query, key, weight)
        self.library = library.current()
        self.query, self.key = last_contiguous(query.detach()), last_contiguous(key.detach())
        self.heads, self.rows, self.features = query.shape
        self.key_heads, self.columns = key.shape[:2]
        self.group = self.heads // max(self.key_heads, 1)
        self.strips = -(-self.columns // STRIP)
        self.padded = -(-self.features // FEATURES_AT_ONCE) * FEATURES_AT_ONCE
        self.weight = weight.detach()
        self.work = self._structure()
        if self.query.numel() and self.key.numel() and self.rows * self.group > FEW_QUERIES:
            self._prepare()

    def scores(self, rows: slice = WHOLE, columns: slice = WHOLE, out: Tensor | None = None) -> Tensor:
        """The scores of some rows and columns, (H, rows, columns), written into `out` where it is given.

        rows and columns: slices of step 1. Columns that begin and end at multiples of 64 are the fastest.

        Raises:
            ShapeError: a slice has another step, or `out` is not of this shape with a contiguous last axis.
        """
        (top, bottom), (left, right) = interval(rows, self.rows), interval(columns, self.columns)
        shape = (self.heads, bottom - top, right - left)
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        check_pairs("out", out, shape)
        if out.stride(-1) != 1 and right - left > 1:
            raise ShapeError(f"out has strides {out.stride()}; its last axis must be contiguous: pass out.contiguous()")
        if not out.numel():
            return out
        units = shape[0] * shape[1]
        count = workers(units * shape[2] * self.features, LEAST_WORK)
        across = 1 if units >= count else -(-count // units)  # few rows are cut along their keys
        tile = (out.data_ptr(), out.stride(0), out.stride(1))

        def call(_: int, job: tuple[tuple[int, int], tuple[int, int]]) -> None:
            (begin, end), (first, last) = job
            pairs = tile[0] + (first - left) * 4
            work = Tile(top, bottom, first, last, begin, end, pairs, *tile[1:])
            self.library.scores(ctypes.byref(self.work), ctypes.byref(work))

        jobs = [(u, c) for u in parts(0, units, min(units, count)) for c in parts(left, right, across, STRIP)]
        share(call, jobs, count)
        return out

    def _structure(self) -> AdditiveWork:
        """What the C code reads; its memory is held by this object."""
        self._padded_weight = torch.zeros(self.padded + FEATURES_AT_ONCE)
        self._padded_weight[: self.features] = self.weight
        total, bound = self.weight.double().sum().item(), 0.0
        if self.features:
            bound = self.weight.abs().amax().item()  # NaN where one is NaN
        self._prepared = [torch.empty(0)] * 4
        query, key = self.query, self.key
        return AdditiveWork(
            *(0, 0, self.heads, self.key_heads, self.rows, self.columns, self.features, self.padded, DIRECT),
            *(query.data_ptr(), query.stride(0), query.stride(1), key.data_ptr(), key.stride(0), key.stride(1)),
            *(self._padded_weight.data_ptr(), None, None, None, None, total, bound),
        )

    def _prepare(self) -> None:
        heads, key_heads, padded = self.heads, self.key_heads, self.padded
        query, query_bound = torch.empty(heads, self.rows, padded), torch.empty(heads, self.rows)
        key, key_bound = torch.empty(key_heads, self.strips, padded, STRIP), torch.empty(key_heads, self.strips)
        self._prepared = [query, query_bound, key, key_bound]  # held for as long as C may read it
        work = self.work
        work.prepared_query, work.query_bound = query.data_ptr(), query_bound.data_ptr()
        work.prepared_key, work.key_bound = key.data_ptr(), key_bound.data_ptr()
        work.units = heads * -(-self.rows // STRIP) + key_heads * self.strips
        threads = workers(query.numel() + key.numel(), LEAST_ENTRIES)
        together(self.library.bounds, work, threads)
        largest = max(query_bound.amax().item(), key_bound.amax().item())
        work.form, work.taken = TANGENTS if largest <= 1 else EXPONENTIALS, 0
        together(self.library.prepare, work, threads)


def _check(query: Tensor, key: Tensor, weight: Tensor) -> None:
    wanted = (("query", query, 3, "(H, M, A)"), ("key", key, 3, "(Hk, N, A)"), ("weight", weight, 1, "(A,)"))
    for name, tensor, axes, shape in wanted:
        check_float32(name, tensor)
        if tensor.ndim != axes:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs to be {shape}")
    if not query.shape[-1] == key.shape[-1] == weight.shape[0]:
        raise ShapeError(
            f"query, key and weight have {query.shape[-1]}, {key.shape[-1]} and {weight.shape[0]} features; they need "
            "the same number"
        )
    if query.shape[0] != key.shape[0] and (key.shape[0] == 0 or query.shape[0] % key.shape[0]):
        raise ShapeError(f"query has {query.shape[0]} heads and key {key.shape[0]}; those of key need to divide them")


def check_float32(name: str, tensor: Tensor) -> None:
    """Refuse a tensor of other numbers, or elsewhere than in the processor's own memory."""
    if tensor.dtype != torch.float32:
        raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32: pass {name}.float()")
    check_cpu(name, tensor)


def check_pairs(name: str, tensor: Tensor, shape: tuple[int, int, int]) -> None:
    """Refuse what is not a number for each pair of a tile."""
    check_float32(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; the tile needs {shape}: heads, rows, columns")


def interval(part: slice, length: int) -> tuple[int, int]:
    """Where a part of some rows or columns begins and ends."""
    begin, end, step = part.indices(length)
    if step != 1:
        raise ShapeError(f"a tile of every {step}th row or column is asked for; native code takes slices of step 1")
    return begin, max(begin, end)
