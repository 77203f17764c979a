"""The linear recurrence of causal linear attention, in chunks of tokens: forward and backward.

S_t = e^{g_t} S_{t-1} + k_t u_tᵀ and o_t = S_tᵀ q_t, with u_t = v_t, or by the delta rule (Yang et al. 2024, arXiv
2406.06484; with decay arXiv 2412.06464) u_t = β_t (v_t - (e^{g_t} S_{t-1})ᵀ r_t), r_t = k_t unless it is given. The
structure is explained in recurrence.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...core.large_results import new_large
from ...core.recurrence_problem import RecurrenceGradients, RecurrenceProblem, RecurrenceResult
from ...errors import ConfigurationError, DtypeError, ShapeError
from ...tiles.tile_bits import BLOCK
from . import library
from .flash_tiles import RowsStruct, rows_struct
from .library import DTYPE_NAMES, DTYPES, check_cpu, check_float32, last_contiguous
from .threads import run_units, thread_count
from .token_step import STEP_FEATURE_MAPS, one_token, prepare_step

FEATURE_MAPS = STEP_FEATURE_MAPS[:2]
"""Those of sequences; recurrence.h has the same, in this order."""

LEAST_PART = 32
"""Value columns of a part: fewer would leave vector registers empty."""

SEGMENT_ENTRIES = 2**16
"""Entries of the states of a segment of chunks, which the backward pass computes anew and holds in cache."""

LEAST_WORK = 2**21
"""Flops that are worth a thread of their own: some 10 microseconds."""


class RecurrenceStruct(ctypes.Structure):
    """The structure `recurrence` of recurrence.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "batch", "heads", "group", "tokens")),
        *((name, c_int64) for name in ("dim", "value_dim", "parts", "segment", "dtype", "decay_kind")),
        *(
            *((name, c_int64) for name in ("feature_map", "normalize", "checked", "invalid")),
            ("scale", c_double),
            ("query", RowsStruct),
            ("key", RowsStruct),
            ("value", RowsStruct),
        ),
        *((name, RowsStruct) for name in ("decay", "beta", "removal")),
        *((name, c_void_p) for name in ("state", "total")),
        *((name, c_void_p) for name in ("output", "row_total", "final_state", "final_total")),
        *((name, c_void_p) for name in ("border_state", "border_total")),
        *(("grad_output", RowsStruct), ("grad_final_state", c_void_p), ("grad_final_total", c_void_p)),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_decay", "grad_beta")),
        *((name, c_void_p) for name in ("grad_removal", "grad_state", "grad_total")),
    )


