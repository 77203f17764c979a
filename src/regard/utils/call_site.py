"""The module of a model that a call of attention comes from.

It is read off Python's stack: a module's hooks know `forward` alone, and a decoder's steps come from other methods.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torch import nn

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""The names of their argument for the cache of keys and values."""
ELSEWHERE = ("memory", "key_value_states", "encoder_hidden_states")
"""The names of the argument of attention modules, ours and those of transformers, that is another sequence."""
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

    @property
    def is_cross(self) -> bool:
        """Whether the module's method says that its keys are those of another sequence."""
        variables = self.variables
        if any(variables.get(name) is not None for name in ELSEWHERE):
            return True
        module = variables.get("self")
        if isinstance(module, nn.MultiheadAttention):
            return variables.get("key") is not variables.get("query")
        return bool(variables.get("is_cross_attention") or getattr(module, "is_cross_attention", False))


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
