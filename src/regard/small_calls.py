"""Small calls of `regard.attention` that are repeated: from tensors to native code in few steps of Python.

The arithmetic of a sentence takes as long as the steps around it. For tensors of the shapes, strides and dtype of an
earlier call, with the same mask, all checks and the choice of the kernel would end as they did: they are memoized. What
is known of a mask that is not made of numbers alone is forgotten with it, and with a change of what it reads. The next
token of a text has one key more each time: there the number of keys counts up to the next power of two.

The key has the parts that `signature` lists, or the call takes the long way: it is written out where it is used, as an
object and its calls would take a tenth of the time of the smallest call. It is exact in what `signature` leaves out,
strides and scale, which native code is given; whether keys and values have one length is checked for each step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, cast

import torch
from torch import Tensor
from torch.nn import Parameter

from . import native
from .backends.cpu.few_queries import LEAST_WORK, StepLayout, attend_step, step_layout
from .backends.cpu.short_rows import LONGEST, ShortLayout, layout_of
from .core.problem import Problem
from .core.score_forms import DotPairs
from .core.state import is_constant
from .core.torch_modes import no_mode_active
from .kernels.hooks import CURRENT_HOOK
from .kernels.planning import rates
from .kernels.planning.choice import DECODE, SHORT, choose
from .kernels.short import attend_with_gradient, attend_without_gradient, has_short_tensors, has_terms
from .kernels.validation import drops_nothing, make_problem
from .masks import Mask
from .tiles.dense_mask import is_one_causal_query
from .tiles.memo import memo_of
from .tiles.row_spans import key_spans

PLAIN_TYPES = (Tensor, Parameter)
"""The types of queries, which may be learned themselves; keys and values follow from an input."""
QUICK = ("mask", "scale")
"""The options of calls that are remembered."""
MAX_CALLS = 4096
"""The number of memoized calls at which the memo is cleared."""


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """What is known of calls of the kernel `short` with the same shapes, strides, dtype, mask and scale."""

    scale: float
    spans: Tensor | None
    layout: ShortLayout


_Calls: TypeAlias = dict[tuple[Any, ...], _Call | StepLayout | None]  # None: a call that takes the long way
_calls: _Calls = {}


Arguments = ParamSpec("Arguments")


def repeated_calls(attention: Callable[Arguments, Tensor]) -> Callable[Arguments, Tensor]:
    """The function `attention`, whose small calls go straight to native code where their like came before."""
    in_full = cast(Callable[..., Tensor], attention)

    @wraps(attention)
    def attend(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        # Where torch traces the call, no length is compared.
        traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
        dense = type(query) in PLAIN_TYPES and not query.is_nested
        small = dense and not traced and query.ndim == 4 and query.shape[2] <= LONGEST
        if small and (not options or _is_plain(options)):
            output = attend_repeatedly(query, key, value, options.get("mask"), options.get("scale"))
            if output is not None:
                return output
        return in_full(query, key, value, **options)

    return cast(Callable[Arguments, Tensor], attend)


def _is_plain(options: dict[str, Any]) -> bool:
    """Whether no option but mask and scale is given."""
    for name, given in options.items():
        if given is not None and name not in QUICK and not (name == "dropout_p" and drops_nothing(given)):
            return False
    return True


def attend_repeatedly(
    query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None, scale: float | None
) -> Tensor | None:
    """The output of a call whose like was computed before by the kernel `short`, or `decode`; None for any other call.

    Only tensors of four axes, of no subclass and of at most LONGEST rows, where nothing of torch's or ours watches the
    call, and it is not compiled.

    Raises:
        ShapeError, DtypeError, MaskError, ConfigurationError: as `attention`.
    """
    if not no_mode_active() or CURRENT_HOOK.get() is not None:
        return None
    if not (
        type(query) in PLAIN_TYPES and type(key) is type(value) is Tensor and (mask is None or isinstance(mask, Mask))
    ):
        return None
    try:
        shape, key_shape, value_shape = query.shape, key.shape, value.shape
    except RuntimeError:  # a nested tensor has none; the long way refuses it
        return None
    if not len(shape) == len(key_shape) == len(value_shape) == 4:
        return None
    queries, keys = shape[2], value_shape[2]
    if queries > LONGEST or keys > LONGEST:
        return None
    learned = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    constant = mask is None or is_constant(mask)
    step = queries == 1 <= keys and not learned and constant
    if step and key_shape[2] != keys:
        return None
    calls, of_mask = _calls, mask
    if not constant:
        if (memo := memo_of(mask)).state is None:
            return None
        calls, of_mask = memo.calls, None
    settings = of_mask, scale, learned, torch.get_num_threads(), native.variant_in_use(), rates.times_saved
    if step:
        known = *settings, *_described(query), *_described_growing(key), *_described_growing(value)
    else:  # `_described` without its calls, which take a microsecond
        known = (
            *settings,
            *(shape, query.stride(), query.dtype, query.is_cpu),
            *(key_shape, key.stride(), key.dtype, key.is_cpu),
            *(value_shape, value.stride(), value.dtype, value.is_cpu),
        )
    try:
        call = calls[known]
    except TypeError:  # a scale without a hash is no number, which the long way refuses
        return None
    except KeyError:
        call = _remember(calls, known, make_problem(query, key, value, mask=mask, scale=scale), step)
    if call is None:
        return None
    if isinstance(call, StepLayout):
        return attend_step(call, query, key, value)
    if learned:
        problem = Problem(DotPairs(query, key, call.scale), value, mask)
        return attend_with_gradient(problem, call.layout, call.spans)
    return attend_without_gradient(mask, call.layout, call.spans, query, key, value)


def _described(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.is_cpu


def _described_growing(tensor: Tensor) -> tuple[Any, ...]:
    """Of a cache: its length up to a power of two, as limits of kernels are such, and no strides that follow it."""
    batch, heads, length, dim = tensor.shape
    return batch, heads, (length - 1).bit_length(), dim, tensor.stride(3), tensor.dtype, tensor.is_cpu


def _remember(calls: _Calls, known: tuple[Any, ...], problem: Problem, step: bool) -> _Call | StepLayout | None:
    """Memoize what there is to know of a problem."""
    if len(calls) >= MAX_CALLS:
        calls.clear()
    calls[known] = call = _new_step(problem) if step else _new_call(problem)
    return call


def _new_step(problem: Problem) -> StepLayout | None:
    """The layout of a step, where it and all that are described alike are one call of `DECODE` on one thread."""
    pairs, value = problem.pairs, problem.value
    if not isinstance(pairs, DotPairs) or choose(problem) is not DECODE or not DECODE.is_one_call(problem):
        return None
    longest = 1 << (problem.keys - 1).bit_length()
    numbers = (pairs.key.numel() + value.numel()) // problem.keys * longest
    every_key = problem.mask is None or is_one_causal_query(problem)
    in_rows = pairs.query.stride(3) == pairs.key.stride(3) == value.stride(3) == 1
    if not every_key or not in_rows or numbers >= 2 * LEAST_WORK:
        return None
    return step_layout(pairs.query, pairs.key, value, pairs.scale)


def _new_call(problem: Problem) -> _Call | None:
    pairs, value = problem.pairs, problem.value
    if choose(problem) is not SHORT or not isinstance(pairs, DotPairs) or not has_short_tensors(problem):
        return None
    if has_terms(problem):
        return None
    spans = key_spans(problem)
    layout = layout_of(pairs.scale, spans, pairs.query, pairs.key, value)
    return None if layout.copies else _Call(pairs.scale, spans, layout)
