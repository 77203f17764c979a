"""Dot-product attention over few keys, all scores of a row at once: forward and backward in one native call each.

The structure and its layout are explained in short.h.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from ctypes import c_double, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.batched_problem import Saved, separate_rows
from ...core.finite import CheckedGradients, CheckedRows
from ...core.large_results import LARGE_BYTES, new_large, new_large_like
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...core.row_weights import RowWeights
from ...errors import DtypeError, ShapeError
from ...normalizers import Entmax, Hard, ReLU, Sigmoid, Softpick, Sparsemax, StickBreaking, TopScores
from ...tiles.pair_terms import PairTerms
from . import library
from .flash_tiles import RowsStruct
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous, places_of
from .threads import no_memory, run_units, thread_count

BIAS_UNITS = 16
"""Where the bias has a gradient, units of work for each thread: each sums the gradient over batches of its own."""
LEAST_ROWS = 64
"""The fewest rows of a head for which its keys are laid out again, so that threads share the head."""
LEAST_WORK = 2**20
"""The fewest flops a thread: with twice as many the work is shared. It takes some 10 microseconds."""
MAX_LAYOUTS = 4096
"""The number of memoized layouts at which the memo is cleared."""
LONGEST = 512
"""The most keys, as in short.h: the scores of some rows, and the keys and values of a head, fit into a cache."""
SOFTMAX, SIGMOID, SPARSEMAX, ENTMAX, RELU, SOFTPICK, STICKS, LARGEST, HARD = range(9)
"""Normalizers, as in short.h."""
BY_ALPHA = {1.5: (ENTMAX, 0.0), 2.0: (SPARSEMAX, 0.0)}
LANES = {"avx512": 16, "avx512bf16": 16, "avx2": 8}
"""Keys of a vector, by variant of the native code; 4 of any other. They are computed in whole vectors."""
FEW_ROWS = {16: 4, 8: 2, 4: 2}
"""By the keys of a vector the most rows of a key head for which it brings none into order, of terms that are more than
a vector; half as many for others: as in short.c."""


class ShortStruct(ctypes.Structure):
    """The structure `short_attention` of short.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "row_parts", "unit_batches")),
        *((name, c_int64) for name in ("failed", "nonfinite", "coarse", "overflow")),
        *((name, c_int64) for name in ("batches", "heads", "group", "rows", "columns", "dim", "value_dim", "dtype")),
        *(("spans", c_void_p), ("spans_batch", c_int64)),
        *((name, RowsStruct) for name in ("query", "key", "value")),
        *((name, RowsStruct) for name in ("output", "grad_output", "grad_query", "grad_key", "grad_value")),
        *(("grad_key_part", c_int64), ("grad_value_part", c_int64)),
        *((name, RowsStruct) for name in ("bias", "keep", "grad_bias")),
        *(("lse", c_void_p), ("grad_lse", c_void_p), ("normalizer", c_int64), ("scale", c_double), ("shift", c_double)),
        *(("softcap", c_double), ("sinks", c_void_p), ("grad_sinks", c_void_p)),
        *(("landmark_size", c_int64), ("landmark_shift", c_int64)),
    )


UNITS, FAILED, NONFINITE = places_of(ShortStruct, "unit_count", "failed", "nonfinite")
COARSE, OVERFLOW = places_of(ShortStruct, "coarse", "overflow")
ROW_PARTS, UNIT_BATCHES, BATCHES, ROWS = places_of(ShortStruct, "row_parts", "unit_batches", "batches", "rows")
SPANS, QUERY, KEY, VALUE = places_of(ShortStruct, "spans", "query", "key", "value")
OUTPUT, LSE, GRAD_OUTPUT, GRAD_LSE = places_of(ShortStruct, "output", "lse", "grad_output", "grad_lse")
GRAD_QUERY, GRAD_KEY, GRAD_VALUE = places_of(ShortStruct, "grad_query", "grad_key", "grad_value")
GRAD_KEY_PART, GRAD_VALUE_PART = places_of(ShortStruct, "grad_key_part", "grad_value_part")
LANDMARK_SIZE, LANDMARK_SHIFT = places_of(ShortStruct, "landmark_size", "landmark_shift")
BIAS, KEEP, GRAD_BIAS = places_of(ShortStruct, "bias", "keep", "grad_bias")
SINKS, GRAD_SINKS = places_of(ShortStruct, "sinks", "grad_sinks")


