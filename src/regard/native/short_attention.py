"""Dot-product attention over few keys, all scores of a row at once: forward and backward in one native call each.

The structure and its layout are explained in short.h.
"""

from __future__ import annotations

import ctypes
from array import array
from ctypes import c_double, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from . import library
from .flash import FiniteRows, RowsStruct
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous, new_large
from .threads import run_units, thread_count

LEAST_WORK = 2**20
"""The fewest flops a thread: with twice as many the work is shared. It takes some 10 microseconds."""
NOTHING = (0,) * 16
"""Addresses and strides of four tensors that a pass does not write."""
LONGEST = 512
"""The most keys, as in short.h: the scores of some rows, and the keys and values of a head, fit into a cache."""


class PreciseRows(FiniteRows):
    """Finite rows with log-sum-exps that are small enough for float32 (`log_sum_exp.LARGEST_LSE`), or without keys."""

    __slots__ = ()


class FiniteShortGradients(tuple[Tensor, Tensor, Tensor]):
    """Gradients of query, key and value without NaN or infinity."""

    __slots__ = ()


class ShortStruct(ctypes.Structure):
    """The structure `short_attention` of short.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "nonfinite", "coarse")),
        *((name, c_int64) for name in ("heads", "group", "rows", "columns", "dim", "value_dim", "dtype")),
        *(("spans", c_void_p), ("spans_batch", c_int64)),
        *((name, RowsStruct) for name in ("query", "key", "value")),
        *((name, RowsStruct) for name in ("output", "grad_output", "grad_query", "grad_key", "grad_value")),
        *(("lse", c_void_p), ("grad_lse", c_void_p), ("scale", c_double)),
    )


def attend_short(
    query: Tensor, key: Tensor, value: Tensor, scale: float, spans: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Σ_j exp(s_ij - lse_i) · v_j, (B, H, M, Dv), and lse_i = log Σ_j exp(s_ij), (B, H, M); s_ij = scale · q_i · k_j.

    query (B, H, M, D), key (B, Hk, N, D), value (B, Hk, N, Dv), all of one of `DTYPES`, on the CPU, of any strides but
    in the last axis, where what is not contiguous is copied; Hk divides H, and N is at most LONGEST. spans: (B or 1,
    M, 2) int32, contiguous: the first key that a row attends to, and the one after its last; all keys without it. Sums
    and lse are in float32. Autograd sees nothing of it.

    Rows that attend to nothing have 0 and -inf. If all entries of the output are finite, the result is `FiniteRows`,
    and `PreciseRows` if all log-sum-exps are small as well.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    query, key, value = _checked(query, key, value, spans)
    (batch, heads, rows, _), value_dim = query.shape, value.shape[3]
    output = new_large(value, batch, heads, rows, value_dim)
    lse = torch.empty(batch, heads, rows)
    by_row = rows * value_dim
    written = output.data_ptr(), heads * by_row, by_row, value_dim, *NOTHING
    work = _work(query, key, value, scale, spans, written, (lse.data_ptr(), 0))
    _run(library.current().short, work, 1)
    if work.nonfinite:
        return output, lse
    return FiniteRows((output, lse)) if work.coarse else PreciseRows((output, lse))


def attend_short_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    spans: Tensor | None,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    output: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value of `attend_short`, in their shapes and dtype.

    lse and grad_lse (B, H, M) float32, the former infinite for rows that take no part, the latter None for 0;
    grad_output as the output. output: needed where lse is not that of these keys alone. If all entries that are written
    are finite, the result is `FiniteShortGradients`.
    """
    query, key, value = _checked(query, key, value, spans)
    grad_output = last_contiguous(grad_output.to(value.dtype))
    lse, grad_lse = lse.contiguous(), None if grad_lse is None else grad_lse.contiguous()
    gradients = new_large(query, *query.shape), new_large(key, *key.shape), new_large(value, *value.shape)
    sums = lse.data_ptr(), 0 if grad_lse is None else grad_lse.data_ptr()
    output = None if output is None else last_contiguous(output.to(value.dtype))
    made = [number for tensor in (grad_output, *gradients) for number in (tensor.data_ptr(), *tensor.stride()[:3])]
    written = (0, 0, 0, 0) if output is None else (output.data_ptr(), *output.stride()[:3])
    work = _work(query, key, value, scale, spans, (*written, *made), sums)
    _run(library.current().short_backward, work, 2)
    return gradients if work.nonfinite else FiniteShortGradients(gradients)


def _run(function: Any, work: ShortStruct, times: int) -> None:
    """Run a pass of so many times the work of a forward pass, on the calling thread alone if it is little."""
    flops = 2 * times * work.unit_count * work.group * work.rows * work.columns * (work.dim + work.value_dim)
    run_units(function, work, thread_count(flops, LEAST_WORK))


def _work(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    spans: Tensor | None,
    written: tuple[int, ...],
    sums: tuple[int, int],
) -> ShortStruct:
    """The C structure. It is filled as an array of whole numbers, in a third of the time that its fields take.

    written: addresses and strides of output, grad_output and the gradients, 0 for none. sums: the addresses of lse and
    grad_lse.
    """
    batch, heads, rows, dim = query.shape
    _, shared, columns, value_dim = value.shape
    numbers = (
        *(0, batch * shared, 0, 0, 0),
        *(heads, heads // shared if shared else 1, rows, columns, dim, value_dim, DTYPES.index(value.dtype)),
        *((0, 0) if spans is None else (spans.data_ptr(), 2 * rows if spans.shape[0] > 1 else 0)),
        *(query.data_ptr(), *query.stride()[:3], key.data_ptr(), *key.stride()[:3]),
        *(value.data_ptr(), *value.stride()[:3], *written, *sums, 0),
    )
    work = ShortStruct.from_buffer(array("q", numbers))
    work.scale = scale
    return work


def _checked(query: Tensor, key: Tensor, value: Tensor, spans: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The checked inputs, with contiguous last axes."""
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
    return last_contiguous(query), last_contiguous(key), last_contiguous(value)
