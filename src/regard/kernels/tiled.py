"""The tiled kernel: the online softmax in plain torch, for any problem, in memory linear in the lengths."""

from __future__ import annotations

from torch import Tensor

from ..backends.torch.tile_loop import TiledAttention
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..tiles.tile_size import SCORES_PER_TILE
from .base import EVERY_GRADIENT, Cost, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import add_feature_cost, tilewise_cost
from .planning.unit_prices import price

TORCH_FEATURE = price("tiled.torch_feature")


class TiledKernel:
    """The online softmax in torch, for any mask, bias, softcap, sinks, dropout, dims and pair form, with gradients."""

    def __init__(self, tile: int = SCORES_PER_TILE) -> None:
        self.name = "tiled" if tile == SCORES_PER_TILE else f"tiled({tile})"
        self._tiled = TiledAttention(tile)
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons: it computes every problem."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        return add_feature_cost(tilewise_cost(problem, self._tiled.tile), problem, TORCH_FEATURE)

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return self._tiled.forward(batched)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return self._tiled.backward(batched, saved)
