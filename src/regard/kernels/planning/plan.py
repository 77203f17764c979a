"""The plan of `explain`: the kernel chosen, its predicted cost, and why each other was not."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ...backends.registry import BACKENDS
from ...core.problem import Problem
from ...core.torch_modes import under_forward_mode
from ...utils.units import format_bytes, format_seconds
from ..base import Cost, Kernel, OwnGradient, Result
from ..custom_op import MAX_SECOND_DERIVATIVE_PAIRS
from .choice import _DeferredChoice, _lowest_time, _reasons_against, _seconds, kernels_of, uncompared_kernel


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The kernel chosen for a problem; `print(plan)` also prints why each other kernel was not chosen.

    asked: whether the kernel was chosen by its name. forward_mode: whether forward-mode differentiation was active.
    """

    problem: Problem
    kernel: Kernel
    asked: bool = False
    forward_mode: bool = field(default_factory=under_forward_mode)

    def run(self) -> Result:
        """Compute the problem by the chosen kernel."""
        return self.kernel.run(self.problem)

    def __str__(self) -> str:
        problem = self.problem
        kind = "" if problem.normalizer is None else f"{problem.normalizer_name} "
        lines = [
            f"{kind}attention of {problem.queries:,} queries over {problem.keys:,} keys, weights "
            f"{tuple(problem.weights_shape)}, {_word(problem.value.dtype)} on {problem.value.device}",
            f"  score: {type(problem.pairs).__name__}   mask: {problem.mask!r}   bias: {problem.bias!r}",
        ]
        makers = (backend for backend in BACKENDS if backend.runs(problem.value))
        lines += [f"  {told}" for backend in makers if (told := backend.arithmetic(problem.value.dtype))]
        lines += [self._line(kernel) for kernel in kernels_of(problem)]
        if isinstance(self.kernel, _DeferredChoice):
            lines.append("-> the choice is made when the compiled or mapped function runs, where the mask has values")
        tensors = problem.pairs.query, problem.pairs.key, problem.value
        if any(tensor.requires_grad for tensor in tensors):
            lines.append(f"  second derivatives: {self._second_derivatives()}")
        return "\n".join(lines)

    def _second_derivatives(self) -> str:
        """Text on how second derivatives are computed."""
        pairs = self.problem.weights_shape.numel()
        if not isinstance(self.kernel, OwnGradient):
            return "its own, with all weights in memory"
        if pairs > MAX_SECOND_DERIVATIVE_PAIRS:
            return (
                f"refused, as {pairs:,} pairs are more than {MAX_SECOND_DERIVATIVE_PAIRS:,}; kernel='reference' has "
                "them, with all weights in memory"
            )
        return "the formula's, with all weights in memory"

    def _line(self, kernel: Kernel) -> str:
        """The line of `explain` on a kernel: why it cannot compute this, or its cost and why it was not chosen."""
        mark = "->" if kernel is self.kernel else "  "
        if reasons := _reasons_against(kernel, self.problem, forward_mode=self.forward_mode):
            return f"{mark} {kernel.name:<12} cannot: {'; '.join(reasons)}"
        cost = kernel.cost(self.problem)
        time = format_seconds(_seconds(kernel, self.problem))
        if self.problem.inputs_require_grad():
            time += " forward and backward"
        spent = f"about {time}, {format_bytes(cost.bytes)} beside inputs and output"
        if kernel is self.kernel:
            why = f"chosen: {self._why_chosen()}"
        else:
            why = f"not chosen: {self._why_not_chosen(kernel, cost)}" if not self.asked else "not asked for"
        parts = cost.parts if kernel is self.kernel else ()
        return "\n".join([f"{mark} {kernel.name:<12} {why} ({spent})", *(f"{'':<16}{part}" for part in parts)])

    def _why_chosen(self) -> str:
        if self.asked:
            return "asked for by name"
        if self.forward_mode:
            return "has forward-mode derivatives"
        if uncompared_kernel(self.problem) is not None:
            return "small, nothing is compared" if self.problem.value.is_cpu else "plain, nothing is compared"
        if _lowest_time(self.problem) is self.kernel:
            return "takes the least time"
        return "took the least time for lengths about these"

    def _why_not_chosen(self, kernel: Kernel, cost: Cost) -> str:
        if cost.note:
            return cost.note
        if isinstance(self.kernel, _DeferredChoice):
            return "may be, when the function runs"
        if _seconds(kernel, self.problem) >= _seconds(self.kernel, self.problem):
            return "takes longer"
        return "not compared" if uncompared_kernel(self.problem) is not None else "took longer for lengths about these"


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
