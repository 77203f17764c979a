"""The structure that C code of the linear recurrence reads, filled from a problem, which is checked.

The structure is explained in recurrence.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_double, c_int64, c_void_p
from typing import Any

from torch import Tensor

from ...core.recurrence_problem import RecurrenceProblem
from ...errors import ConfigurationError, DtypeError, ShapeError
from ...tiles.tile_bits import BLOCK
from . import library
from .flash_tiles import RowsStruct, rows_struct
from .library import DTYPE_NAMES, DTYPES, check_cpu, check_float32
from .threads import thread_count
from .token_step import STEP_FEATURE_MAPS

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
        *((name, RowsStruct) for name in ("decay", "beta", "removal", "bonus")),
        ("bonus_step", c_int64),
        *((name, c_void_p) for name in ("state", "total")),
        *((name, c_void_p) for name in ("output", "row_total", "final_state", "final_total")),
        *((name, c_void_p) for name in ("border_state", "border_total")),
        *(("grad_output", RowsStruct), ("grad_final_state", c_void_p), ("grad_final_total", c_void_p)),
        *((name, c_void_p) for name in ("grad_query", "grad_key", "grad_value", "grad_decay", "grad_beta")),
        *((name, c_void_p) for name in ("grad_removal", "grad_state", "grad_total")),
    )


def segment_chunks(problem: RecurrenceProblem) -> int:
    """Chunks from one stored state to the next."""
    return max(4, min(64, SEGMENT_ENTRIES // max(problem.key.shape[-1] * problem.value.shape[-1], 1)))


def threads_for(problem: RecurrenceProblem) -> int:
    """The number of threads that the work is worth."""
    batch, heads, tokens, dim = problem.query.shape
    return thread_count(2 * batch * heads * tokens * (BLOCK + dim) * (dim + problem.value.shape[-1]), LEAST_WORK)


def parts_of(problem: RecurrenceProblem) -> int:
    """Parts of the value columns: only where key heads alone would leave threads without work."""
    units, value_dim = max(problem.key.shape[0] * problem.key.shape[1], 1), problem.value.shape[-1]
    return max(1, min(-(-threads_for(problem) // units), -(-value_dim // LEAST_PART)))


def structure(problem: RecurrenceProblem, scale: float = 1.0, **results: Any) -> RecurrenceStruct:
    """The C structure of a problem whose last axes, state and total are contiguous; scale: of queries, before φ."""
    (batch, heads, tokens, dim), (_, key_heads, _, value_dim) = problem.query.shape, problem.value.shape
    decay, beta, removal, parts, none = problem.decay, problem.beta, problem.removal, parts_of(problem), RowsStruct()
    return RecurrenceStruct(
        unit_count=batch * key_heads * parts if heads else 0,
        batch=batch,
        heads=heads,
        group=heads // max(key_heads, 1),
        tokens=tokens,
        dim=dim,
        value_dim=value_dim,
        parts=parts,
        segment=segment_chunks(problem),
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
        state=address_of(problem.state),
        total=address_of(problem.total),
        **results,
    )


def address_of(tensor: Tensor | None) -> int | None:
    """The address of a tensor's memory, None for None."""
    return None if tensor is None else tensor.data_ptr()


def sum_of_parts(gradient: Tensor) -> Tensor:
    """The sum of the parts of a gradient, (P, ...)."""
    return gradient.sum(0) if len(gradient) > 1 else gradient.squeeze(0)


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
