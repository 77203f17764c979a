"""The short kernel: native attention over few keys, with masks of which each row is one span of keys."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import native
from ..backends.cpu.library import DTYPE_NAMES, DTYPES
from ..backends.cpu.short_rows import (
    LONGEST,
    FiniteShortGradients,
    ShortLayout,
    attend_laid_out,
    attend_short,
    attend_short_backward,
    differentiate_laid_out,
    few_rows,
    lanes,
    layout_of,
)
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import functorch_active, mapped_by_autograd, unwrap_if_dead
from ..masks import Mask
from ..tiles.memo import modified, remembered_state
from ..tiles.row_spans import has_spans, key_spans
from ..utils.pytree import tree_tensors
from .base import GRADIENT, INPUT_GRADIENTS, Cost, FlashWork, Result
from .custom_op import apply_kernel, compute_forward, differentiate, register
from .planning.unit_costs import RESULT, bytes_read, heads_per_key, total_width

CALLS = 8.0
"""Overhead of a forward pass, in calls."""
OWN_GRADIENT = 8.0
"""Overhead of a gradient that needs nothing but native code, in calls."""
LAID_OUT, AS_THEY_ARE = 1.5, 0.8
"""Keys and values that `cpu_flash` packs in the time in which this kernel brings one into the order of its products,
once for each key head; and in which it multiplies one with few rows as it is."""
ROWS_AT_ONCE = 8
"""For so many rows at once, all that one of them reads is computed."""


class ShortKernel:
    """Attention over at most LONGEST keys in C: all scores of a row at once, and one call forward and one backward.

    It reads float32, bfloat16 and float16, grouped heads, and masks of which each row is a span of keys: causal,
    windows, padding, documents in order, and what `&` makes of them. The span of a row is two numbers, so that no mask
    of n² is in memory, and keys outside of it are not read.
    """

    name = "short"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Features that its code does not support, or more keys than it is meant for."""
        reasons, value = [], problem.value
        if problem.operator != "softmax":
            reasons.append(f"its code computes softmax attention; this is {problem.operator}")
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("its code computes dot products; this score is additive")
        for name, feature in (("bias", problem.bias), ("softcap", problem.softcap), ("dropout", problem.dropout)):
            if feature is not None:
                reasons.append(f"its code has no {name}")
        if problem.keys > LONGEST:
            reasons.append(f"it is for at most {LONGEST} keys, whose scores fit into a core's cache; here are more")
        if value.dtype not in DTYPES:
            reasons.append(f"its code reads {DTYPE_NAMES}; this is {str(value.dtype).removeprefix('torch.')}")
        if not value.is_cpu:
            reasons.append(f"its code runs on the CPU; this is on {value.device}")
        if reason := native.why_not():
            reasons.append(f"there is no native code: {reason}")
        if not reasons and problem.mask is not None and not has_spans(problem.mask, problem):
            reasons.append("the keys that a row of the mask attends to are no span that its symbols tell")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The pairs of the spans, in whole vectors of keys; keys and values are laid out once for each key head.

        Values of float32 are read as they are in the forward pass.
        """
        rows, width = problem.weights_shape[:-1].numel(), total_width(problem)
        pairs = rows * _mean_columns(problem)
        value, units = problem.value, problem.value.shape[:-2].numel()
        as_they_are = value.element_size() == 4 and not problem.inputs_require_grad()
        laid_out = value.shape[:-1].numel() * (width - as_they_are * value.shape[-1])
        few = heads_per_key(problem) * problem.queries <= few_rows(problem)
        idle = torch.get_num_threads() / max(min(units, torch.get_num_threads()), 1)  # a key head has one thread
        packed = (AS_THEY_ARE if few else LAID_OUT) * idle * laid_out
        return Cost(
            flops=0.0,
            flash={"cpu": FlashWork(2.0 * idle * pairs * width, idle * pairs, packed)},
            bytes=0.0,
            passes=RESULT * rows * problem.value.shape[-1],
            moved=bytes_read(problem),
            calls=CALLS,
            gradient=OWN_GRADIENT if has_short_tensors(problem) else GRADIENT,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """All but those of a bias, which it has not."""
        return INPUT_GRADIENTS

    def run(self, problem: Problem) -> Result:
        """Output, and the log-sum-exp if it is requested.

        Where nothing but the output is, a call takes few steps in Python, as it may take no longer than they do.
        """
        pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `why_not` refuses other forms
        query, key, value = pairs.query, pairs.key, problem.value
        if not has_short_tensors(problem) or torch.compiler.is_compiling() or functorch_active():
            return apply_kernel(problem, self)
        spans = key_spans(problem)
        layout = layout_of(pairs.scale, spans, query, key, value)
        if layout.copies:
            return apply_kernel(problem, self)
        if problem.inputs_require_grad():
            return Result(attend_with_gradient(problem, layout, spans))
        output = attend_without_gradient(problem.mask, layout, spans, query, key, value)
        return apply_kernel(problem, self) if output is None else Result(output)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        pairs: DotPairs = batched.pairs  # type: ignore[assignment]
        return attend_short(pairs.query, pairs.key, batched.value, pairs.scale, key_spans(batched.problem))

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem, in its dtype."""
        pairs: DotPairs = batched.pairs  # type: ignore[assignment]
        grad_lse = saved.grad_lse if saved.has_lse_grad else None
        inputs = pairs.query, pairs.key, batched.value, pairs.scale, key_spans(batched.problem)
        gradients = attend_short_backward(*inputs, saved.lse, saved.grad_output, grad_lse, saved.output)
        return ProblemGradients(*gradients, finite=isinstance(gradients, FiniteShortGradients))


