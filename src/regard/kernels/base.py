"""The interface of a kernel: reasons why it cannot compute a problem, predicted cost, and result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from ..core.problem import Problem

if TYPE_CHECKING:
    from .batched_problem import BatchedProblem, ProblemGradients, Saved


@dataclass(eq=False, slots=True)  # not frozen: that would take as long as all else around a small call
class Result:
    """output (..., heads, M, Dv), and the log-sum-exp (..., heads, M) of each row of scores if it was requested."""

    output: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a kernel's forward pass on a problem; `cost_model` predicts the time from it.

    flops: of torch's matrix products. native: flops of native code, in any dtype. bytes: memory beside inputs and
    outputs. passes: element-wise reads and writes beside the products (exponentials, masking, sums). moved: bytes read
    from main memory, where that is the bottleneck. calls: of torch's operators. note: an explanation of an unusually
    high cost, shown by `explain`. parts: the parts that the work consists of, shown by `explain` if it is chosen.
    """

    flops: float
    bytes: float
    passes: float = 0.0
    moved: float = 0.0
    calls: float = 1.0
    native: float = 0.0
    note: str = ""
    parts: tuple[str, ...] = ()


class Kernel(Protocol):
    """An implementation of attention."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """Reasons why this kernel cannot compute the problem; empty if it can."""
        ...

    def cost(self, problem: Problem) -> Cost:
        """The work that the problem would take."""
        ...

    def run(self, problem: Problem) -> Result:
        """Compute the problem; called only if `why_not` is empty."""
        ...


@runtime_checkable
class OwnGradient(Protocol):
    """A kernel with a backward of its own, which `custom_op.apply_kernel` makes differentiable and compilable.

    Both are called without autograd, for a problem whose numbers are finite or are all attended to. Sinks and rows that
    attend to nothing are the operator's: `forward` leaves sinks out, and gives such rows the log-sum-exp -inf.
    """

    name: str

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M), in float32 at least for the latter."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of the batched problem's tensors."""
        ...


@runtime_checkable
class InPlaceKernel(OwnGradient, Protocol):
    """A kernel that also writes and adds to tensors of any strides, so that parts of a problem need no copies."""

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> None:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis.
        """
        ...

    def add_gradients(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients) -> None:
        """Add the gradients of a batched problem to float32 ones, of any strides but in the last axis."""
        ...
