"""The additive kernel: attention with scores weight · tanh(q + k), in memory linear in the lengths."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..backends.base import AdditiveTiles
from ..backends.registry import BACKENDS, is_nan_safe, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs
from ..tiles.tile_size import SCORES_PER_TILE
from .base import EVERY_GRADIENT, Cost, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import WIDEN, add_feature_cost, tilewise_cost, widened_bytes, widened_numbers
from .planning.unit_prices import price

NATIVE_FEATURE = price("additive.native_feature")


class AdditiveKernel:
    """Online softmax over the scores weight · tanh(q + k), without storing them.

    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y): the exponentials are taken once for each token, not for each pair. Scores,
    softmax and the sum of values take one pass, and so do the gradients; tile by tile where mask, bias or dropout have
    a number for each pair.
    """

    def __init__(self, tile: int = SCORES_PER_TILE) -> None:
        self.name = "additive" if tile == SCORES_PER_TILE else f"additive({tile})"
        self.tile = tile
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Dot products, and tensors of which no backend computes additive tiles."""
        reasons = []
        if not isinstance(problem.pairs, AdditivePairs):
            reasons.append("its code computes additive scores; this score is a dot product")
        return reasons + reasons_against([each for each in BACKENDS if each.additive is not None], problem.value)

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs, plus a share of a pass for each feature."""
        cost = add_feature_cost(tilewise_cost(problem, self.tile), problem, NATIVE_FEATURE)
        passes = cost.passes - WIDEN * widened_numbers(problem)  # it widens in registers
        return replace(cost, passes=passes, bytes=cost.bytes - widened_bytes(problem))

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(_maker(problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return _maker(batched.value)[1].forward(batched, self.tile)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return _maker(batched.value)[1].backward(batched, saved, self.tile)


def _maker(value: Tensor) -> tuple[str, AdditiveTiles]:
    """Who computes additive scores of this device and dtype over tiles: the backend's name and its methods."""
    return next((each.name, each.additive) for each in BACKENDS if each.additive is not None and each.runs(value))
