"""The tiled kernel: the online softmax in plain torch, for any problem, in memory linear in the lengths."""

from __future__ import annotations

from torch import Tensor

from ..core.problem import Problem
from .base import Cost, Result
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .custom_op import apply_kernel, register
from .online_softmax import SCORES_PER_TILE, TiledAttention, add_feature_cost
from .tile_scores import make_tile_scores

TORCH_FEATURE = 6.0
"""The cost of one feature of an additive score for a pair in torch, in passes: a product, a reciprocal, sums."""


class TiledKernel:
    """The online softmax in torch, for any mask, bias, softcap, sinks, dropout, dims and pair form, with gradients."""

    def __init__(self, tile: int = SCORES_PER_TILE) -> None:
        self.name = "tiled" if tile == SCORES_PER_TILE else f"tiled({tile})"
        self._tiled = TiledAttention(make_tile_scores, tile)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons: it computes every problem."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        return add_feature_cost(self._tiled.cost(problem), problem, TORCH_FEATURE)

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return self._tiled.forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return self._tiled.backward(batched, saved)
