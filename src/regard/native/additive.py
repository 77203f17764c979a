"""Additive scores and their gradient, a tile at a time, by the C functions of `library`.

The layouts and what the fields of the structures mean are in additive.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .inputs import check_cpu, last_contiguous
from .threads import parts, share, workers

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
SUMS = tuple((name, c_void_p) for name in ("query", "key", "weight", "scratch"))


class _Additive(ctypes.Structure):
    _fields_ = ADDITIVE


class _Tile(ctypes.Structure):
    _fields_ = TILE


class _Sums(ctypes.Structure):
    _fields_ = SUMS


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
        self._library = library.current()
        self.query, self.key = last_contiguous(query.detach()), last_contiguous(key.detach())
        self.heads, self.rows, self.features = query.shape
        self.key_heads, self.columns = key.shape[:2]
        self.group = self.heads // max(self.key_heads, 1)
        self.strips = -(-self.columns // STRIP)
        self.padded = -(-self.features // FEATURES_AT_ONCE) * FEATURES_AT_ONCE
        self.weight = weight.detach()
        self._c = self._structure()
        if self.query.numel() and self.key.numel() and self.rows * self.group > FEW_QUERIES:
            self._prepare()

    def scores(self, rows: slice = WHOLE, columns: slice = WHOLE, out: Tensor | None = None) -> Tensor:
        """The scores of some rows and columns, (H, rows, columns), written into `out` where it is given.

        rows and columns: slices of step 1. Columns that begin and end at multiples of 64 are the fastest.

        Raises:
            ShapeError: a slice has another step, or `out` is not of this shape with a contiguous last axis.
        """
        (top, bottom), (left, right) = _interval(rows, self.rows), _interval(columns, self.columns)
        shape = (self.heads, bottom - top, right - left)
        if out is None:
            out = torch.empty(shape, dtype=torch.float32)
        _check_pairs("out", out, shape)
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
            work = _Tile(top, bottom, first, last, begin, end, pairs, *tile[1:])
            self._library.scores(ctypes.byref(self._c), ctypes.byref(work))

        jobs = [(u, c) for u in parts(0, units, min(units, count)) for c in parts(left, right, across, STRIP)]
        share(call, jobs, count)
        return out

    def gradients(self) -> Gradients:
        """Sums for the gradient, to which tiles are added one by one."""
        return Gradients(self)

    def _structure(self) -> _Additive:
        """What the C code reads; its memory is held by this object."""
        self._padded_weight = torch.zeros(self.padded + FEATURES_AT_ONCE)
        self._padded_weight[: self.features] = self.weight
        total, bound = self.weight.double().sum().item(), 0.0
        if self.features:
            bound = self.weight.abs().amax().item()  # NaN where one is NaN
        self._prepared = [torch.empty(0)] * 4
        query, key = self.query, self.key
        return _Additive(
            *(self.heads, self.key_heads, self.rows, self.columns, self.features, self.padded, DIRECT),
            *(query.data_ptr(), query.stride(0), query.stride(1), key.data_ptr(), key.stride(0), key.stride(1)),
            *(self._padded_weight.data_ptr(), None, None, None, None, total, bound),
        )

    def _prepare(self) -> None:
        heads, key_heads, padded = self.heads, self.key_heads, self.padded
        query, query_bound = torch.empty(heads, self.rows, padded), torch.empty(heads, self.rows)
        key, key_bound = torch.empty(key_heads, self.strips, padded, STRIP), torch.empty(key_heads, self.strips)
        self._prepared = [query, query_bound, key, key_bound]  # held for as long as C may read it
        c = self._c
        c.prepared_query, c.query_bound = query.data_ptr(), query_bound.data_ptr()
        c.prepared_key, c.key_bound = key.data_ptr(), key_bound.data_ptr()
        self._share(self._library.query_bounds, heads * self.rows, padded)
        self._share(self._library.key_bounds, key_heads * self.strips, STRIP * padded)
        largest = max(query_bound.amax().item(), key_bound.amax().item())
        c.form = TANGENTS if largest <= 1 else EXPONENTIALS
        self._share(self._library.prepare_query, heads * self.rows, padded)
        self._share(self._library.prepare_key, key_heads * self.strips, STRIP * padded)

    def _share(self, function, units: int, entries: int) -> None:
        count = workers(units * entries, LEAST_ENTRIES)
        share(lambda _, part: function(ctypes.byref(self._c), *part), parts(0, units, count), count)


class Gradients:
    """The gradient of a loss by query, key and weight, summed over tiles of its gradient by the scores.

    With g_ij the gradient by score(i, j) and t_ija = tanh(query_ia + key_ja), which is taken anew and never stored:
    query_ia is Σ_j g_ij weight_a (1 - t²), key_ja the same over i, weight_a is Σ_ij g_ij t_ija.

    Each worker adds to memory of its own: the result depends on the number of threads in its last bits alone.
    """

    def __init__(self, prepared: Prepared) -> None:
        of = self.prepared = prepared
        self.workers = torch.get_num_threads()
        self.ways = _ways(of.key_heads, self.workers)
        self.query = torch.zeros(of.heads, of.rows, of.features)
        self.key = torch.zeros(self.ways, of.key_heads, of.strips, of.padded, STRIP)
        self.weight = torch.zeros(self.ways, of.key_heads, of.padded, dtype=torch.float64)
        self.scratch = torch.empty(self.workers, of._library.scratch(of.padded))

    def add(self, upstream: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Add the tile of some rows and columns: `upstream` (H, rows, columns), the gradient by its scores.

        Raises:
            ShapeError: `upstream` is not of this shape, or a slice has a step.
        """
        of = self.prepared
        (top, bottom), (left, right) = _interval(rows, of.rows), _interval(columns, of.columns)
        _check_pairs("upstream", upstream, (of.heads, bottom - top, right - left))
        if not upstream.numel() or not of.features:
            return
        upstream = last_contiguous(upstream.detach())
        pairs = (upstream.data_ptr(), upstream.stride(0), upstream.stride(1))

        def call(worker: int, job: tuple[int, int, int]) -> None:
            way, begin, end = job
            own = (self.query, self.key[way], self.weight[way, begin // per_head], self.scratch[worker])
            sums = _Sums(*(tensor.data_ptr() for tensor in own))
            tile = _Tile(top, bottom, left, right, begin, end, *pairs)
            of._library.gradient(ctypes.byref(of._c), ctypes.byref(tile), ctypes.byref(sums))

        per_head = of.group * (bottom - top)  # the rows that share a key head
        jobs = [
            (way, head * per_head + begin, head * per_head + end)
            for head in range(of.key_heads)
            for way, (begin, end) in enumerate(parts(0, per_head, self.ways))
        ]
        count = min(self.workers, workers(upstream.numel() * of.features, LEAST_WORK))
        share(call, jobs, count)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by query (H, M, A), by key (Hk, N, A) and by weight (A,), of all that was added."""
        of = self.prepared
        key = self.key[0] if self.ways == 1 else self.key.sum(0)  # [Hk, strips, padded, STRIP]
        key = key.mT.reshape(of.key_heads, of.strips * STRIP, of.padded)[:, : of.columns, : of.features]
        weight = self.weight.sum((0, 1))[: of.features].float()
        return self.query * of.weight, key * of.weight, weight


def _ways(key_heads: int, threads: int) -> int:
    """In how many parts the queries of a key head are cut, so that the threads have about equally much to do.

    Each way has its own sums for all keys, so there are no more of them than that takes.
    """
    if key_heads == 0 or key_heads % threads == 0:
        return 1
    return threads // key_heads if threads % key_heads == 0 else min(threads, -(-4 * threads // key_heads))


def _check(query: Tensor, key: Tensor, weight: Tensor) -> None:
    wanted = (("query", query, 3, "(H, M, A)"), ("key", key, 3, "(Hk, N, A)"), ("weight", weight, 1, "(A,)"))
    for name, tensor, axes, shape in wanted:
        _check_kind(name, tensor)
        if tensor.ndim != axes:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs to be {shape}")
    if not query.shape[-1] == key.shape[-1] == weight.shape[0]:
        raise ShapeError(
            f"query, key and weight have {query.shape[-1]}, {key.shape[-1]} and {weight.shape[0]} features; they need "
            "the same number"
        )
    if query.shape[0] != key.shape[0] and (key.shape[0] == 0 or query.shape[0] % key.shape[0]):
        raise ShapeError(f"query has {query.shape[0]} heads and key {key.shape[0]}; those of key need to divide them")


def _check_kind(name: str, tensor: Tensor) -> None:
    if tensor.dtype != torch.float32:
        raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32: pass {name}.float()")
    check_cpu(name, tensor)


def _check_pairs(name: str, tensor: Tensor, shape: tuple[int, int, int]) -> None:
    _check_kind(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; the tile needs {shape}: heads, rows, columns")


def _interval(part: slice, length: int) -> tuple[int, int]:
    begin, end, step = part.indices(length)
    if step != 1:
        raise ShapeError(f"a tile of every {step}th row or column is asked for; native code takes slices of step 1")
    return begin, max(begin, end)
