"""How far outputs and attention weights of an approximation are from the exact ones."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from ..kernels.lens_pass import run_reductions, start_lenses
from ..lenses import Lens
from ..lenses.base import WeightsLayout, WeightTile
from .methods import ApproximateWeights


def row_errors(exact: Tensor, approximate: Tensor) -> Tensor:
    """e_i = |ô_i - o_i| / √(mean_i |o_i|²) of each row, in float64: (..., M, Dv) to (..., M).

    The root mean square of a head's rows is its relative error |Ô - O| / |O|, in Frobenius norms. 0 where both are 0.

    >>> row_errors(torch.tensor([[3.0, 4.0], [0.0, 5.0]]), torch.tensor([[3.0, 4.0], [0.0, 4.0]]))
    tensor([0.0000, 0.2000], dtype=torch.float64)
    """
    exact, approximate = exact.double(), approximate.double()
    difference = (approximate - exact).norm(dim=-1)
    size = exact.square().sum(-1).mean(-1, keepdim=True).sqrt()
    return (difference / size).masked_fill(difference == 0, 0.0)


def head_errors(rows: Tensor) -> Tensor:
    """√(mean_i e_i²) of each head, from the errors of its rows: (..., M) to (...)."""
    return rows.square().mean(-1).sqrt()


@dataclass(frozen=True, eq=False)
class LensResults:
    """The results of a lens on the exact weights and on those of an approximation."""

    exact: Any
    approximate: Any

    @property
    def difference(self) -> float | None:
        """The mean absolute difference; None for results that are no tensors."""
        if not isinstance(self.exact, Tensor) or not self.exact.is_floating_point():
            return None
        return float((self.approximate.double() - self.exact.double()).abs().mean())


@dataclass(frozen=True, eq=False)
class WeightErrors:
    """Differences between the approximate and the exact attention weights.

    total_variation: ½ Σ_j |ŵ_ij - w_ij| of each row, (B, H, M), with all leading axes together as B: the share of the
    weight that is in the wrong place, 0 to 1 for weights that are positive and add up to 1. lenses: the results of
    each lens on both.
    """

    total_variation: Tensor
    lenses: Mapping[Lens, LensResults]


def compare_weights(
    problem: Problem, lse: Tensor, weights: ApproximateWeights, exact: Mapping[Lens, Any]
) -> WeightErrors:
    """The differences of weights, in one pass over tiles of the exact ones, so in memory linear in the lengths.

    Args:
        problem: the exact one, without NaN.
        lse: its log-sum-exp.
        weights: those of the approximation.
        exact: the results of lenses on the exact weights.
    """
    states = start_lenses(problem, exact)
    comparison = WeightComparison(WeightsLayout.from_problem(problem), weights, list(states.values()))
    run_reductions(problem, lse, [comparison])
    results = {lens: LensResults(exact[lens], state.finish(problem, lse)) for lens, state in states.items()}
    return WeightErrors(comparison.distances.to(comparison.layout.dtype), results)


class WeightComparison:
    """A reduction of the exact weights that computes the approximate ones of the same tiles.

    Σ_j |ŵ_ij - w_ij| / 2 is accumulated in `distances` (B, H, M), and the approximate weights go to the reductions of
    lenses in place of the exact ones.
    """

    def __init__(self, layout: WeightsLayout, weights: ApproximateWeights, states: Sequence[Any]) -> None:
        self.layout, self.weights = layout, weights
        self.distances = layout.zeros(layout.queries)
        self.reductions = [reduction for state in states for reduction in state.reductions]

    @property
    def needs_entropy_terms(self) -> bool:
        return False

    def add(self, tile: WeightTile) -> None:
        approximate = self.weights.tile(tile.batch, tile.rows, tile.columns)
        distances = (approximate - tile.weights).abs_().sum(-1)
        self.distances[tile.batch, :, tile.rows].add_(distances, alpha=0.5)
        terms = None
        if any(reduction.needs_entropy_terms for reduction in self.reductions):
            terms = torch.special.xlogy(approximate, approximate).div_(math.log(2))  # NaN for negative weights
        replaced = WeightTile(approximate, terms, tile.batch, tile.rows, tile.columns)
        for reduction in self.reductions:
            reduction.add(replaced)


def check_lenses(problem: Problem, lenses: Sequence[Lens]) -> None:
    """Check that every lens reads weights tile by tile.

    Raises:
        ConfigurationError: no lens, or one that computes its result from the problem itself.
    """
    for lens, state in start_lenses(problem, lenses).items():
        if not list(state.reductions):
            raise ConfigurationError(
                f"{lens!r} computes the exact weights from queries and keys, so it cannot show those of an "
                "approximation: use a lens that sums over the weights, such as Entropy(), Pooled(32) or TopK(8)"
            )
