"""Who listens to attention: each call tells what it computes, where someone asked to hear it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.torch_modes import transformed
from . import Plan, Result, choose, cleaned
from .custom_op import attend
from .dense_block import NARROW


class Listener(Protocol):
    """Whoever is told of each call of attention."""

    def hear(self, problem: Problem, lse: Tensor) -> None:
        """One call: the problem, its NaN as 0, and the log-sum-exp of its rows, NaN where a row attends to one."""
        ...


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Tell a listener of every attention in the block; the results are what they are without it, bit for bit.

    `regard.attention`, `attention_with_lse` and `observe` tell, and all that calls them; a listener inside another one
    hears alone. Nothing is told under torch.compile and torch.func, where there are no numbers to tell.

    >>> import torch, regard
    >>> class Counter:
    ...     calls = 0
    ...     def hear(self, problem, lse):
    ...         self.calls += 1
    >>> counter, q = Counter(), torch.zeros(3, 4)
    >>> with listening(counter):
    ...     _ = regard.attention(q, q, q)
    >>> counter.calls
    1
    """
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


def current() -> Listener | None:
    """Who is told of attention that is computed here and now, in this thread."""
    return _listener.get()


def run(plan: Plan) -> Result:
    """Compute a problem, and tell of it where someone listens."""
    # Without a listener one look costs some tens of nanoseconds. torch.compile cannot take it, and sees none.
    if torch.compiler.is_compiling() or (listener := _listener.get()) is None or transformed():
        return plan.run()
    result = _with_lse(plan)
    with torch.no_grad():
        problem = plan.problem
        lse = _lse_of(problem) if result.lse is None else result.lse
        listener.hear(cleaned(problem), lse.detach())
    return result


def _with_lse(plan: Plan) -> Result:
    """The result of a plan with its bits unchanged, and the log-sum-exp too where the same computation gives both."""
    problem = plan.problem
    asking = replace(problem, wants_lse=True)
    if not plan.kernel.why_not(asking):
        return plan.kernel.run(asking)
    if plan.kernel.name == "fused" and _is_flash(problem):
        return attend(asking, plan.kernel)  # type: ignore[arg-type]  # the fused kernel brings its own gradient
    return plan.run()


def _is_flash(problem: Problem) -> bool:
    """Whether torch's operator takes its flash kernel, which the fused kernel calls itself for the log-sum-exp."""
    return (
        problem.value.is_cpu
        and problem.keys >= NARROW
        and problem.pairs.query.shape[-1] == problem.value.shape[-1]
        and not problem.bias_needs_gradient()
    )


def _lse_of(problem: Problem) -> Tensor:
    """The log-sum-exp by itself; dropout leaves it as it is, and none is drawn."""
    lse = choose(replace(problem, wants_lse=True, dropout=None)).run().lse
    if lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp gave none")
    return lse
