"""The kernel of talking heads: scores and weights mixed over the heads, tile by tile."""

from __future__ import annotations

from torch import Tensor

from ..backends.base import MixedHeadTiles
from ..backends.registry import BACKENDS, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from .base import EVERY_GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import OPERATOR, RESULT, bytes_read


class MixedHeadsKernel:
    """Talking heads over tiles: all heads of a tile are mixed while it is in a core's cache.

    Two passes over the tiles, and two more backward: `normalizers.TalkingHeads` says why. No weights are in memory.
    """

    name = "mixed_heads"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores that are no dot products, and what no backend mixes over tiles."""
        if not isinstance(problem.pairs, DotPairs):
            return ["its code computes dot products; this score is additive"]
        reasons = reasons_against([each for each in BACKENDS if each.mixed_heads is not None], problem.value)
        return reasons or _maker(problem.value)[1].why_not(problem)

    def cost(self, problem: Problem) -> Cost:
        """Scores twice and outputs once for each pair over the tiles with unmasked pairs, and three mixtures."""
        backend, tiles = _maker(problem.value)
        heads = problem.pairs.query.shape[-3] if problem.heads else 1
        pairs, value_dim = tiles.visited_pairs(problem), problem.value.shape[-1]
        width = 2 * problem.pairs.query.shape[-1] + value_dim + 3 * heads
        numbers = problem.weights_shape[:-1].numel() * value_dim
        return Cost(
            flops=0.0,
            flash={backend: FlashWork(2.0 * pairs * width, 2.0 * pairs)},
            bytes=0.0,
            passes=RESULT * numbers,
            moved=bytes_read(problem),
            calls=4.0 * OPERATOR,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp of the softmax."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return _maker(batched.value)[1].forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return _maker(batched.value)[1].backward(batched, saved)


def _maker(value: Tensor) -> tuple[str, MixedHeadTiles]:
    """Who mixes heads of tensors of this device and dtype: the backend's name and its methods."""
    return next((each.name, each.mixed_heads) for each in BACKENDS if each.mixed_heads is not None and each.runs(value))
