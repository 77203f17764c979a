"""What a kernel is: one way to compute a Problem, which says what it cannot do before it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from torch import Tensor

from ..core.problem import Problem

if TYPE_CHECKING:
    from .batched_problem import BatchedProblem, ProblemGradients, Saved


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """output (..., heads, M, Dv), and the log-sum-exp (..., heads, M) of each row of scores where it was wanted."""

    output: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kernel will spend on a problem, forward.

    flops: of matrix products by torch. native: of those by native code, in float32. bytes: of memory above inputs and
    outputs. passes: numbers that are looked at one by one beside the products (scores that are exponentiated, masked,
    summed), each time. moved: bytes that come from main memory, where that is what takes the time. calls: of torch's
    operators. note: why it costs that much, where that is no matter of course.
    """

    flops: float
    bytes: float
    passes: float = 0.0
    moved: float = 0.0
    calls: float = 1.0
    native: float = 0.0
    note: str = ""


class Kernel(Protocol):
    """One way to compute a Problem."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """The reasons why this kernel cannot compute the problem; empty if it can."""
        ...

    def cost(self, problem: Problem) -> Cost:
        """What the problem would cost here."""
        ...

    def run(self, problem: Problem) -> Result:
        """The result; only asked for where `why_not` is empty."""
        ...


class OwnGradient(Protocol):
    """A computation that brings its own gradient: what `operator.attend` makes differentiable, and an operator.

    Both are asked without autograd, for a problem whose numbers are finite or are all attended to. Sinks and rows that
    attend to nothing are the operator's: `forward` leaves sinks out, and gives such rows the log-sum-exp -inf.
    """

    name: str

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M), in float32 at least for the latter."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of the batched problem's tensors."""
        ...
