"""Attention hooks: functions called with every attention problem and its log-sum-exp."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.torch_modes import under_transform
from . import Plan, Result, choose, zero_nonfinite_inputs
from .custom_op import attend
from .dense_block import NARROW

AttentionHook: TypeAlias = Callable[[Problem, Tensor], None]
"""hook(problem, lse): the problem with NaN set to 0, and its rows' log-sum-exp, NaN where a row attends to NaN."""

_current_hook: ContextVar[AttentionHook | None] = ContextVar("attention_hook", default=None)


@contextmanager
def attention_hook(hook: AttentionHook) -> Iterator[None]:
    """Call `hook(problem, lse)` after every attention in the block; results are the same with and without it, bit for
    bit.

    `regard.attention`, `attention_with_lse` and `observe` call it, and so does everything built on them; of nested
    hooks the innermost alone is called. None is called under torch.compile and torch.func, where tensors have no
    values.

    >>> import torch, regard
    >>> shapes, q = [], torch.zeros(3, 4)
    >>> with attention_hook(lambda problem, lse: shapes.append(lse.shape)):
    ...     _ = regard.attention(q, q, q)
    >>> shapes
    [torch.Size([3])]
    """
    token = _current_hook.set(hook)
    try:
        yield
    finally:
        _current_hook.reset(token)


def current_hook() -> AttentionHook | None:
    """The hook that attention computed now in this thread would call."""
    return _current_hook.get()


def run(plan: Plan) -> Result:
    """Compute a problem, and call the current hook, if there is one."""
    # Without a hook the look-up costs some tens of nanoseconds. torch.compile cannot trace it.
    if torch.compiler.is_compiling() or (hook := _current_hook.get()) is None or under_transform():
        return plan.run()
    result = _with_lse(plan)
    with torch.no_grad():
        problem = plan.problem
        lse = _compute_lse(problem) if result.lse is None else result.lse
        hook(zero_nonfinite_inputs(problem), lse.detach())
    return result


def _with_lse(plan: Plan) -> Result:
    """The result of a plan with its bits unchanged, and the log-sum-exp too where the same computation returns both."""
    problem = plan.problem
    wanting = replace(problem, wants_lse=True)
    if not plan.kernel.why_not(wanting):
        return plan.kernel.run(wanting)
    if plan.kernel.name == "sdpa" and _uses_flash(problem):
        return attend(wanting, plan.kernel)  # type: ignore[arg-type]  # the sdpa kernel brings its own gradient
    return plan.run()


def _uses_flash(problem: Problem) -> bool:
    """Whether torch's operator dispatches to its flash kernel, which the sdpa kernel calls for the log-sum-exp."""
    return (
        problem.value.is_cpu
        and problem.keys >= NARROW
        and problem.pairs.query.shape[-1] == problem.value.shape[-1]
        and not problem.bias_needs_gradient()
    )


def _compute_lse(problem: Problem) -> Tensor:
    """The log-sum-exp by itself; dropout does not change it, and none is drawn."""
    lse = choose(replace(problem, wants_lse=True, dropout=None)).run().lse
    if lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp returned none")
    return lse
