"""The threshold kernel: sparse weights by one pass over the keys, and then the keys with weight alone."""

from __future__ import annotations

from torch import Tensor

from ..backends.base import ThresholdTiles
from ..backends.registry import BACKENDS, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from .base import EVERY_GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import OPERATOR, RESULT, bytes_read


class ThresholdKernel:
    """Sparsemax and entmax-1.5 over tiles: a threshold of some of the keys is at most that of all of them.

    So keys below it are left out at once; output and gradients are sums over the few keys above. Backward these are
    found again, and nothing is stored but the thresholds. Where nearly all keys have weight, it takes up to twice the
    time of softmax.
    """

    name = "threshold"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores that are no dot products, and what no backend computes with thresholds."""
        if not isinstance(problem.pairs, DotPairs):
            return ["its code computes dot products; this score is additive"]
        reasons = reasons_against([each for each in BACKENDS if each.thresholds is not None], problem.value)
        return reasons or _maker(problem.value)[1].why_not(problem)

    def cost(self, problem: Problem) -> Cost:
        """One product of each pair over the tiles with unmasked pairs; the rest is less."""
        backend, tiles = _maker(problem.value)
        pairs, width = tiles.visited_pairs(problem), problem.pairs.query.shape[-1]
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        return Cost(
            flops=0.0,
            flash={backend: FlashWork(2.0 * pairs * width, pairs)},
            bytes=0.0,
            passes=RESULT * numbers,
            moved=bytes_read(problem),
            calls=OPERATOR,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def run(self, problem: Problem) -> Result:
        """Output and thresholds."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and thresholds of a batched problem."""
        return _maker(batched.value)[1].forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return _maker(batched.value)[1].backward(batched, saved)


def _maker(value: Tensor) -> tuple[str, ThresholdTiles]:
    """Who computes thresholds of tensors of this device and dtype: the backend's name and its methods."""
    return next((each.name, each.thresholds) for each in BACKENDS if each.thresholds is not None and each.runs(value))
