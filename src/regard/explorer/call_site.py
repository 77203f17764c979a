"""The module of a model that a call of attention comes from, and whether it is self- or cross-attention.

Both are read off Python's stack: a module's hooks know `forward` alone, and a decoder's steps come from other methods.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from .atlas.captured_call import is_causal

ELSEWHERE = ("memory", "key_value_states", "encoder_hidden_states")
"""The names of the argument of attention modules, ours and those of transformers, that is another sequence."""
CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""The names of their argument for the cache of keys and values."""
_CALLING = nn.modules.module.__file__


@dataclass(frozen=True, slots=True)
class CallSite:
    """A module whose method is running: its name, the locals of the innermost, the arguments of the outermost frame.

    with_cache: whether one of its methods has a cache.
    """

    name: str
    variables: Mapping[str, Any]
    arguments: tuple[Any, ...] = ()
    with_cache: bool = False


NO_CALL_SITE = CallSite("", {})


def find_call_site(names: Mapping[nn.Module, str]) -> CallSite:
    """The innermost named module on the stack, with the frames of its call.

    It is read off Python's stack: a module's hooks tell of `forward` alone, and a decoder's steps, or what is looked at
    through lenses, come from other methods.
    """
    found: nn.Module | None = None
    methods: list[FrameType] = []
    for frame, module, below in _methods(sys._getframe(1)):
        if found is None and module in names:
            found = module
        if found is None:
            continue
        if module is not found:
            break
        if frame.f_code.co_filename == _CALLING:
            methods = methods or [below]  # a method may call its module something else than self
            break
        methods.append(frame)
    if found is None:
        return NO_CALL_SITE
    return CallSite(
        names[found] or type(found).__name__,
        {**methods[0].f_locals, "self": found},
        _arguments(methods[-1]),
        any(of.f_locals.get(name) is not None for of in methods for name in CACHES),
    )


def variables_of(kind: type[nn.Module]) -> Mapping[str, Any]:
    """Local variables of the innermost running method of a module of some class; {} if there is none."""
    for frame, module, _ in _methods(sys._getframe(1)):
        if isinstance(module, kind) and frame.f_code.co_filename != _CALLING:
            return frame.f_locals
    return {}


def attention_kind(problem: Problem, site: CallSite) -> tuple[str, bool]:
    """Classify a call as "self" or "cross" attention; also return whether that is a guess.

    A module's method says so by the names of its arguments. Where it does not, more queries than keys are "cross", and
    so are fewer without a cache, but for a single one and for rows that look back: these may go on from keys that were
    kept. All else is "self", a guess where the method was given two sequences.
    """
    variables = site.variables
    if any(variables.get(name) is not None for name in ELSEWHERE):
        return "cross", False
    module = variables.get("self")
    if isinstance(module, nn.MultiheadAttention):
        return ("self" if variables.get("key") is variables.get("query") else "cross"), False
    if variables.get("is_cross_attention") or getattr(module, "is_cross_attention", False):
        return "cross", False
    if problem.queries > problem.keys:
        return "cross", False
    if site.with_cache or any(name in variables for name in ELSEWHERE):
        return "self", False
    if problem.queries < problem.keys and not is_causal(problem):
        return "cross", False
    return "self", _are_two(site.arguments, problem)


def _methods(frame: FrameType) -> Iterator[tuple[FrameType, nn.Module, FrameType]]:
    """Running methods of modules, the innermost first: (frame, module, frame that it called)."""
    at: FrameType | None = frame
    below = frame
    while at is not None:
        code = at.f_code
        if "self" in code.co_varnames or "self" in code.co_freevars:
            module = at.f_locals.get("self")
            if isinstance(module, nn.Module):
                yield at, module, below
        below, at = at, at.f_back


def _arguments(frame: FrameType) -> tuple[Any, ...]:
    """The arguments of a running method."""
    names, more, keywords, values = inspect.getargvalues(frame)
    given = [values[name] for name in names if name in values]
    if more is not None:
        given += values.get(more, ())
    if keywords is not None:
        given += values.get(keywords, {}).values()
    return tuple(given)


def _are_two(arguments: tuple[Any, ...], problem: Problem) -> bool:
    """Whether the arguments have two different sequences, (..., M or N, dim), of the same number of axes."""
    lengths = problem.queries, problem.keys
    given = [of for of in arguments if isinstance(of, Tensor) and of.is_floating_point() and of.ndim > 1]
    given = [of for of in given if of.ndim == given[0].ndim and of.shape[-2] in lengths]
    return any(of is not given[0] and not _equal(of, given[0]) for of in given[1:])


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)