def _write_terms(terms: PairTerms, numbers: array[int]) -> None:
    """Write the addresses and strides of terms into the numbers of a call."""
    if terms.along is not None:
        numbers[BIAS : BIAS + 4] = _along_rows(terms.along, numbers[ROWS])
    elif terms.bias is not None:
        numbers[BIAS : BIAS + 4] = _broadcast_rows(terms.bias)
    if terms.keep is not None:
        numbers[KEEP : KEEP + 4] = _broadcast_rows(terms.keep)
    if terms.landmarks is not None:
        numbers[LANDMARK_SIZE], numbers[LANDMARK_SHIFT] = terms.landmarks.size, terms.landmarks.shift
    if terms.sinks is not None:
        numbers[SINKS] = terms.sinks.data_ptr()


def _shared_strides(ids: Tensor) -> tuple[int, int]:
    """The strides of ids (B or 1, H or 1, ·) along batches and heads, 0 where all share them."""
    (batch, heads, _), (of_batch, of_head, _) = ids.shape, ids.stride()
    return of_batch if batch > 1 else 0, of_head if heads > 1 else 0


def _broadcast_rows(pairs: Tensor) -> array[int]:
    """Address and strides of a tensor over pairs; an axis of 1 stands for all."""
    (batch, heads, rows, _), (of_batch, of_head, of_row, _) = pairs.shape, pairs.stride()
    strides = of_batch if batch > 1 else 0, of_head if heads > 1 else 0, of_row if rows > 1 else 0
    return array("q", (pairs.data_ptr(), *strides))


def _along_rows(along: Tensor, rows: int) -> array[int]:
    """The same of numbers by distance (·, heads, M + N - 1): each row begins one number before the row above it."""
    *batch, head = (stride if size > 1 else 0 for stride, size in zip(along.stride()[:-1], along.shape, strict=False))
    return array("q", (along.data_ptr() + (rows - 1) * along.element_size(), *(batch or [0]), head, -1))