class RecurrencesInC:
    """The linear recurrence in chunks of tokens, and one token of it."""

    prepare_step = staticmethod(prepare_step)

    def why_not(self, problem: RecurrenceProblem) -> list[str]:
        """Sums that are not float32, and a feature map or a total that it has no code for."""
        reasons = []
        for name in ("decay", "beta", "state", "total"):
            tensor = getattr(problem, name)
            if tensor is not None and (tensor.dtype is not torch.float32 or not tensor.is_cpu):
                kind = f"{tensor.dtype} on {tensor.device}"
                reasons.append(f"its code reads the {name} as float32 on the CPU; this is {kind}")
        if problem.feature_map not in FEATURE_MAPS:
            reasons.append(f"its code has the feature maps {FEATURE_MAPS}; this is {problem.feature_map!r}")
        if problem.normalize and problem.beta is not None:
            reasons.append("its code has no total of weights for the delta rule")
        if problem.removal is not None and problem.feature_map != "identity":
            reasons.append("its code removes the values of keys without a feature map")
        return reasons

    def forward(self, problem: RecurrenceProblem, *, stores_borders: bool = False) -> RecurrenceResult:
        """The outputs and the final state; stores_borders: with the states that `backward` starts from.

        Raises:
            KernelError: there is no native code to call (`regard.native.why_not`).
            ShapeError, DtypeError, DeviceError: a tensor is not as `RecurrenceProblem` has it, or not as `why_not`.
            ConfigurationError: the feature map is unknown, or a total is normalised by that the delta rule does not
                keep; of one token, a decay above 0, or a beta not within 0..2.
        """
        if problem.key.shape[2:3] == (1,) and not stores_borders and (token := one_token(problem)) is not None:
            return RecurrenceResult(token[0], None, token[1], None, None, None)
        check(problem)
        code, new = library.current(), partial(problem.query.new_empty, dtype=torch.float32)
        batch, heads, tokens, dim = problem.query.shape
        key_heads, value_dim = problem.value.shape[1], problem.value.shape[3]
        segments = self.segments(problem)
        output = new_large(problem.query, batch, heads, tokens, value_dim)
        state = new((batch, key_heads, dim, value_dim))
        border = new((batch, key_heads, segments, dim, value_dim)) if stores_borders else None
        row_total = new((batch, heads, tokens)) if problem.normalize else None
        total = new((batch, key_heads, dim)) if problem.normalize else None
        border_total = new((batch, key_heads, segments, dim)) if stores_borders and problem.normalize else None
        read = _contiguous_rows(problem)  # what it owns, C reads
        work = structure(
            read,
            output=_address(output),
            row_total=_address(row_total),
            final_state=_address(state),
            final_total=_address(total),
            border_state=_address(border),
            border_total=_address(border_total),
        )
        run_units(code.recurrence, work, threads_for(problem))
        return RecurrenceResult(output, row_total, state, total, border, border_total)

    def backward(
        self,
        problem: RecurrenceProblem,
        border_state: Tensor,
        grad_output: Tensor,
        grad_state: Tensor | None = None,
        *,
        grad_total: Tensor | None = None,
        output: Tensor | None = None,
        row_total: Tensor | None = None,
        border_total: Tensor | None = None,
    ) -> RecurrenceGradients:
        """The gradients of all inputs, from those of the output and of the final state and total; None for 0.

        border_state: of `forward` with `stores_borders`; where outputs are divided by their totals, so are output,
        row_total and border_total, which are needed there. Errors are those of `forward`.
        """
        check(problem)
        code, new = library.current(), partial(problem.query.new_empty, dtype=torch.float32)
        (batch, heads, tokens, dim), (_, key_heads, _, value_dim) = problem.query.shape, problem.value.shape
        parts, dtype = _parts(problem), problem.query.dtype
        like = problem.query if parts == 1 else new(0)  # sums of parts are rounded
        query = new_large(like, parts, batch, heads, tokens, dim)
        key = new_large(like, parts, batch, key_heads, tokens, dim)
        value = new_large(problem.query, batch, key_heads, tokens, value_dim)
        state = new((batch, key_heads, dim, value_dim))
        decay = None if problem.decay is None else new((parts, *problem.decay.shape))
        beta = None if problem.beta is None else new((parts, *problem.beta.shape))
        removal = None if problem.removal is None else new_large(like, *key.shape)
        total = new((batch, key_heads, dim)) if problem.normalize else None
        border_state, grad_output = border_state.contiguous(), last_contiguous(grad_output)
        grad_state, grad_total = _contiguous(grad_state), _contiguous(grad_total)
        read = _contiguous_rows(problem)  # what it owns, C reads
        work = structure(
            read,
            output=_address(output),
            row_total=_address(row_total),
            border_state=_address(border_state),
            border_total=_address(border_total),
            grad_output=rows_struct(grad_output),
            grad_final_state=_address(grad_state),
            grad_final_total=_address(grad_total),
            grad_query=_address(query),
            grad_key=_address(key),
            grad_value=_address(value),
            grad_decay=_address(decay),
            grad_beta=_address(beta),
            grad_removal=_address(removal),
            grad_state=_address(state),
            grad_total=_address(total),
        )
        run_units(code.recurrence_backward, work, threads_for(problem))
        query, key = (sum_of_parts(gradient).to(dtype) for gradient in (query, key))
        decay, beta = (None if gradient is None else sum_of_parts(gradient) for gradient in (decay, beta))
        removal = None if removal is None else sum_of_parts(removal).to(dtype)
        return RecurrenceGradients(query, key, value, decay, beta, state, total, removal)

    def segments(self, problem: RecurrenceProblem) -> int:
        """The number of states that `forward` stores for the backward pass, of each key head."""
        return -(-problem.key.shape[2] // (BLOCK * _segment_chunks(problem)))


def _segment_chunks(problem: RecurrenceProblem) -> int:
    """Chunks from one stored state to the next."""
    return max(4, min(64, SEGMENT_ENTRIES // max(problem.key.shape[-1] * problem.value.shape[-1], 1)))


def threads_for(problem: RecurrenceProblem) -> int:
    """The number of threads that the work is worth."""
    batch, heads, tokens, dim = problem.query.shape
    return thread_count(2 * batch * heads * tokens * (BLOCK + dim) * (dim + problem.value.shape[-1]), LEAST_WORK)


def _parts(problem: RecurrenceProblem) -> int:
    """Parts of the value columns: only where key heads alone would leave threads without work."""
    units, value_dim = max(problem.key.shape[0] * problem.key.shape[1], 1), problem.value.shape[-1]
    return max(1, min(-(-threads_for(problem) // units), -(-value_dim // LEAST_PART)))


def structure(problem: RecurrenceProblem, scale: float = 1.0, **results: Any) -> RecurrenceStruct:
    """The C structure of a problem whose last axes, state and total are contiguous; scale: of queries, before φ."""
    (batch, heads, tokens, dim), (_, key_heads, _, value_dim) = problem.query.shape, problem.value.shape
    decay, beta, removal, parts, none = problem.decay, problem.beta, problem.removal, _parts(problem), RowsStruct()
    return RecurrenceStruct(
        unit_count=batch * key_heads * parts if heads else 0,
        batch=batch,
        heads=heads,
        group=heads // max(key_heads, 1),
        tokens=tokens,
        dim=dim,
        value_dim=value_dim,
        parts=parts,
        segment=_segment_chunks(problem),
        dtype=library.DTYPES.index(problem.query.dtype),
        decay_kind=0 if decay is None else decay.ndim - 2,
        feature_map=FEATURE_MAPS.index(problem.feature_map),
        normalize=problem.normalize,
        scale=scale,
        query=rows_struct(problem.query),
        key=rows_struct(problem.key),
        value=rows_struct(problem.value),
        decay=none if decay is None else rows_struct(decay),
        beta=none if beta is None else rows_struct(beta),
        removal=none if removal is None else rows_struct(removal),
        state=_address(problem.state),
        total=_address(problem.total),
        **results,
    )


def _contiguous_rows(problem: RecurrenceProblem) -> RecurrenceProblem:
    """The problem without its history, copied where a last axis, or a state, is not contiguous: as C reads it."""
    query, key, value = (last_contiguous(tensor.detach()) for tensor in (problem.query, problem.key, problem.value))
    removal = None if problem.removal is None else last_contiguous(problem.removal.detach())
    decay, beta = (None if tensor is None else tensor.detach() for tensor in (problem.decay, problem.beta))
    decay = decay if decay is None or decay.ndim == 3 else last_contiguous(decay)
    state, total = _contiguous(problem.state), _contiguous(problem.total)
    return replace(
        problem,
        query=query,
        key=key,
        value=value,
        decay=decay,
        beta=beta,
        state=state,
        total=total,
        removal=removal,
    )


def _address(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory, None for None."""
    return None if tensor is None else tensor.data_ptr()


def sum_of_parts(gradient: Tensor) -> Tensor:
    """The sum of the parts of a gradient, (P, ...)."""
    return gradient.sum(0) if len(gradient) > 1 else gradient.squeeze(0)


def _contiguous(tensor: Tensor | None) -> Tensor | None:
    """The tensor without its history, copied if it is not contiguous."""
    return None if tensor is None else tensor.detach().contiguous()


def check(problem: RecurrenceProblem) -> None:
    """Raise an error that says which tensor does not fit, or what there is no code for."""
    query, key, value = problem.query, problem.key, problem.value
    rows, sums = ("query", "key", "value", "removal"), ("decay", "beta", "state", "total")
    named = {name: getattr(problem, name) for name in (*rows, *sums)}
    if query.dtype not in DTYPES or not query.dtype == key.dtype == value.dtype:
        raise DtypeError(
            f"query is {query.dtype}, key {key.dtype} and value {value.dtype}; native code takes {DTYPE_NAMES}, the "
            "same for all three: pass .float()"
        )
    for name, tensor in named.items():
        if tensor is not None:
            (check_cpu if name in rows else check_float32)(name, tensor)
    if any(tensor.ndim != 4 for tensor in (query, key, value)):
        raise ShapeError(
            f"query, key and value have the shapes {tuple(query.shape)}, {tuple(key.shape)} and {tuple(value.shape)}; "
            "each needs the four axes (batch, heads, tokens, dim)"
        )
    batch, key_heads, tokens, dim = key.shape
    needed = {
        "query": [(batch, query.shape[1], tokens, dim)],
        "value": [(batch, key_heads, tokens, value.shape[3])],
        "decay": [(batch, key_heads, tokens), (batch, key_heads, tokens, dim)],
        "beta": [(batch, key_heads, tokens)],
        "removal": [(batch, key_heads, tokens, dim)],
        "state": [(batch, key_heads, dim, value.shape[3])],
        "total": [(batch, key_heads, dim)],
    }
    for name, shapes in needed.items():
        tensor = named[name]
        if tensor is not None and tuple(tensor.shape) not in shapes:
            raise ShapeError(
                f"{name} has the shape {tuple(tensor.shape)}; with keys of {tuple(key.shape)} it needs "
                f"{' or '.join(map(str, shapes))}"
            )
    if key_heads and query.shape[1] % key_heads:
        raise ShapeError(f"query has {query.shape[1]} heads and key {key_heads}; the second has to divide the first")
    if problem.feature_map not in FEATURE_MAPS:
        raise ConfigurationError(f"feature_map is {problem.feature_map!r}; native code has {FEATURE_MAPS}")
    if problem.normalize and problem.beta is not None:
        raise ConfigurationError("the delta rule has no total of weights: pass normalize=False or beta=None")
    if problem.removal is not None:
        _check_removal(problem, problem.removal)


def _check_removal(problem: RecurrenceProblem, removal: Tensor) -> None:
    """Raise an error where the removed keys are of another kind, or of no delta rule."""
    if removal.dtype is not problem.key.dtype:
        raise DtypeError(
            f"removal is {removal.dtype} and key {problem.key.dtype}; native code takes one dtype for both"
        )
    if problem.beta is None or problem.feature_map != "identity":
        raise ConfigurationError(
            "removal is of the delta rule over keys without a feature map: pass a beta, ones for instance, and "
            "feature_map='identity'"
        )