def has_short_tensors(problem: Problem) -> bool:
    """Whether native code reads the tensors as they are, and nothing but the output is wanted."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return (
        problem.sinks is None
        and not problem.wants_lse
        and query.ndim == key.ndim == value.ndim == 4
        and query.shape[0] == key.shape[0] == value.shape[0]
    )


def attend_without_gradient(
    mask: Mask | None, layout: ShortLayout, spans: Tensor | None, query: Tensor, key: Tensor, value: Tensor
) -> Tensor | None:
    """The output by native code; None where it is not finite, though what is masked may be all that is not."""
    output, finite, _ = attend_laid_out(layout, spans, query, key, value)
    return output if finite or (mask is None and value.shape[2]) else None


def attend_with_gradient(problem: Problem, layout: ShortLayout, spans: Tensor | None) -> Tensor:
    """The output of a problem that `has_short_tensors`, differentiable by query, key and value."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return _apply_short((problem, layout, spans), unwrap_if_dead(query), unwrap_if_dead(key), unwrap_if_dead(value))


class _AttendShort(torch.autograd.Function):
    """The output of a problem with query, key and value as its tensors with gradients.

    What is not finite, or has large scores, or is differentiated twice, is computed as for all kernels by `custom_op`.
    """

    @staticmethod
    def forward(
        ctx: Any, call: tuple[Problem, ShortLayout, Tensor | None], query: Tensor, key: Tensor, value: Tensor
    ) -> Tensor:
        problem, layout, spans = ctx.call = call
        ctx.state = None if problem.mask is None else remembered_state(problem.mask)
        output, finite, precise = attend_laid_out(layout, spans, query, key, value)
        ctx.save_for_backward(query, key, value)
        return output if finite and precise else compute_forward(problem, ShortKernel.name)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value = ctx.saved_tensors
        problem, layout, spans = ctx.call
        if not torch.is_grad_enabled() and not mapped_by_autograd(grad_output):
            gradients = differentiate_laid_out(layout, spans, query, key, value, grad_output)
            if gradients is not None:  # of the spans of the forward pass, whatever the mask is now
                return None, *gradients
        if ctx.state is not None and not ctx.state.is_current():
            raise modified(problem.mask)
        output, lse = compute_forward(problem, ShortKernel.name)
        tensors = [query, key, value, *tree_tensors(problem)[3:]]
        needed = (*ctx.needs_input_grad[1:], *(False,) * (len(tensors) - 3))
        upstream = grad_output, torch.zeros_like(lse)
        return None, *differentiate(problem, ShortKernel.name, needed, upstream, (output, lse), tensors)[:3]


_apply_short = super(torch.autograd.Function, _AttendShort).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_AttendShort.apply` in fewer steps: callers have excluded transforms of torch.func, for which it would look."""


def _mean_columns(problem: Problem) -> float:
    """The keys that a row computes on average, in whole vectors and together with the rows beside it."""
    spans, width = key_spans(problem), lanes()
    if spans is None or not spans.numel():
        return -(-problem.keys // width) * width
    first, last = spans.unbind(-1)
    empty, missing = first >= last, (0, -problem.queries % ROWS_AT_ONCE)
    first = pad(first.masked_fill(empty, problem.keys), missing, value=problem.keys)
    last = pad(last.masked_fill(empty, 0), missing)
    first, last = (limit.unflatten(-1, (-1, ROWS_AT_ONCE)) for limit in (first, last))
    first, last = first.amin(-1), last.amax(-1)
    vectors = (last + width - 1) // width - first // width
    return width * float((vectors * (first < last)).float().mean())
