"""One token of the linear recurrence: its output, and the state after it, written or as the tokens that it lacks.

The structure is explained in recurrence.h.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int64, c_void_p
from functools import lru_cache

import torch
from torch import Tensor

from ..errors import ConfigurationError, ShapeError
from . import library
from .flash import RowsStruct
from .library import last_contiguous
from .linear_recurrence import FEATURE_MAPS, RecurrenceProblem
from .threads import run_units, thread_count

STEP_FEATURE_MAPS = (*FEATURE_MAPS, "unit_norm")  # recurrence.h has the same, in this order

LEAST_STATE = 2**17
"""Entries of the state that a step of one token has for each thread: some 20 microseconds."""


class RecurrenceStepStruct(ctypes.Structure):
    """The structure `recurrence_step` of recurrence.h."""

    _fields_ = (
        *((name, c_int64) for name in ("next_unit", "unit_count", "failed", "invalid", "heads", "group", "dim")),
        *(
            (name, c_int64)
            for name in ("value_dim", "recent_count", "recent_capacity", "decay_kind", "feature_map", "normalize")
        ),
        ("scale", c_float),
        *((name, RowsStruct) for name in ("query", "key", "value", "decay", "beta")),
        *((name, c_void_p) for name in ("state", "recent", "output", "final_state")),
    )


def recurrence_step(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    decay: Tensor | None,
    beta: Tensor | None,
    state: Tensor,
    *,
    recent: Tensor | None = None,
    recent_count: int = 0,
    writes: bool = True,
    feature_map: str = "identity",
    normalize: bool = False,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """The recurrence of one token: its output, and the new state, or the old one where not `writes`.

    Computed without autograd. The state is read once; without `writes` nothing of its size is written.

    All are float32 on the CPU. The output is (B, H, 1, Dv).

    Args:
        query: (B, H, 1, D).
        key: (B, Hk, 1, D).
        value: (B, Hk, 1, Dv).
        decay: (B, Hk, 1) or (B, Hk, 1, D), at most 0.
        beta: (B, Hk, 1), within 0..2.
        state: (B, Hk, D, Dv), with the total as one more column if `normalize`.
        recent: (B, Hk, capacity, W), contiguous, of the width W = `recent_width(...)`: tokens that the state lacks,
            each φ(k), u and the factor of its decay.
        recent_count: how many of these there are.
        writes: whether the new state is written; else the token becomes an entry of `recent`, in place.
        feature_map: of queries times `scale`, and of keys: one of `STEP_FEATURE_MAPS`.
        normalize: whether outputs are divided by their totals; a row whose total is 0 is 0.
        scale: of queries.

    Raises:
        KernelError: there is no native code to call (`regard.native.why_not`).
        ShapeError, DtypeError, DeviceError: a tensor is not as above.
        ConfigurationError: a decay above 0, or a beta not within 0..2.
    """
    gates = None if decay is None else decay.shape, None if beta is None else beta.shape
    fits = _fits(query.shape, key.shape, value.shape, *gates, state.shape, normalize)
    if not fits or not _are_float32(query, key, value, decay, beta, state):
        sums = (state[..., :-1], state[..., -1]) if normalize else (state, None)
        RecurrenceProblem(query, key, value, decay, beta, *sums)  # raises an error that says what does not fit
        raise ShapeError(f"query has {query.shape[2]} tokens; a step is of one")
    query, key, value = (last_contiguous(tensor) for tensor in (query, key, value))
    decay, state = None if decay is None else last_contiguous(decay), state.contiguous()
    (batch, heads, _, dim), key_heads, value_dim = query.shape, key.shape[1], value.shape[3]
    output = query.new_empty(batch, heads, 1, value_dim)
    new_state = torch.empty_like(state) if writes else state
    work = RecurrenceStepStruct(
        *(0, batch * key_heads if heads else 0, 0, 0, heads, heads // max(key_heads, 1), dim, value_dim, recent_count),
        *(0 if recent is None else recent.shape[2], 0 if decay is None else decay.ndim - 2),
        *(STEP_FEATURE_MAPS.index(feature_map), normalize, scale),
        *(_first_row(query), _first_row(key), _first_row(value), _first_row(decay), _first_row(beta)),
        *(state.data_ptr(), None if recent is None else recent.data_ptr(), output.data_ptr()),
        new_state.data_ptr() if writes else None,
    )
    run_units(library.current().recurrence_step, work, thread_count(state.numel(), LEAST_STATE))
    if work.invalid:
        raise ConfigurationError("a decay is above 0, or a beta is not within 0..2")
    return output, new_state


def recent_width(dim: int, value_dim: int, decay: Tensor | None) -> int:
    """Numbers that `recurrence_step` stores of a token: its φ(k), u, and the factor of its decay (B, Hk, 1[, D])."""
    return dim + value_dim + (0 if decay is None else 1 if decay.ndim == 3 else dim)


def _first_row(tensor: Tensor | None) -> RowsStruct:
    """The rows of a tensor (B, heads, 1, ...); null for None."""
    if tensor is None:
        return _NO_ROWS
    strides = tensor.stride()
    return RowsStruct(tensor.data_ptr(), strides[0], strides[1], 0)


_NO_ROWS = RowsStruct(None, 0, 0, 0)


def _are_float32(*tensors: Tensor | None) -> bool:
    """Whether all tensors that there are have float32 numbers on the CPU."""
    return all(tensor is None or (tensor.dtype is torch.float32 and tensor.is_cpu) for tensor in tensors)


@lru_cache(maxsize=256)  # the same shapes come at every step
def _fits(
    query: torch.Size,
    key: torch.Size,
    value: torch.Size,
    decay: torch.Size | None,
    beta: torch.Size | None,
    state: torch.Size,
    normalize: bool,
) -> bool:
    """Whether these are shapes of the arguments of `recurrence_step`."""
    if not len(query) == len(key) == len(value) == 4:
        return False
    leading, dim = key[:3], key[3]
    return (
        query[2] == key[2] == 1
        and (query[0], query[3]) == (key[0], dim)
        and value[:3] == leading
        and query[1] % max(key[1], 1) == 0
        and state == (*leading[:2], dim, value[3] + normalize)
        and (decay is None or decay in (leading, key))
        and (beta is None or beta == leading)
    )
