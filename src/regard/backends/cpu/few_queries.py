"""Few query rows over many keys in C, each key read once, by parts of the keys.

`attend_few_queries` calls `regard_decode` of decode.c; the structure and its layouts are explained in decode.h.
`StepLayout` does it for the next token of a text, in few steps of Python: they take longer than the arithmetic.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence
from ctypes import c_float, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.log_sum_exp import merge_softmax
from ...core.packed_rows import PackedTensor
from ...errors import DtypeError, ShapeError
from . import library
from .library import DTYPE_NAMES, DTYPES, check_cpu, last_contiguous, places_of
from .packed_queries import attend_packed
from .threads import run_units, thread_count

MOST_ROWS = 64
"""The most queries, as in decode.h."""
CHUNK = 64
"""The keys whose scores are computed at once, as in decode.h."""

LEAST_WORK = 2**18
"""The fewest entries of keys and values a thread: with twice as many the work is shared. It takes some 50 µs."""


class DecodeStruct(ctypes.Structure):
    """The structure `decode` of decode.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed")),
        *((name, c_int64) for name in ("heads", "rows", "columns", "dim", "value_dim", "dtype", "query_dtype")),
        *(("parts", c_int64), ("part", c_int64), ("scale", c_float)),
        *(("query", c_void_p), ("query_batch", c_int64), ("query_head", c_int64), ("query_row", c_int64)),
        *(("key", c_void_p), ("key_batch", c_int64), ("key_head", c_int64), ("key_row", c_int64)),
        *(("value", c_void_p), ("value_batch", c_int64), ("value_head", c_int64), ("value_row", c_int64)),
        *(("bias", c_void_p), ("bias_batch", c_int64), ("bias_head", c_int64), ("bias_row", c_int64)),
        *(("limits", c_void_p), ("least_limit", c_int64), ("output", c_void_p), ("lse", c_void_p)),
    )