@dataclass(frozen=True, eq=False, slots=True)
class _BiasGradient:
    """Room for the gradient of a bias, of which each unit of work sums a part.

    parts: (units, H, M, N), or (units, H, M + N - 1) of numbers by distance. unit_batches: the batches of a unit.
    """

    parts: Tensor
    unit_batches: int

    @classmethod
    def empty(cls, terms: PairTerms, query: Tensor, value: Tensor) -> _BiasGradient:
        """Zeros, in as many parts as threads share well; one for each batch where the bias differs between them."""
        (batch, heads, rows, _), (shared, columns) = query.shape, value.shape[1:3]
        wanted = -(-BIAS_UNITS * torch.get_num_threads() // max(shared, 1))
        unit_batches = 1 if terms.bias_by_batch else max(batch // wanted, 1)
        shape = (rows + columns - 1,) if terms.along is not None else (rows, columns)
        return cls(torch.zeros(-(-batch // unit_batches), heads, *shape, device="cpu"), unit_batches)

    def write(self, numbers: array[int]) -> None:
        """Write address and strides into the numbers of a call."""
        by_distance = self.parts.ndim == 3
        numbers[GRAD_BIAS : GRAD_BIAS + 4] = (
            _along_rows(self.parts, numbers[ROWS]) if by_distance else _broadcast_rows(self.parts)
        )
        numbers[UNITS] = numbers[UNITS] // max(numbers[BATCHES], 1) * self.parts.shape[0]
        numbers[UNIT_BATCHES] = self.unit_batches

    def total(self, terms: PairTerms) -> Tensor:
        """The gradient over all batches: (H, M + N - 1), or (B or 1, H, M, N) as the bias differs between batches."""
        if terms.bias_by_batch or (self.parts.ndim == 4 and len(self.parts) == 1):
            return self.parts
        if len(self.parts) == 1:
            return self.parts if self.parts.ndim == 4 else self.parts[0]
        return self.parts.sum(0, keepdim=self.parts.ndim == 4)


class ShortInC:
    """Short rows in C: float32, bfloat16 and float16, on the CPU, of any strides; sums and log-sum-exps in float32."""

    longest = LONGEST

    def takes(self, normalizer: Normalizer | None) -> bool:
        """Those of `CODES`."""
        return _normalizer_code(normalizer) is not None

    def prepare(
        self, weights: RowWeights, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor
    ) -> ShortLayout:
        """The layout of some inputs, checked where it is new."""
        code = _normalizer_code(weights.normalizer)
        if code is None:
            raise AssertionError(f"this code does not compute {weights.normalizer!r}")
        described = [(tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu) for tensor in (query, key, value)]
        spanned = spans if spans is None else (spans.shape, spans.dtype)
        known = (weights.scale, weights.softcap, spanned, code, *described)
        found = _layouts.get(known)
        if found is None:
            if len(_layouts) >= MAX_LAYOUTS:
                _layouts.clear()
            found = _layouts[known] = _new_layout(weights, spans, (query, key, value), code)
        return found

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: RowWeights,
        spans: Tensor | None = None,
        terms: PairTerms | None = None,
    ) -> tuple[Tensor, Tensor] | None:
        """Σ_j exp(s_ij - lse_i) · v_j, and lse_i = log Σ_j exp(s_ij), where s_ij = scale · q_i · k_j, and terms.

        With a softcap of those products, and with another normalizer its weights, and its numbers of rows.

        Where the last axis of an input is not contiguous, it is copied. None where the biases of a row alone are
        infinite in units of log₂ e, as the smallest float32 is.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
            ShapeError, DtypeError, DeviceError: a tensor is not as in the protocol.
        """
        layout, query, key, value = self._laid_out(weights, spans, (query, key, value))
        lse = torch.empty(query.shape[:3], device="cpu")
        output, numbers = _forward(layout, spans, query, key, value, terms, lse)
        if numbers[OVERFLOW]:
            return None
        return (output, lse) if numbers[NONFINITE] else CheckedRows((output, lse))

    def backward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        weights: RowWeights,
        saved: Saved,
        spans: Tensor | None = None,
        terms: PairTerms | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """The gradients of query, key and value, and of a bias where it is asked for."""
        layout, query, key, value = self._laid_out(weights, spans, (query, key, value))
        of_bias = None
        if terms is not None and saved.needs_bias_grad and terms.landmarks is None:
            of_bias = _BiasGradient.empty(terms, query, value)
        numbers, lse = layout.with_inputs(spans, query, key, value), saved.lse.contiguous()
        numbers[LSE], grad_lse = lse.data_ptr(), saved.grad_lse.contiguous()
        if saved.has_lse_grad:
            numbers[GRAD_LSE] = grad_lse.data_ptr()
        output = last_contiguous(saved.output.to(value.dtype))  # where lse is not that of these keys alone
        numbers[OUTPUT : OUTPUT + 4] = array("q", (output.data_ptr(), *output.stride()[:3]))
        gradients = _backward(layout, numbers, (query, key, value), saved.grad_output, terms, of_bias)
        found = *gradients, None if of_bias is None or terms is None else of_bias.total(terms)
        return found if numbers[NONFINITE] else CheckedGradients(found)

    def _laid_out(
        self, weights: RowWeights, spans: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[ShortLayout, Tensor, Tensor, Tensor]:
        """Layout and inputs, which are copied where their last axes are not contiguous."""
        layout = self.prepare(weights, spans, *inputs)
        if layout.copies:
            query, key, value = (last_contiguous(tensor) for tensor in inputs)
            return self.prepare(weights, spans, query, key, value), query, key, value
        return layout, *inputs

    def listed_pairs(
        self, indices: Tensor, rows: int, columns: int, queries: int, keys: int, *, causal: bool
    ) -> Tensor:
        """Which pairs the lists name, (B, H, M, N) bool; indices (B, H, ⌈M / rows⌉, K) int32, contiguous.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
        """
        batch, heads, _, listed = indices.shape
        keep = torch.empty(batch, heads, queries, keys, dtype=torch.bool, device="cpu")
        shift = keys - queries if causal else keys
        library.current().listed_pairs(
            indices.data_ptr(), batch * heads, listed, rows, columns, queries, keys, shift, keep.data_ptr()
        )
        return keep

    def equal_ids(self, query_ids: Tensor, key_ids: Tensor, *, causal: bool) -> Tensor:
        """Which pairs have equal ids, (B, H, M, N) bool; (B or 1, H or 1, ·) int64, whose last axes are contiguous.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
        """
        (*of_queries, queries), (*of_keys, keys) = query_ids.shape, key_ids.shape
        batch, heads = map(max, of_queries, of_keys)
        keep = torch.empty(batch, heads, queries, keys, dtype=torch.bool, device="cpu")
        strides = *_shared_strides(query_ids), *_shared_strides(key_ids)
        shift = keys - queries if causal else keys
        library.current().equal_ids(
            query_ids.data_ptr(), key_ids.data_ptr(), *strides, batch, heads, queries, keys, shift, keep.data_ptr()
        )
        return keep

    def keys_at_once(self) -> int:
        """4 to 16, by the variant."""
        return LANES.get(library.variant_in_use() or "", 4)

    def rows_as_they_are(self, problem: Problem) -> int:
        """By the keys of a vector, and by the terms of a product."""
        width, terms = self.keys_at_once(), min(problem.pairs.query.shape[-1], problem.value.shape[-1])
        if library.multiplies_in_pairs(library.variant_in_use(), problem.value.dtype):
            terms = -(-terms // 2)
        return FEW_ROWS[width] if terms > width else FEW_ROWS[width] // 2

    def row_parts(self, units: int, rows: int) -> int:
        """1 where heads alone give each thread its share."""
        return row_parts(units, rows, torch.get_num_threads())


def _forward(
    layout: ShortLayout,
    spans: Tensor | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    terms: PairTerms | None,
    lse: Tensor | None = None,
) -> tuple[Tensor, array[int]]:
    """The output, and the numbers of the structure after the pass; the log-sum-exps are written if there is room."""
    output = layout.empty_like(query) if layout.like_query else new_large(value, *query.shape[:3], value.shape[3])
    numbers = layout.with_inputs(spans, query, key, value)
    numbers[OUTPUT] = output.data_ptr()
    if terms is not None:
        _write_terms(terms, numbers)
    if lse is not None:
        numbers[LSE] = lse.data_ptr()
    if layout.flops >= 2 * LEAST_WORK and numbers[ROWS] >= 2 * LEAST_ROWS:
        _share_heads(numbers, layout.flops)
    _run(library.current().short, numbers, layout.flops)
    return output, numbers


def _share_heads(numbers: array[int], flops: int) -> int:
    """Cut the rows of each head into parts, where heads alone leave threads without work; returns how many."""
    units = numbers[UNITS]
    parts = numbers[ROW_PARTS] = row_parts(units, numbers[ROWS], thread_count(flops, LEAST_WORK))
    numbers[UNITS] = units * parts
    return parts


def row_parts(units: int, rows: int, threads: int) -> int:
    """In how many parts the rows of each head are cut, so that all threads have work: 1 where heads are enough.

    >>> row_parts(1, 512, 2), row_parts(2, 512, 2), row_parts(3, 512, 2), row_parts(1, 100, 8)
    (4, 1, 2, 1)
    """
    if not units % threads or units >= 4 * threads:
        return 1
    return max(min(-(-2 * threads // units), rows // LEAST_ROWS), 1)


def _run(function: Any, numbers: array[int], flops: int) -> None:
    """Run a pass; a small one is one call of C, with the address of the numbers."""
    if flops < 2 * LEAST_WORK and numbers[UNITS]:
        function(numbers.buffer_info()[0])
        if numbers[FAILED]:
            raise no_memory()
    else:
        run_units(function, ShortStruct.from_buffer(numbers), thread_count(flops, LEAST_WORK))


def _backward(
    layout: ShortLayout,
    numbers: array[int],
    inputs: tuple[Tensor, Tensor, Tensor],
    grad_output: Tensor,
    terms: PairTerms | None,
    of_bias: _BiasGradient | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, for numbers with all addresses but theirs and that of grad_output."""
    query, key, value = inputs
    of_query = layout.empty_like(query)
    if grad_output.dtype is not value.dtype:
        grad_output = grad_output.to(value.dtype)
    numbers[GRAD_OUTPUT] = grad_output.data_ptr()
    if not grad_output.is_contiguous():  # as the layout has it
        grad_output = last_contiguous(grad_output)
        numbers[GRAD_OUTPUT : GRAD_OUTPUT + 4] = array("q", (grad_output.data_ptr(), *grad_output.stride()[:3]))
    numbers[GRAD_QUERY] = of_query.data_ptr()
    if terms is not None:
        _write_terms(terms, numbers)
    if of_bias is not None:
        of_bias.write(numbers)
    elif layout.flops >= LEAST_WORK and numbers[ROWS] >= 2 * LEAST_ROWS:
        parts = _share_heads(numbers, 2 * layout.flops)
        if parts > 1:
            return of_query, *_column_gradients(layout, numbers, key, value, parts)
    of_key, of_value = layout.empty_like(key), layout.empty_like(value)
    numbers[GRAD_KEY], numbers[GRAD_VALUE] = of_key.data_ptr(), of_value.data_ptr()
    _run(library.current().short_backward, numbers, 2 * layout.flops)
    return of_query, of_key, of_value


def _column_gradients(
    layout: ShortLayout, numbers: array[int], key: Tensor, value: Tensor, parts: int
) -> tuple[Tensor, Tensor]:
    """The gradients of key and value as sums of those of each part of the rows, which are in float32."""
    found = [torch.empty(parts, *tensor.shape, device="cpu") for tensor in (key, value)]
    for gradient, place, part in zip(found, (GRAD_KEY, GRAD_VALUE), (GRAD_KEY_PART, GRAD_VALUE_PART), strict=True):
        numbers[place : place + 4] = array("q", (gradient.data_ptr(), *gradient.stride()[1:4]))
        numbers[part] = gradient.stride(0)
    _run(library.current().short_backward, numbers, 2 * layout.flops)
    of_key, of_value = (gradient.sum(0).to(key.dtype) for gradient in found)
    return of_key, of_value


@dataclass(frozen=True, eq=False, slots=True)
class ShortLayout:
    """What all calls with tensors of the same shapes, strides and dtypes have in common, so that it is made once.

    numbers: the structure as 64-bit numbers, all addresses 0; a gradient has the strides of its tensor where these
    leave no gaps, as after a projection, and the last is 1; the output is contiguous. flops: of a forward pass. copies:
    whether the last axis of an input is not contiguous: it needs copies, whose layout is another. like_query: whether
    the output is contiguous as the query is. empty_like: makes a result like an input, of those that are small in fewer
    steps.
    """

    numbers: array[int]
    flops: int
    copies: bool
    like_query: bool
    empty_like: Callable[[Tensor], Tensor]

    def forward(
        self, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor, terms: PairTerms | None = None
    ) -> tuple[Tensor, bool, bool] | None:
        """The output, whether it is finite, and whether `backward` is exact; None for biases that are too large."""
        output, numbers = _forward(self, spans, query, key, value, terms)
        return None if numbers[OVERFLOW] else (output, not numbers[NONFINITE], not numbers[COARSE])

    def backward(
        self,
        spans: Tensor | None,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        grad_output: Tensor,
        terms: PairTerms | None = None,
        *,
        of_bias: bool = False,
        of_sinks: bool = True,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None] | None:
        """The gradients of `forward`, whose softmax is computed again; None where they are not finite or exact."""
        summed = of_rows = None
        if of_bias and terms is not None and terms.landmarks is None:
            summed = _BiasGradient.empty(terms, query, value)
        numbers = self.with_inputs(spans, query, key, value)
        if terms is not None and terms.sinks is not None and of_sinks:
            of_rows = torch.empty(query.shape[:3], device="cpu")
            numbers[GRAD_SINKS] = of_rows.data_ptr()
        gradients = _backward(self, numbers, (query, key, value), grad_output, terms, summed)
        if numbers[NONFINITE] or numbers[COARSE] or numbers[OVERFLOW]:
            return None
        total = None if summed is None or terms is None else summed.total(terms)
        return *gradients, total, None if of_rows is None else of_rows.sum((0, 2))

    def with_inputs(self, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor) -> array[int]:
        """The numbers of a call, with the addresses of its inputs."""
        numbers = array("q", self.numbers)
        numbers[QUERY], numbers[KEY], numbers[VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
        if spans is not None:
            numbers[SPANS] = spans.data_ptr()
        return numbers


_layouts: dict[tuple[Any, ...], ShortLayout] = {}


def _normalizer_code(normalizer: Normalizer | None) -> tuple[int, float] | None:
    """The number that short.h has for a normalizer, and that of its own; None of any other."""
    if normalizer is None:
        return SOFTMAX, 0.0
    of_kind = CODES.get(type(normalizer))  # subclasses may have other weights
    return None if of_kind is None else of_kind(normalizer)


def _of_sigmoid(sigmoid: Sigmoid) -> tuple[int, float] | None:
    return (SIGMOID, float(sigmoid.bias)) if isinstance(sigmoid.bias, int | float) else None


def _of_entmax(entmax: Entmax) -> tuple[int, float] | None:
    return None if isinstance(entmax.alpha, Tensor) else BY_ALPHA.get(entmax.alpha)


CODES: dict[type[Normalizer], Callable[[Any], tuple[int, float] | None]] = {
    Entmax: _of_entmax,
    Hard: lambda _: (HARD, 0.0),  # noise is a bias
    ReLU: lambda relu: (RELU, float(relu.power)),
    Sigmoid: _of_sigmoid,
    Softpick: lambda _: (SOFTPICK, 0.0),
    Sparsemax: lambda _: (SPARSEMAX, 0.0),
    StickBreaking: lambda _: (STICKS, 0.0),
    TopScores: lambda top: (LARGEST, float(top.k)),
}
"""By the kind of a normalizer its number in short.h, and its own; None of one whose own is a tensor, or another."""


def _new_layout(
    weights: RowWeights, spans: Tensor | None, inputs: tuple[Tensor, Tensor, Tensor], normalizer: tuple[int, float]
) -> ShortLayout:
    query, key, value = inputs
    _check(query, key, value, spans)
    (batch, heads, rows, dim), (_, shared, columns, value_dim) = query.shape, value.shape
    work = ShortStruct(unit_count=batch * shared, heads=heads, group=heads // shared if shared else 1)
    work.scale, work.softcap = weights.scale, weights.softcap or 0.0
    work.normalizer, work.shift = normalizer
    work.row_parts, work.unit_batches, work.batches = 1, 1, batch
    work.rows, work.columns, work.dim, work.value_dim = rows, columns, dim, value_dim
    work.dtype = DTYPES.index(value.dtype)
    work.spans_batch = 2 * rows if spans is not None and spans.shape[0] > 1 else 0
    small = max(query.nbytes, key.nbytes, value.nbytes) < LARGE_BYTES
    separate = all(separate_rows(tensor) is tensor for tensor in (query, key, value))
    empty_like = torch.empty_like if small and separate else new_large_like
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        setattr(work, name, RowsStruct(0, *tensor.stride()[:3]))
        setattr(work, f"grad_{name}", RowsStruct(0, *empty_like(tensor).stride()[:3]))
    work.output = work.grad_output = RowsStruct(0, heads * rows * value_dim, rows * value_dim, value_dim)
    flops = 2 * batch * heads * rows * columns * (dim + value_dim)
    copies = any(tensor.stride(-1) != 1 and tensor.shape[-1] > 1 for tensor in (query, key, value))
    like_query = dim == value_dim and query.is_contiguous()
    return ShortLayout(array("q", bytes(work)), flops, copies, like_query, empty_like)


def _check(query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None) -> None:
    """Check the inputs of a pass.

    Raises:
        ShapeError, DtypeError, DeviceError: a tensor is not as in the protocol.
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not tensor.is_cpu:
            check_cpu(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs four axes: batch, heads, length, dim")
    if not query.dtype is key.dtype is value.dtype or value.dtype not in DTYPES:
        raise DtypeError(
            f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; native code takes all as {DTYPE_NAMES}"
        )
    (batch, heads, rows, dim), (_, shared, columns, value_dim) = query.shape, value.shape
    wanted = (batch, shared, columns)
    if key.shape != (*wanted, dim) or value.shape[0] != batch or heads % max(shared, 1) or columns > LONGEST:
        raise ShapeError(
            f"key has shape {tuple(key.shape)} and value {tuple(value.shape)}; beside query {tuple(query.shape)} they "
            f"need {(*wanted, dim)} and {(*wanted, value_dim)}, with key heads that divide the {heads} query heads, "
            f"and at most {LONGEST} keys"
        )
    if spans is not None and (
        spans.dtype is not torch.int32 or spans.shape[0] not in (1, batch) or spans.shape[1:] != (rows, 2)
    ):
        raise ShapeError(
            f"spans is {spans.dtype} {tuple(spans.shape)}; it needs torch.int32 {(batch, rows, 2)}, or 1 in place of "
            "the batch"
        )
