"""Any problem in memory linear in its lengths, in plain torch."""

from __future__ import annotations

from torch import Tensor

from ..core.problem import Problem
from .base import Cost, Result
from .batched_problem import Flat, Gradients, Saved
from .custom_op import attend, register
from .online_softmax import TILE, Tilewise, with_features
from .tile_scores import scoring

FEATURE = 6.0
"""What a feature of an additive score costs for each pair, in passes over a number: a product, a reciprocal, sums."""


class Tiled:
    """One tile of scores after another, with everything at once: any mask, bias with gradient, softcap, sinks, dropout,
    unequal dims, both pair forms.
    """

    def __init__(self, tile: int = TILE) -> None:
        self.name = "tiled" if tile == TILE else f"tiled({tile})"
        self._tilewise = Tilewise(scoring, tile)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Nothing: whatever is a problem, this computes."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """The tiles that the mask leaves."""
        return with_features(self._tilewise.cost(problem), problem, FEATURE)

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return attend(problem, self)

    def forward(self, flat: Flat) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a flat problem."""
        return self._tilewise.forward(flat)

    def backward(self, flat: Flat, saved: Saved) -> Gradients:
        """The gradients of a flat problem."""
        return self._tilewise.backward(flat, saved)
