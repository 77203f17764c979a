"""Which kernel computes a problem, and why each other does not."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import KernelError, nearest
from ..problem import Problem
from .base import Kernel, Result
from .fused import Fused
from .reference import Reference

KERNELS: tuple[Kernel, ...] = (Fused(), Reference())
"""In the order of preference: the first that can is chosen."""


@dataclass(frozen=True, eq=False, slots=True)
class Plan:
    """The kernel chosen for a problem. `print(plan)` says why each other was not; a plan computes nothing itself."""

    problem: Problem
    kernel: Kernel
    asked: bool = False

    def run(self) -> Result:
        """Compute the problem by the chosen kernel."""
        return self.kernel.run(self.problem)

    def __str__(self) -> str:
        problem = self.problem
        lines = [
            f"attention of {problem.queries} queries over {problem.keys} keys, weights {tuple(problem.weights_shape)}, "
            f"{str(problem.value.dtype).removeprefix('torch.')} on {problem.value.device}",
            f"  score: {type(problem.pairs).__name__}   mask: {problem.mask!r}   bias: {problem.bias!r}",
        ]
        return "\n".join(lines + [self._line(kernel) for kernel in KERNELS])

    def _line(self, kernel: Kernel) -> str:
        cost = kernel.cost(self.problem)
        spent = f"{cost.flops:.3g} FLOPs, {cost.bytes / 2**20:.3g} MiB beside inputs and output"
        reasons = kernel.why_not(self.problem)
        if kernel is self.kernel:
            why = "chosen: asked for by name" if self.asked else "chosen: the first in order that can"
        elif reasons:
            why = f"cannot: {'; '.join(reasons)}"
        else:
            why = f"not chosen: {self.kernel.name} {'was asked for' if self.asked else 'comes before it'}"
        mark = "->" if kernel is self.kernel else "  "
        return f"{mark} {kernel.name:<10} {why} ({spent})"


def choose(problem: Problem, name: str | None = None) -> Plan:
    """The plan for a problem; a kernel asked for by name never falls back.

    Raises:
        KernelError: no kernel has that name, or it cannot compute the problem.
    """
    if name is None:
        return Plan(problem, next(kernel for kernel in KERNELS if not kernel.why_not(problem)))
    kernel = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if kernel is None:
        raise KernelError(f"there is no kernel {name!r}; {nearest(name, [kernel.name for kernel in KERNELS])}")
    if reasons := kernel.why_not(problem):
        raise KernelError(
            f"kernel {name!r} cannot compute this: {'; '.join(reasons)}. Leave kernel out to let one be chosen; "
            "regard.explain(...) says which"
        )
    return Plan(problem, kernel, asked=True)
