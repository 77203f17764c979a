"""Attention hooks, called with every attention problem and its log-sum-exp, and substitutes for the kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..backends.torch.dense_block import NARROW
from ..core.problem import Problem
from ..errors import ConfigurationError
from ..lenses import Lens
from . import Kernel, Result, choose, finite_problem
from .custom_op import apply_kernel

AttentionHook: TypeAlias = Callable[[Problem, Tensor], None]
"""hook(problem, lse): the problem with NaN set to 0, and its rows' log-sum-exp, NaN where a row attends to NaN."""


LinearSubstitute: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any, bool], tuple[Tensor, Any]]
"""compute(query, key, value, options, wants_state): the output and, if it is wanted, the state of linear attention."""

LinearObserver: TypeAlias = Callable[[Tensor, Tensor, Tensor, Any, Sequence[Lens]], Any]
"""observe(query, key, value, options, lenses): the `Observation` of `regard.observe_linear_attention`."""


@dataclass(frozen=True, eq=False)
class AttentionSubstitute:
    """A function that computes attention in place of the kernels.

    compute(problem): the output (..., heads, M, Dv), with its log-sum-exp as a `Result` where that is not the
    kernel's, or None where the kernel is to compute it. linear: the same for linear attention; without it that is
    computed as everywhere. observe_linear: computes `regard.observe_linear_attention`; without it `observe` does.
    no_mixtures: the message of the error of layers that mix the keys of all positions, where the substitute has
    some of the positions alone. no_convolutions: the same for those that read the tokens just before each.
    observe(problem, lenses): the `Observation` of `regard.observe`; without it the
    kernels' weights are observed. hook: the attention hook that `compute` and `observe` call. with_hook(hook): the
    same substitute with another hook; without it a hook replaces the substitute.
    """

    compute: Callable[[Problem], Tensor | Result | None]
    linear: LinearSubstitute | None = None
    observe_linear: LinearObserver | None = None
    no_mixtures: str | None = None
    no_convolutions: str | None = None
    observe: Callable[[Problem, Sequence[Lens]], Any] | None = None
    hook: AttentionHook | None = None
    with_hook: Callable[[AttentionHook], AttentionSubstitute] | None = None


CURRENT_HOOK: ContextVar[AttentionHook | AttentionSubstitute | None] = ContextVar("attention_hook", default=None)


@contextmanager
def attention_hook(hook: AttentionHook) -> Iterator[None]:
    """Call `hook(problem, lse)` after every attention in the block, whose results it does not change by a bit.

    `regard.attention`, `attention_with_lse` and `observe` call it, and so does everything built on them; of nested
    hooks the innermost alone is called. None is called under torch.compile and torch.func, where tensors have no
    values. In `regard.ring.sharded` the hook is called in the process of rank 0, with the whole sequence.

    >>> import torch, regard
    >>> shapes, q = [], torch.zeros(3, 4)
    >>> with attention_hook(lambda problem, lse: shapes.append(lse.shape)):
    ...     _ = regard.attention(q, q, q)
    >>> shapes
    [torch.Size([3])]
    """
    current = CURRENT_HOOK.get()
    shared = isinstance(current, AttentionSubstitute) and current.with_hook is not None
    token = CURRENT_HOOK.set(current.with_hook(hook) if shared else hook)  # type: ignore[union-attr,misc]
    try:
        yield
    finally:
        CURRENT_HOOK.reset(token)


@contextmanager
def substitute_attention(compute: Callable[[Problem], Tensor | None]) -> Iterator[None]:
    """Compute every attention in the block by `compute(problem)`, or by its kernel where that returns None.

    The log-sum-exp, where it is wanted, stays that of the kernel. An active hook is not called in the block.

    >>> import torch, regard
    >>> q = torch.zeros(3, 4)
    >>> with substitute_attention(lambda problem: problem.value + 1):
    ...     output = regard.attention(q, q, q)
    >>> bool((output == 1).all())
    True
    """
    with active_substitute(AttentionSubstitute(compute)):
        yield


@contextmanager
def no_hook() -> Iterator[None]:
    """Compute every attention in the block by the kernels, and call no hook."""
    token = CURRENT_HOOK.set(None)
    try:
        yield
    finally:
        CURRENT_HOOK.reset(token)


@contextmanager
def active_substitute(substitute: AttentionSubstitute) -> Iterator[None]:
    """Compute every attention in the block by a substitute."""
    token = CURRENT_HOOK.set(substitute)
    try:
        yield
    finally:
        CURRENT_HOOK.reset(token)


