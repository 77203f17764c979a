"""The interface of a kernel: reasons why it cannot compute a problem, predicted cost, and result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from ..core.problem import Problem
from .planning.unit_prices import price

if TYPE_CHECKING:
    from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved


@dataclass(eq=False, slots=True)  # not frozen: that would take as long as all else around a small call
class Result:
    """output (..., heads, M, Dv), and the log-sum-exp (..., heads, M) of each row of scores if it was requested.

    checked: whether the output needs no check for NaN, as `core.finite.CheckedRows`.
    """

    output: Tensor
    lse: Tensor | None = None
    checked: bool = False


BACKWARD = price("base.backward")
EVERY_GRADIENT = frozenset({"query", "key", "value", "weight", "bias", "sinks"})
"""What a kernel's `gradients` names: query, key and value, the weight of an additive score, the parameters of a bias.
Sinks are the operator's."""
INPUT_GRADIENTS = EVERY_GRADIENT - {"bias"}
"""Those of a kernel that gives no gradient to a bias."""
GRADIENT = price("base.gradient")


@dataclass(frozen=True, slots=True)
class FlashWork:
    """The forward work of a flash kernel, torch's or the native one, which computes blocks of rows over the keys.

    flops: of its products. pairs: of which it takes the exponential, with what else is done for a pair. packed: numbers
    of keys and values that are brought into the order of the products, once for each block of rows. streamed: numbers
    of keys and values that are read once for a few rows, which are not worth packing. tiles: of torch's kernel, blocks
    of rows times blocks of keys.
    """

    flops: float = 0.0
    pairs: float = 0.0
    packed: float = 0.0
    streamed: float = 0.0
    tiles: float = 0.0

    def __add__(self, other: FlashWork) -> FlashWork:
        return FlashWork(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Cost:
    """The work of a kernel's forward pass on a problem; `planning.rates` predicts times from it.

    flops: of torch's matrix products, in float32 at least. bytes: memory beside inputs and outputs. passes:
    element-wise reads and writes beside the products (exponentials, masking, sums). moved: bytes of keys and values
    that are read once, and come from main memory if they are too many for the cache. calls: of torch's operators.
    gradient: overhead of a gradient in addition, in calls. backward: backward over forward of flops and passes.
    streamed: numbers, in float32 at least, that torch's products read once for a few rows. flash: work of flash
    kernels, by the backend's name. note: an explanation of an unusually high cost, shown by `explain`. parts: the parts
    that the work consists of, shown by `explain` if it is chosen.
    """

    flops: float
    bytes: float
    passes: float = 0.0
    moved: float = 0.0
    calls: float = 1.0
    gradient: float = GRADIENT
    backward: float = BACKWARD
    streamed: float = 0.0
    flash: Mapping[str, FlashWork] = field(default_factory=dict)
    note: str = ""
    parts: tuple[str, ...] = ()


@runtime_checkable
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
    attend to nothing are the operator's: `forward` leaves sinks out, and gives such rows the log-sum-exp -inf; one that
    counts the sinks returns `SinkRows`. A forward pass whose output needs no check for NaN returns `CheckedRows`; that
    of others is read for it.
    """

    name: str

    def gradients(self, problem: Problem) -> frozenset[str]:
        """The tensors that `backward` differentiates: `EVERY_GRADIENT`, or fewer of these names.

        A choice that is put off until a compiled function runs takes no kernel without those of query, key and value.
        """
        ...

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M), in float32 at least for the latter."""
        ...

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of the batched problem's tensors."""
        ...


@runtime_checkable
class NanSafeKernel(OwnGradient, Protocol):
    """A kernel whose results nobody has to look at, which would wait for the device that computes them."""

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether that holds for `forward`, or `backward`, of a problem, as `Backend.nan_safe` describes it."""
        ...


def needs_no_look(kernel: object, problem: Problem, *, backward: bool) -> bool:
    """Whether a kernel is a `NanSafeKernel` for a problem, forward or backward."""
    return isinstance(kernel, NanSafeKernel) and kernel.is_nan_safe(problem, backward=backward)


@runtime_checkable
class CheckedKernel(Kernel, Protocol):
    """A kernel whose code may be wrong on one device alone: it is compared with the reference at its first use."""

    def agrees(self, problem: Problem) -> bool:
        """Whether it agreed with the reference for problems of these features; compares them if that is not known."""
        ...


@runtime_checkable
class InPlaceKernel(OwnGradient, Protocol):
    """A kernel that also writes and adds to tensors of any strides, so that parts of a problem need no copies."""

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis. Returns
        whether what was written needs no check for NaN.
        """
        ...

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients of a batched problem, or add them to those that stand there; of the bias, always add.

        Those of query, key and value are float32, of any strides but in the last axis. Returns whether what
        was written into these three needs no check for NaN.
        """
        ...
