"""Attention by additive scores in C: scores of tiles, the online softmax over them, and their gradients.

The structures and their layouts are explained in additive.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_float, c_int64, c_void_p

import torch
from torch import Tensor

from ...errors import DtypeError, ShapeError
from . import library
from .library import DTYPE_NAMES, DTYPES, check_cpu, check_float32, last_contiguous
from .threads import run_jobs, run_units, split_range, thread_count

STRIP = 64  # additive.h has the same
FEATURES_AT_ONCE = 16
WHOLE = slice(None)

# Up to so many queries for each key, tanh of each pair is faster than to prepare the keys.
FEW_QUERIES = 2

# Features times pairs that are worth a thread of their own: some 20 microseconds.
LEAST_WORK = 2**19
LEAST_ENTRIES = 2**15

EXPONENTIALS, TANGENTS, DIRECT = range(3)  # `form` of additive.h

BAND = 32  # additive.h has the same
SMALL_BAND = 8
BANDS_PER_THREAD = 4
"""Bands of rows that each thread should get at least, so that all end at about the same time."""
VALUES_AT_ONCE = 32  # of `value_padded` in additive.h

ADDITIVE = (
    *(("next_unit", c_int64), ("unit_count", c_int64)),
    *((name, c_int64) for name in ("dtype", "heads", "key_heads", "rows", "columns", "features", "padded", "form")),
    *(("query", c_void_p), ("query_head", c_int64), ("query_row", c_int64)),
    *(("key", c_void_p), ("key_head", c_int64), ("key_row", c_int64)),
    *((name, c_void_p) for name in ("weight", "prepared_query", "query_bound", "prepared_key", "key_bound")),
    *(("weight_sum", c_float), ("weight_bound", c_float)),
)
TILE = (
    *((name, c_int64) for name in ("row_begin", "row_end", "column_begin", "column_end", "begin", "end")),
    *(("pairs", c_void_p), ("pairs_head", c_int64), ("pairs_row", c_int64)),
)


class AdditiveStruct(ctypes.Structure):
    """The structure `additive` of additive.h."""

    _fields_ = ADDITIVE


class AdditiveTileStruct(ctypes.Structure):
    """The structure `tile` of additive.h."""

    _fields_ = TILE


class AdditiveScores:
    """Tiles of additive scores from prepared queries and keys: score(i, j) = Σ_a weight_a · tanh(query_ia + key_ja).

    The exponentials are taken here, once per token; a pair then costs one multiply-add and a fourth of a division for
    each feature, by tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y). Where all entries are within [-1, 1], tanh(x + y) is
    (tanh x + tanh y) / (1 + tanh x · tanh y) instead, whose error is relative: small scores stay exact.

    query (H, M, A), key (Hk, N, A), both of one of `DTYPES`, weight (A,) float32, all on the CPU; what is computed of
    them is float32. Hk divides H, and query head h meets key head ⌊h / (H / Hk)⌋. Heads and rows may have any stride; a
    last axis that is not contiguous is copied. Any size may be 0. They must not change while this is in use. Autograd
    does not see what is done here.

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
        """The scores of some rows and columns, (H, rows, columns), written into `out` if there is one.

        rows and columns: slices of step 1. Columns that begin and end at multiples of 64 are the fastest.

        Raises:
            ShapeError: a slice has another step, or `out` is not of this shape with a contiguous last axis.
        """
        (top, bottom), (left, right) = slice_bounds(rows, self.rows), slice_bounds(columns, self.columns)
        shape = (self.heads, bottom - top, right - left)
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device="cpu")
        check_pairs("out", out, shape)
        if out.stride(-1) != 1 and right - left > 1:
            raise ShapeError(f"out has strides {out.stride()}; its last axis must be contiguous: pass out.contiguous()")
        if not out.numel():
            return out
        units = shape[0] * shape[1]
        count = thread_count(units * shape[2] * self.features, LEAST_WORK)
        across = 1 if units >= count else -(-count // units)  # few rows are cut along their keys
        tile = (out.data_ptr(), out.stride(0), out.stride(1))

        def call(_: int, job: tuple[tuple[int, int], tuple[int, int]]) -> None:
            (begin, end), (first, last) = job
            pairs = tile[0] + (first - left) * 4
            work = AdditiveTileStruct(top, bottom, first, last, begin, end, pairs, *tile[1:])
            self.library.additive_scores(ctypes.byref(self.work), ctypes.byref(work))

        jobs = [
            (u, c) for u in split_range(0, units, min(units, count)) for c in split_range(left, right, across, STRIP)
        ]
        run_jobs(call, jobs, count)
        return out

    def _structure(self) -> AdditiveStruct:
        """The C structure; this object owns its memory."""
        self._padded_weight = torch.empty(self.padded + FEATURES_AT_ONCE, device="cpu")
        query, key = self.query, self.key
        work = AdditiveStruct(
            *(0, 0, DTYPES.index(query.dtype), self.heads, self.key_heads, self.rows, self.columns),
            *(self.features, self.padded, DIRECT),
            *(query.data_ptr(), query.stride(0), query.stride(1), key.data_ptr(), key.stride(0), key.stride(1)),
        )
        weight = last_contiguous(self.weight)
        self.library.additive_weight(ctypes.byref(work), weight.data_ptr(), self._padded_weight.data_ptr())
        return work

    def _prepare(self) -> None:
        queries, strips = self.heads * self.rows, self.key_heads * self.strips
        sizes = queries * self.padded, strips * self.padded * STRIP, queries, strips
        self._prepared = torch.empty(sum(sizes), device="cpu")  # referenced for as long as C may read it
        work, at = self.work, self._prepared.data_ptr()
        work.prepared_query, work.prepared_key = at, at + 4 * sizes[0]
        work.query_bound, work.key_bound = at + 4 * sum(sizes[:2]), at + 4 * sum(sizes[:3])
        work.unit_count = self.heads * -(-self.rows // STRIP) + strips
        threads = thread_count(sizes[0] + sizes[1], LEAST_ENTRIES)
        run_units(self.library.additive_bounds, work, threads)
        self.library.additive_form(ctypes.byref(work))
        work.next_unit = 0
        run_units(self.library.additive_prepare, work, threads)


def _check(query: Tensor, key: Tensor, weight: Tensor) -> None:
    wanted = (("query", query, 3, "(H, M, A)"), ("key", key, 3, "(Hk, N, A)"), ("weight", weight, 1, "(A,)"))
    check_float32("weight", weight)
    check_dtype(query.dtype, query=query, key=key)
    for name, tensor, axes, shape in wanted:
        if tensor.ndim != axes:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs to be {shape}")
    if not query.shape[-1] == key.shape[-1] == weight.shape[0]:
        raise ShapeError(
            f"query, key and weight have {query.shape[-1]}, {key.shape[-1]} and {weight.shape[0]} features; they need "
            "the same number"
        )
    if query.shape[0] != key.shape[0] and (key.shape[0] == 0 or query.shape[0] % key.shape[0]):
        raise ShapeError(f"query has {query.shape[0]} heads and key {key.shape[0]}; those of key need to divide them")


def check_dtype(dtype: torch.dtype, **tensors: Tensor) -> None:
    """Raise unless tensors on the CPU are all of this dtype, and it is one of `DTYPES`."""
    for name, tensor in tensors.items():
        check_cpu(name, tensor)
        if tensor.dtype not in DTYPES or tensor.dtype != dtype:
            raise DtypeError(
                f"{name} is {tensor.dtype}; native code takes query, key and value all as {DTYPE_NAMES}: pass "
                f"{name}.float()"
            )


def check_pairs(name: str, tensor: Tensor, shape: tuple[int, int, int]) -> None:
    """Raise unless a tensor is float32 and has a number for each pair of a tile."""
    check_float32(name, tensor)
    if tuple(tensor.shape) != shape:
        raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; the tile needs {shape}: heads, rows, columns")


def slice_bounds(part: slice, length: int) -> tuple[int, int]:
    """Begin and end of a slice of rows or columns."""
    begin, end, step = part.indices(length)
    if step != 1:
        raise ShapeError(f"a tile of every {step}th row or column is asked for; native code takes slices of step 1")
    return begin, max(begin, end)


class PairsStruct(ctypes.Structure):
    """The structure `pairs` of additive.h."""

    _fields_ = (("data", c_void_p), ("heads", c_int64), ("batch", c_int64), ("head", c_int64), ("row", c_int64))


class AdditiveForwardStruct(ctypes.Structure):
    """The structure `additive_forward` of additive.h."""

    _fields_ = (
        *(("next_unit", c_int64), ("unit_count", c_int64), ("failed", c_int64), ("scores", c_void_p)),
        *((name, c_int64) for name in ("row_begin", "row_end", "column_begin", "column_end", "band")),
        *(("bias", PairsStruct), ("dropout_mask", PairsStruct), ("softcap", c_float), ("keep_probability", c_float)),
        *(("value", c_void_p), ("value_head", c_int64), ("value_row", c_int64), ("value_dim", c_int64)),
        *(("output", c_void_p), ("before", c_void_p), ("more", c_int64)),
        *((name, c_void_p) for name in ("lse", "maximum", "total")),
    )


class AdditiveForward:
    """Attention over the tiles added so far, `output` (H, M, Dv) and `lse` (H, M); no scores are stored.

    s_ij = softcap(score(i, j)) + bias_ij, lse_i = log Σ_j exp(s_ij), output_i = Σ_j exp(s_ij - lse_i) · keep_ij · v_j
    / keep_probability, by the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867).

    Rows that attend to nothing: 0 and -inf. A row's numbers do not depend on the number of threads.

    scores: of queries (H, M, A) and keys (Hk, N, A). value (Hk, N, Dv): of their dtype, on the CPU, of any strides but
    in the last axis, where what is not contiguous is copied. It must not change while this is in use. Autograd does not
    see what is done here. The output has the same dtype; sums are float32, with weights and values of bfloat16
    multiplied in pairs where the processor does. lse is float32.

    NaN in what a row meets gives NaN in its output, and so does NaN in a value of weight 0.

    Raises:
        ShapeError, DtypeError, DeviceError: `value` is not as above.
    """

    def __init__(
        self, scores: AdditiveScores, value: Tensor, softcap: float | None = None, keep_probability: float = 1.0
    ) -> None:
        check_dtype(scores.query.dtype, value=value)
        heads, keys = scores.key_heads, scores.columns
        if value.ndim != 3 or value.shape[:2] != (heads, keys):
            raise ShapeError(f"value has shape {tuple(value.shape)}; it needs to be (Hk, N, Dv) with {(heads, keys)}")
        self.scores, self.value, self.softcap = scores, last_contiguous(value.detach()), softcap or 0.0
        self.keep_probability = keep_probability
        rows = scores.heads, scores.rows
        self.output = torch.zeros(*rows, value.shape[-1], dtype=value.dtype, device="cpu")
        self.lse = torch.full(rows, float("-inf"), device="cpu")
        self._maximum, self._total = self.lse.clone(), torch.zeros(rows, device="cpu")
        # The output of the tiles so far; of 16 bits it is rounded once, after the last tile of a row.
        self._before = self.output if value.dtype == torch.float32 else None

    def add(
        self,
        rows: slice = WHOLE,
        columns: slice = WHOLE,
        bias: Tensor | None = None,
        dropout_mask: Tensor | None = None,
        *,
        more: bool = False,
    ) -> None:
        """Add a tile: some rows attend to some columns. No pair may be in two tiles.

        more: whether the same rows are in a later tile, too. It must be said where `output` has 16 bits, which are then
        written with the last tile.

        rows and columns: slices of step 1. bias and dropout_mask: (B, H / B, rows, columns) float32, of any strides but
        in the last axis. bias: -inf where there is no pair. dropout_mask: 0 for weights that are dropped, else 1.

        Raises:
            ShapeError, DtypeError, DeviceError: a slice has another step, or a tensor is not as above.
            MemoryError: there was none for a few rows of the output.
        """
        scores, value = self.scores, self.value
        (top, bottom), (left, right) = slice_bounds(rows, scores.rows), slice_bounds(columns, scores.columns)
        size = bottom - top, right - left
        bias, dropout_mask = (
            check_tile(name, tensor, scores.heads, size)
            for name, tensor in (("bias", bias), ("dropout_mask", dropout_mask))
        )
        units = scores.heads * size[0]
        if not units or (not size[1] and (more or self._before is None)):
            return
        if more and self._before is None:
            self._before = torch.zeros(self.output.shape, device="cpu")
        wide = self._before is self.output
        threads = thread_count(units * size[1] * (scores.features + value.shape[-1]), LEAST_WORK)
        band = BAND if units >= BANDS_PER_THREAD * threads * BAND else SMALL_BAND
        work = AdditiveForwardStruct(
            *(0, scores.heads * -(-size[0] // band), 0, ctypes.addressof(scores.work), top, bottom, left, right, band),
            *(
                pairs_struct(bias),
                pairs_struct(dropout_mask),
                *(self.softcap, self.keep_probability),
                value.data_ptr(),
                *value.stride()[:2],
                value.shape[-1],
            ),
            *(self.output.data_ptr(), None if self._before is None else self._before.data_ptr(), more and not wide),
            *(tensor.data_ptr() for tensor in (self.lse, self._maximum, self._total)),
        )
        run_units(scores.library.additive_forward, work, threads)


def check_tile(name: str, tensor: Tensor | None, heads: int, size: tuple[int, int]) -> Tensor | None:
    """A number for each pair of a tile, (B, H / B, rows, columns), with a contiguous last axis; raise for others."""
    if tensor is None:
        return None
    check_float32(name, tensor)
    if tensor.ndim != 4 or tensor.shape[:2].numel() != heads or tensor.shape[2:] != size:
        raise ShapeError(
            f"{name} has shape {tuple(tensor.shape)}; the tile needs (B, H / B, rows, columns) with {heads} heads and "
            f"{size}"
        )
    return last_contiguous(tensor.detach())


def pairs_struct(tensor: Tensor | None) -> PairsStruct:
    """The C structure of a number for each pair, or of none."""
    return PairsStruct() if tensor is None else PairsStruct(tensor.data_ptr(), tensor.shape[1], *tensor.stride()[:3])


SUMS = tuple((name, c_void_p) for name in ("query", "key", "weight", "scratch"))


class AdditiveSumsStruct(ctypes.Structure):
    """The structure `sums` of additive.h."""

    _fields_ = SUMS


class AdditiveGradients:
    """The gradient of a loss by query, key and weight, summed over tiles of its gradient by the scores.

    With g_ij the gradient by score(i, j) and t_ija = tanh(query_ia + key_ja), which is taken anew and never stored:
    query_ia is Σ_j g_ij weight_a (1 - t²), key_ja the same over i, weight_a is Σ_ij g_ij t_ija.

    Each worker adds to memory of its own: the result depends on the number of threads in its last bits alone.
    """

    def __init__(self, scores: AdditiveScores) -> None:
        self.scores = scores
        self.thread_count = torch.get_num_threads()
        self.partial_sums = _partial_sums(scores.key_heads, self.thread_count)
        self.query = torch.zeros(scores.heads, scores.rows, scores.features, device="cpu")
        self.key = torch.zeros(self.partial_sums, scores.key_heads, scores.strips, scores.padded, STRIP, device="cpu")
        self.weight = torch.zeros(self.partial_sums, scores.key_heads, scores.padded, dtype=torch.float64, device="cpu")
        self.scratch = torch.empty(self.thread_count, scores.library.additive_scratch(scores.padded), device="cpu")

    def add(self, upstream: Tensor, rows: slice = WHOLE, columns: slice = WHOLE) -> None:
        """Add the tile of some rows and columns: `upstream` (H, rows, columns), the gradient by its scores.

        Raises:
            ShapeError: `upstream` is not of this shape, or a slice has a step.
        """
        scores = self.scores
        (top, bottom), (left, right) = slice_bounds(rows, scores.rows), slice_bounds(columns, scores.columns)
        check_pairs("upstream", upstream, (scores.heads, bottom - top, right - left))
        if not upstream.numel() or not scores.features:
            return
        self.run((top, bottom, left, right), last_contiguous(upstream.detach()))

    def run(
        self,
        bounds: tuple[int, int, int, int],
        upstream: Tensor,
        prepare: Callable[[AdditiveTileStruct, int], None] | None = None,
    ) -> None:
        """Add the tile with these bounds of rows and columns.

        prepare(tile, part): called for the rows of each job before they are read, to write them.
        """
        scores, (top, bottom, _, _) = self.scores, bounds
        pairs = (upstream.data_ptr(), upstream.stride(0), upstream.stride(1))

        def call(worker: int, job: tuple[int, int, int]) -> None:
            part, begin, end = job
            tile = AdditiveTileStruct(*bounds, begin, end, *pairs)
            if prepare is not None:
                prepare(tile, part)
            if not scores.features:
                return
            own = (self.query, self.key[part], self.weight[part, begin // per_head], self.scratch[worker])
            sums = AdditiveSumsStruct(*(tensor.data_ptr() for tensor in own))
            scores.library.additive_backward(ctypes.byref(scores.work), ctypes.byref(tile), ctypes.byref(sums))

        per_head = scores.group * (bottom - top)  # the rows that share a key head
        count = min(self.thread_count, thread_count(upstream.numel() * scores.features, LEAST_WORK))
        if self.partial_sums == 1:  # the key heads of a thread are one job
            heads = split_range(0, scores.key_heads, count)
            jobs = [(0, first * per_head, last * per_head) for first, last in heads]
        else:
            jobs = [
                (part, head * per_head + begin, head * per_head + end)
                for head in range(scores.key_heads)
                for part, (begin, end) in enumerate(split_range(0, per_head, self.partial_sums))
            ]
        run_jobs(call, jobs, count)

    def result(self) -> tuple[Tensor, Tensor, Tensor]:
        """The gradient by query (H, M, A), by key (Hk, N, A) and by weight (A,), of all that was added."""
        scores = self.scores
        key = self.key[0] if self.partial_sums == 1 else self.key.sum(0)  # [Hk, strips, padded, STRIP]
        key = key.mT.reshape(scores.key_heads, scores.strips * STRIP, scores.padded)[
            :, : scores.columns, : scores.features
        ]
        weight = self.weight.sum((0, 1))[: scores.features].float()
        return self.query * scores.weight, key * scores.weight, weight


def _partial_sums(key_heads: int, threads: int) -> int:
    """Number of parts into which the queries of a key head are split, so that threads have equal work.

    Each part has sums of its own for all keys, so there are no more of them than needed.
    """
    if key_heads == 0 or key_heads % threads == 0:
        return 1
    return threads // key_heads if threads % key_heads == 0 else min(threads, -(-4 * threads // key_heads))


class AdditiveBackwardStruct(ctypes.Structure):
    """The structure `additive_backward` of additive.h."""

    _fields_ = (
        *(("failed", c_int64), ("scores", c_void_p), ("tile", c_void_p), ("bias_gradient", c_void_p)),
        *(("bias", PairsStruct), ("dropout_mask", PairsStruct), ("softcap", c_float), ("keep_probability", c_float)),
        *(("value", c_void_p), ("value_head", c_int64), ("value_row", c_int64), ("value_dim", c_int64)),
        *(("upstream", c_void_p), ("upstream_head", c_int64), ("upstream_row", c_int64)),
        *(("output", c_void_p), ("output_head", c_int64), ("output_row", c_int64)),
        *(("lse", c_void_p), ("lse_gradient", c_void_p), ("value_gradient", c_void_p), ("value_padded", c_int64)),
    )


class AdditiveBackward:
    """The gradients of `AdditiveForward`, summed over tiles: of query, key, weight and value; none of size M · N.

    With the weights P_ij = exp(s_ij - lse_i), taken anew, and keep_ij / keep_probability as k_ij, the gradient of the
    output as dO and that of lse as dl: value_j is Σ_i P_ij k_ij dO_i, and that of s_ij is P_ij (k_ij dO_i · v_j - δ_i)
    with δ_i = dO_i · output_i - dl_i; from it come query, key and weight, as `AdditiveGradients` has it.

    output, grad_output (H, M, Dv) and value (Hk, N, Dv): of the dtype of the queries. lse, grad_lse (H, M): float32,
    lse +inf for rows that take no part. All sums are float32; bfloat16 is multiplied in pairs where the processor does.
    softcap, keep_probability and the inputs of `add` are those of the forward pass.

    Raises:
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """

    def __init__(
        self,
        scores: AdditiveScores,
        value: Tensor,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor,
        softcap: float | None = None,
        keep_probability: float = 1.0,
    ) -> None:
        check_dtype(scores.query.dtype, value=value, output=output, grad_output=grad_output)
        rows, dim = (scores.heads, scores.rows), value.shape[-1]
        wanted = {"value": (scores.key_heads, scores.columns, dim), "output": (*rows, dim), "grad_output": (*rows, dim)}
        given = {"value": value, "output": output, "grad_output": grad_output, "lse": lse, "grad_lse": grad_lse}
        for name, tensor in given.items():
            shape = wanted.get(name, rows)
            if tuple(tensor.shape) != shape:
                raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs to be {shape}")
        for name in ("lse", "grad_lse"):
            check_float32(name, given[name])
        self.scores, self.softcap, self.keep_probability = scores, softcap or 0.0, keep_probability
        self.value, self.output, self.grad_output = (
            last_contiguous(tensor.detach()) for tensor in (value, output, grad_output)
        )
        self.lse, self.grad_lse = lse.detach().contiguous(), grad_lse.detach().contiguous()
        self.gradients = AdditiveGradients(scores)
        self.padded = -(-dim // VALUES_AT_ONCE) * VALUES_AT_ONCE
        parts = self.gradients.partial_sums, scores.key_heads, scores.strips * STRIP
        self.value_gradient = torch.zeros(*parts, self.padded, device="cpu")

    def add(
        self,
        rows: slice = WHOLE,
        columns: slice = WHOLE,
        bias: Tensor | None = None,
        dropout_mask: Tensor | None = None,
        *,
        wants_bias_gradient: bool = False,
    ) -> Tensor | None:
        """Add a tile; the gradient of its bias, (H, rows, columns), where it is wanted.

        rows, columns, bias and dropout_mask: as in `AdditiveForward.add`.

        Raises:
            ShapeError, DtypeError, DeviceError: a slice has another step, or a tensor is not as there.
            MemoryError: there was none for the values of the tile.
        """
        scores = self.scores
        bounds = *slice_bounds(rows, scores.rows), *slice_bounds(columns, scores.columns)
        size = bounds[1] - bounds[0], bounds[3] - bounds[2]
        bias, dropout_mask = (
            check_tile(name, tensor, scores.heads, size)
            for name, tensor in (("bias", bias), ("dropout_mask", dropout_mask))
        )
        upstream = torch.empty(scores.heads, *size, device="cpu")
        of_bias = None
        if wants_bias_gradient:
            of_bias = torch.empty_like(upstream) if self.softcap else upstream
        if not upstream.numel():
            return of_bias
        tensors = self.value, self.grad_output, self.output
        value, grad_output, output = ((of.data_ptr(), *of.stride()[:2]) for of in tensors)

        def prepare(tile: AdditiveTileStruct, part: int) -> None:
            work = AdditiveBackwardStruct(
                *(0, ctypes.addressof(scores.work), ctypes.addressof(tile)),
                of_bias.data_ptr() if of_bias is not None and of_bias is not upstream else None,
                *(pairs_struct(bias), pairs_struct(dropout_mask), self.softcap, self.keep_probability),
                *(*value, self.value.shape[-1], *grad_output, *output),
                *(self.lse.data_ptr(), self.grad_lse.data_ptr()),
                *(self.value_gradient[part].data_ptr(), self.padded),
            )
            scores.library.additive_tile_gradients(ctypes.byref(work))
            if work.failed:
                raise MemoryError("native code found no memory for the values that it lays out")

        self.gradients.run(bounds, upstream, prepare)
        return of_bias

    def result(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The gradient of query (H, M, A), key (Hk, N, A), weight (A,) and value (Hk, N, Dv), all float32."""
        value = self.value_gradient[0] if len(self.value_gradient) == 1 else self.value_gradient.sum(0)
        return *self.gradients.result(), value[:, : self.scores.columns, : self.value.shape[-1]]
