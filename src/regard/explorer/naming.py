"""Which module of a model a call of attention comes from, and whether it looks at the module's own input."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

from torch import nn

from ..problem import Problem

ELSEWHERE = ("memory", "key_value_states", "encoder_hidden_states")
"""What attention modules call another sequence that they look at: ours, and those of transformers."""


def caller(names: Mapping[nn.Module, str]) -> tuple[str, Mapping[str, Any]]:
    """The name of the innermost module that is at work, and the local variables of its method.

    It is read off Python's stack: a module's hooks tell of `forward` alone, and a decoder's steps, or what is looked at
    through lenses, come from other methods.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if "self" in code.co_varnames or "self" in code.co_freevars:
            variables = frame.f_locals
            module = variables.get("self")
            if isinstance(module, nn.Module) and module in names:
                return names[module] or type(module).__name__, variables
        frame = frame.f_back
    return "", {}


def kind_of(problem: Problem, variables: Mapping[str, Any]) -> str:
    """Whether attention is "cross", to another sequence, or "self".

    A module's method says so by the names of its arguments. Where it does not, more queries than keys are "cross".
    """
    if any(variables.get(name) is not None for name in ELSEWHERE):
        return "cross"
    module = variables.get("self")
    if isinstance(module, nn.MultiheadAttention):
        return "self" if variables.get("key") is variables.get("query") else "cross"
    if variables.get("is_cross_attention") or getattr(module, "is_cross_attention", False):
        return "cross"
    return "cross" if problem.queries > problem.keys else "self"
