"""Whether a call of attention is self- or cross-attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..core.problem import Problem
from ..kernels.call_site import CallSite
from .atlas.captured_call import is_causal

ELSEWHERE = ("memory", "key_value_states", "encoder_hidden_states")
"""The names of the argument of attention modules, ours and those of transformers, that is another sequence."""


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


def _are_two(arguments: tuple[Any, ...], problem: Problem) -> bool:
    """Whether the arguments have two different sequences, (..., M or N, dim), of the same number of axes."""
    lengths = problem.queries, problem.keys
    given = [of for of in arguments if isinstance(of, Tensor) and of.is_floating_point() and of.ndim > 1]
    given = [of for of in given if of.ndim == given[0].ndim and of.shape[-2] in lengths]
    return any(of is not given[0] and not _equal(of, given[0]) for of in given[1:])


def _equal(left: Tensor, right: Tensor) -> bool:
    return left.shape == right.shape and left.device == right.device and torch.equal(left, right)