def current_hook() -> AttentionHook | None:
    """The attention hook that is active in this thread; None outside of `attention_hook`.

    Under a substitute it is the one that the substitute calls.
    """
    hook = CURRENT_HOOK.get()
    return hook.hook if isinstance(hook, AttentionSubstitute) else hook


def current_substitute() -> AttentionSubstitute | None:
    """The substitute of the kernels that is active in this thread, if there is one."""
    hook = CURRENT_HOOK.get()
    return hook if isinstance(hook, AttentionSubstitute) else None


def linear_substitute() -> LinearSubstitute | None:
    """What computes linear attention in place of its own code; None for nothing, and under torch.compile."""
    if torch.compiler.is_compiling():
        return None
    hook = CURRENT_HOOK.get()
    return hook.linear if isinstance(hook, AttentionSubstitute) else None


def linear_observer() -> LinearObserver | None:
    """What computes linear attention with lenses in place of its own code, if anything does."""
    hook = CURRENT_HOOK.get()
    return hook.observe_linear if isinstance(hook, AttentionSubstitute) else None


def refuse_mixtures() -> None:
    """Raise the error of mixtures of all keys under a substitute that has some of the positions alone.

    Raises:
        ConfigurationError: there is such a substitute.
    """
    if torch.compiler.is_compiling():
        return
    hook = CURRENT_HOOK.get()
    if isinstance(hook, AttentionSubstitute) and hook.no_mixtures is not None:
        raise ConfigurationError(hook.no_mixtures)


def refuse_convolutions() -> None:
    """Check that a layer has the tokens before each position, which its convolution reads.

    Raises:
        ConfigurationError: the current substitute has some of the positions alone.
    """
    if torch.compiler.is_compiling():
        return
    hook = CURRENT_HOOK.get()
    if isinstance(hook, AttentionSubstitute) and hook.no_convolutions is not None:
        raise ConfigurationError(hook.no_convolutions)


def refuse_few_positions(message: str) -> None:
    """Raise an error of this message under a substitute that has some of the positions alone.

    Raises:
        ConfigurationError: there is such a substitute.
    """
    if torch.compiler.is_compiling():
        return
    hook = CURRENT_HOOK.get()
    if isinstance(hook, AttentionSubstitute) and (hook.no_convolutions or hook.no_mixtures):
        raise ConfigurationError(message)


def run_with_hook(problem: Problem, kernel: Kernel, hook: AttentionHook | AttentionSubstitute) -> Result:
    """Run a kernel on a problem and call the hook, or run the substitute."""
    if isinstance(hook, AttentionSubstitute):
        return _run_substitute(problem, kernel, hook)
    result = _run_with_lse(problem, kernel)
    with torch.no_grad():
        lse = compute_lse(problem) if result.lse is None else result.lse
        token = CURRENT_HOOK.set(None)  # attention that the hook itself computes does not call it again
        try:
            hook(finite_problem(problem), lse.detach())
        finally:
            CURRENT_HOOK.reset(token)
    return result


def _run_substitute(problem: Problem, kernel: Kernel, substitute: AttentionSubstitute) -> Result:
    """The substitute's output, or the kernel's."""
    token = CURRENT_HOOK.set(None)  # attention that the substitute itself computes is not replaced
    try:
        output = substitute.compute(problem)
        if output is None:
            return kernel.run(problem)
        if isinstance(output, Result):
            return output
        return Result(output, compute_lse(problem) if problem.wants_lse else None)
    finally:
        CURRENT_HOOK.reset(token)


def _run_with_lse(problem: Problem, kernel: Kernel) -> Result:
    """A kernel's result, bit for bit, with the log-sum-exp if the same computation returns both."""
    wanting = replace(problem, wants_lse=True)
    if not kernel.why_not(wanting):
        return kernel.run(wanting)
    if kernel.name == "sdpa" and _uses_flash(problem):
        return apply_kernel(wanting, kernel)  # type: ignore[arg-type]  # the sdpa kernel brings its own gradient
    return kernel.run(problem)


def _uses_flash(problem: Problem) -> bool:
    """Whether torch's operator dispatches to its flash kernel, which the sdpa kernel calls for the log-sum-exp."""
    return (
        problem.value.is_cpu
        and problem.keys >= NARROW
        and problem.pairs.query.shape[-1] == problem.value.shape[-1]
        and not problem.bias_requires_grad()
    )


def compute_lse(problem: Problem) -> Tensor:
    """The log-sum-exp by itself; dropout does not change it, and none is drawn."""
    wanting = replace(problem, wants_lse=True, dropout=None)
    lse = choose(wanting).run(wanting).lse
    if lse is None:
        raise AssertionError("a kernel chosen for a problem that wants the log-sum-exp returned none")
    return lse