def attend_few_queries(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    bias: Tensor | None = None,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention by parts of the keys: s_ij = scale · q_i · k_j + b_ij, lse = log Σ exp(s_ij), Σ exp(s_ij - lse) · v_j.

    The keys are cut in as many parts P as give each thread its share: outputs (B, H, P, R, Dv) and log-sum-exps
    (B, H, P, R) in float32, to be merged over P; 0 and -inf where a part has no pairs.

    query (B, H, R, D) of any dtype, R at most 64; key (B, H, N, D), value (B, H, N, Dv), both of one of `DTYPES`;
    bias (B, H, R, N), float32, -inf where there is no pair: on the CPU, of any strides but in the last axis, where what
    is not contiguous is copied. limits (R,), int32: row i attends to keys j < limits[i] alone, as under a causal mask.
    Autograd does not see what is done here.

    NaN in what a row meets gives NaN in its output, and so does NaN in a value of weight 0.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
    """
    _check(query, key, value, bias, limits)
    code = library.current()
    (batch, heads, rows, dim), (columns, value_dim) = query.shape, value.shape[-2:]
    count = thread_count(key.numel() + value.numel(), LEAST_WORK)
    part, part_count = _part(batch * heads, columns, count)
    if query.dtype not in DTYPES:
        query = query.float()
    read = [last_contiguous(tensor) for tensor in (query, key, value)]
    bias = None if bias is None else last_contiguous(bias)
    limits = None if limits is None else limits.contiguous()
    output, lse = (
        torch.empty(batch, heads, part_count, rows, value_dim, device="cpu"),
        torch.empty(batch, heads, part_count, rows, device="cpu"),
    )
    dtype, query_dtype = (DTYPES.index(tensor.dtype) for tensor in (key, query))
    work = DecodeStruct(
        *(0, batch * heads * part_count, 0),
        *(heads, rows, columns, dim, value_dim, dtype, query_dtype, part_count, part, scale),
        *(number for tensor in read for number in (tensor.data_ptr(), *tensor.stride()[:3])),
        *((None, 0, 0, 0) if bias is None else (bias.data_ptr(), *bias.stride()[:3])),
        *((None, 0) if limits is None else (limits.data_ptr(), int(limits.min()) if limits.numel() else 0)),
        *(output.data_ptr(), lse.data_ptr()),
    )
    run_units(code.decode, work, count)
    return output, lse


class FewQueriesInC:
    """Each key and value is read once for all rows of its head."""

    fused = True
    most_rows = MOST_ROWS

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        added: Tensor | None = None,
        limits: Sequence[int] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Output (B, Hk, R, Dv) and log-sum-exp (B, Hk, R), float32."""
        if isinstance(key, PackedTensor) and isinstance(value, PackedTensor):
            return attend_packed(self.forward, query, (key, value), scale, added, limits)
        batch, heads, rows, _ = query.shape
        each = None
        if added is not None:
            added = added.expand(batch, heads, -1, -1)
        if limits is not None and limits[0] < limits[-1]:
            each = torch.tensor(limits, dtype=torch.int32, device="cpu").repeat(rows // len(limits))
        output, lse = attend_few_queries(query, key, value, scale, added, each)
        return (output.squeeze(2), lse.squeeze(2)) if lse.shape[2] == 1 else merge_softmax(output, lse, dim=2)

    def prepare_step(self, query: Tensor, key: Tensor, value: Tensor, scale: float) -> StepLayout | None:
        """The layout of steps that one thread computes, of tensors that are contiguous in their last axes."""
        keys = value.shape[2]
        numbers = (key.numel() + value.numel()) // keys << (keys - 1).bit_length()
        in_rows = query.stride(3) == key.stride(3) == value.stride(3) == 1
        return _step_layout(query, key, value, scale) if in_rows and numbers < 2 * LEAST_WORK else None


FAILED, COLUMNS, PART = places_of(DecodeStruct, "failed", "columns", "part")
QUERY, KEY, VALUE, OUTPUT, LSE = places_of(DecodeStruct, "query", "key", "value", "output", "lse")


@dataclass(frozen=True, eq=False, slots=True)
class StepLayout:
    """What steps with queries of one shape and strides have in common, whatever number of keys they have.

    numbers: the structure as 64-bit numbers, 0 for what is known in the call. shape: of the output. like_query: whether
    the query has it, contiguous and in float32: torch makes a tensor like another one faster. rows: a number for each
    query of a head.
    """

    numbers: array[int]
    shape: tuple[int, ...]
    like_query: bool
    rows: array[float]

    def run(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Σ_j exp(s_j - lse) · v_j, (B, H, 1, Dv) in the dtype of the values, on this thread; s_j = scale · q · k_j.

        Raises:
            MemoryError: there is none for a head's query.
        """
        numbers, lse = array("q", self.numbers), array("f", self.rows)
        output = torch.empty_like(query) if self.like_query else torch.empty(self.shape, device="cpu")
        numbers[COLUMNS] = numbers[PART] = value.shape[2]
        numbers[QUERY] = query.data_ptr()
        numbers[KEY], (numbers[KEY + 1], numbers[KEY + 2], numbers[KEY + 3], _) = key.data_ptr(), key.stride()
        numbers[VALUE], (numbers[VALUE + 1], numbers[VALUE + 2], numbers[VALUE + 3], _) = (
            value.data_ptr(),
            value.stride(),
        )
        numbers[OUTPUT], numbers[LSE] = output.data_ptr(), lse.buffer_info()[0]
        library.current().decode(numbers.buffer_info()[0])
        if numbers[FAILED]:
            raise MemoryError("native code found no memory for the query of a step")
        return output if value.dtype is torch.float32 else output.to(value.dtype)


def _step_layout(query: Tensor, key: Tensor, value: Tensor, scale: float) -> StepLayout:
    """The layout of steps with one query of each head: (B, H, 1, D), whose groups of H / Hk heads are rows."""
    _, key_heads, _, value_dim = value.shape
    batch, heads, _, dim = query.shape
    of_batch, of_head = query.stride()[:2]
    group = heads // max(key_heads, 1)
    dtypes = DTYPES.index(key.dtype), DTYPES.index(query.dtype)
    work = DecodeStruct(
        *(0, batch * key_heads, 0, key_heads, group, 0, dim, value_dim, *dtypes, 1, 0, scale),
        *(None, of_batch, group * of_head, of_head),
    )
    shape = batch, heads, 1, value_dim
    like_query = query.dtype == torch.float32 and query.shape == shape and query.is_contiguous()
    return StepLayout(array("q", bytes(work)), shape, like_query, array("f", bytes(4 * batch * heads)))


def _part(heads: int, columns: int, threads: int) -> tuple[int, int]:
    """Keys of a part, in whole chunks, and the number of parts; one part if the heads alone occupy all threads."""
    even = heads % threads == 0 or heads >= 8 * threads
    wanted = 1 if even or not heads else -(-2 * threads // heads)
    part = max(-(-columns // (wanted * CHUNK)) * CHUNK, CHUNK)
    return part, max(-(-columns // part), 1)


def _check(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, limits: Tensor | None) -> None:
    named = {"query": query, "key": key, "value": value, "bias": bias}
    for name, tensor in named.items():
        if tensor is None:
            continue
        check_cpu(name, tensor)
        if tensor.ndim != 4:
            raise ShapeError(f"{name} has shape {tuple(tensor.shape)}; it needs four axes: batch, heads, length, dim")
    if key.dtype not in DTYPES or value.dtype != key.dtype:
        raise DtypeError(
            f"key is {key.dtype} and value {value.dtype}; native code takes both as "
            f"{DTYPE_NAMES}: pass key.float() and value.float()"
        )
    if bias is not None and bias.dtype != torch.float32:
        raise DtypeError(f"bias is {bias.dtype}; native code takes torch.float32: pass bias.float()")
    batch, heads, rows, dim = query.shape
    if limits is not None:
        check_cpu("limits", limits)
        if limits.dtype != torch.int32:
            raise DtypeError(f"limits are {limits.dtype}; native code takes torch.int32: pass limits.int()")
        if tuple(limits.shape) != (rows,):
            raise ShapeError(f"limits have shape {tuple(limits.shape)}; {rows} rows need ({rows},)")
    if rows > MOST_ROWS:
        raise ShapeError(f"query has {rows} rows; native code takes at most {MOST_ROWS} at a time: pass fewer")
    columns, value_dim = value.shape[-2:]
    wanted = {"key": (columns, dim), "value": (columns, value_dim), "bias": (rows, columns)}
    for name, last in wanted.items():
        tensor = named[name]
        if tensor is not None and tuple(tensor.shape) != (batch, heads, *last):
            raise ShapeError(
                f"{name} has shape {tuple(tensor.shape)}; beside query {tuple(query.shape)} and value "
                f"{tuple(value.shape)} it needs {(batch, heads, *last)}"
            )
