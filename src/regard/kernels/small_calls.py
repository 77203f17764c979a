"""Small calls of `regard.attention` that are repeated: from tensors to native code in few steps of Python.

The arithmetic of a sentence takes as long as the steps around it. For tensors of the shapes, strides and dtype of an
earlier call, with the same mask, all checks and the choice of the kernel would end as they did: they are memoized. What
is known of a mask with tensors is forgotten with it, and holds as long as they are not written to.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .. import native
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import no_mode_active
from ..masks import Mask
from ..native.short_attention import ShortLayout, layout_of
from ..utils.pytree import tree_tensors
from . import cost_model
from .dispatch import SHORT, choose
from .hooks import CURRENT_HOOK
from .short import attend_with_gradient, attend_without_gradient, has_short_tensors, key_spans
from .validation import make_problem

FEW_QUERIES = 8
"""Fewer queries over more keys, without gradients and padding, are a step of decoding: each has another length."""
MAX_CALLS = 4096
"""The number of memoized calls at which the memo is cleared."""


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What is known of calls of the kernel `short` with the same shapes, strides, dtype, mask and scale."""

    scale: float
    spans: Tensor | None
    layout: ShortLayout


_Calls: TypeAlias = dict[tuple[Any, ...], _Call | None]  # None: a call that takes the long way
_calls: _Calls = {}
_calls_of_mask: weakref.WeakKeyDictionary[Mask, _Calls] = weakref.WeakKeyDictionary()


def attend_repeatedly(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, scale: float | None
) -> Tensor | None:
    """The output of a call whose like was computed before by the kernel `short`; None for any other call.

    Only where nothing of torch's or ours watches the call. The tensors have four axes and at most LONGEST rows, and are
    neither traced nor of a subclass.

    Raises:
        ShapeError, DtypeError, MaskError, ConfigurationError: as `attention`.
    """
    learned = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    tensors = () if mask is None else tree_tensors(mask)
    if query.shape[2] < FEW_QUERIES and not learned and not tensors and query.shape[2] < value.shape[2]:
        return None
    if not no_mode_active() or CURRENT_HOOK.get() is not None or not (mask is None or isinstance(mask, Mask)):
        return None
    calls, of_mask = _calls, mask
    if mask is not None and tensors:
        if any(tensor.is_inference() for tensor in tensors):  # whose versions do not count what is written
            return None
        calls, of_mask = _calls_of_mask.setdefault(mask, {}), tuple(tensor._version for tensor in tensors)
    known = (
        *(of_mask, scale, learned, torch.get_num_threads(), native.variant_in_use(), cost_model.times_saved),
        *(query.shape, query.stride(), query.dtype, query.is_cpu),
        *(key.shape, key.stride(), key.dtype, key.is_cpu),
        *(value.shape, value.stride(), value.dtype, value.is_cpu),
    )
    try:
        call = calls[known]
    except TypeError:  # a scale without a hash is no number, which the long way refuses
        return None
    except KeyError:
        call = _remember(calls, known, make_problem(query, key, value, mask=mask, scale=scale))
    if call is None:
        return None
    if learned:
        problem = Problem(DotPairs(query, key, call.scale), value, mask)  # type: ignore[arg-type]
        return attend_with_gradient(problem, call.layout, call.spans)
    return attend_without_gradient(mask, call.layout, call.spans, query, key, value)  # type: ignore[arg-type]


def _remember(calls: _Calls, known: tuple[Any, ...], problem: Problem) -> _Call | None:
    """Memoize what there is to know of a problem."""
    if len(calls) >= MAX_CALLS:
        calls.clear()
    calls[known] = call = _new_call(problem)
    return call


def _new_call(problem: Problem) -> _Call | None:
    pairs, value = problem.pairs, problem.value
    if choose(problem) is not SHORT or not isinstance(pairs, DotPairs) or not has_short_tensors(problem):
        return None
    spans = key_spans(problem)
    layout = layout_of(pairs.scale, spans, pairs.query, pairs.key, value)
    return None if layout.copies else _Call(pairs.scale, spans, layout)
