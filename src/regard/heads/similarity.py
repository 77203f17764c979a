"""The similarity of heads: Jensen-Shannon divergence, and an order that puts similar heads next to each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ShapeError
from ..lenses import Reduction, RowShard, WeightTile
from ..lenses.base import WeightsLayout
from ..masks import Mask
from .dense_weights import observe_weights

ROUNDING = 1e-4
"""Row sums within this of 1 count as 1; a larger remainder is the weight of a sink, or an empty row."""


@dataclass(frozen=True)
class JensenShannon:
    """The mean over rows of H((P + Q) / 2) - (H(P) + H(Q)) / 2, P and Q the rows of two heads: (..., heads, heads).

    In nats: 0 where two heads have equal weights, ln 2 where they never attend to the same key. The difference of a row
    sum to 1, from a sink or an empty row, counts as one more key. Symmetric; a head with a row that attends to NaN has
    NaN. No autograd. Memory is linear in the lengths and quadratic in the heads.

    Source: Lin 1991, Divergence Measures Based on the Shannon Entropy; of heads Clark et al. 2019 (arXiv 1906.04341,
    section 6), who sum over the rows instead.

    >>> import torch, regard
    >>> divergence = regard.heads.JensenShannon()
    >>> k = torch.tensor([[0.0, 0.0, 0.0], [-99.0, -99.0, 0.0]])[..., None]
    >>> q = torch.ones(1, 2, 3, 1)
    >>> regard.observe(q, k[None], k[None], divergence)[divergence]
    tensor([[[0.0000, 0.3183],
             [0.3183, 0.0000]]])
    """

    def start(self, problem: Problem) -> _JensenShannonState:
        """The state of one run."""
        return _JensenShannonState(WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _JensenShannonState:
        """The state of one run over the rows of one process."""
        return _JensenShannonState(WeightsLayout.from_problem(problem, shard))


class _JensenShannonState:
    """Σ -m · ln m of the mean m of each pair of heads, and the sum of each row."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout = layout
        self.entropies = layout.zeros(layout.heads)
        self.mass = layout.zeros(layout.queries)

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        self.mass[tile.batch, :, tile.rows].add_(tile.weights.sum(-1))
        _add_entropies(self.entropies[tile.batch], tile.weights)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        remainder = 1.0 - self.mass
        _add_entropies(self.entropies, remainder.where(remainder > ROUNDING, 0.0).unsqueeze(-1))
        broken = self.layout.nan_rows(lse).any(-1)
        entropies = self.entropies.masked_fill(broken.unsqueeze(-1) | broken.unsqueeze(-2), math.nan)
        entropies = self.layout.total(entropies)
        own = entropies.diagonal(dim1=-2, dim2=-1)
        divergence = entropies - (own.unsqueeze(-1) + own.unsqueeze(-2)) / 2
        return self.layout.to_result((divergence / max(self.layout.all_queries, 1)).clamp_(0.0, math.log(2)))


def _add_entropies(sums: Tensor, weights: Tensor) -> None:
    """Add Σ -m · ln m, m the mean of the weights (b, H, m, n) of two heads, to sums (b, H, H)."""
    for head in range(weights.shape[1]):
        means = (weights[:, head : head + 1] + weights[:, head:]) / 2
        entropies = torch.special.entr(means).sum((-1, -2), dtype=sums.dtype)  # [b, H - head]
        sums[:, head, head:] += entropies
        sums[:, head + 1 :, head] += entropies[:, 1:]


def head_divergence(weights: Tensor, *, mask: Mask | Tensor | None = None) -> Tensor:
    """The Jensen-Shannon divergence, in nats, of each two heads of weights (..., heads, M, N): (..., heads, heads).

    To compare the heads of several layers, concatenate them along the head axis. See `JensenShannon`; arguments
    and errors are those of `observe_weights`.

    >>> import torch
    >>> head_divergence(torch.stack([torch.eye(4), torch.eye(4), torch.eye(4).flip(0)]))
    tensor([[0.0000, 0.0000, 0.6931],
            [0.0000, 0.0000, 0.6931],
            [0.6931, 0.6931, 0.0000]])
    """
    lens = JensenShannon()
    return observe_weights(weights, lens, mask=mask)[lens]


def similarity_order(divergence: Tensor) -> list[int]:
    """An order in which similar heads are adjacent: the leaves of average-linkage clustering.

    Two clusters are as far apart as their members are on average (UPGMA); the nearest two are joined first, turned so
    that the ends that meet are the nearest. Of equal distances the first. Takes O(H³).

    Raises:
        ShapeError: the divergences are no square matrix, or have a NaN.

    Source: Sokal and Michener 1958, A Statistical Method for Evaluating Systematic Relationships.

    >>> import torch
    >>> similarity_order(torch.tensor([[0.0, 0.6, 0.1], [0.6, 0.0, 0.5], [0.1, 0.5, 0.0]]))
    [0, 2, 1]
    """
    if divergence.ndim != 2 or divergence.shape[0] != divergence.shape[1] or bool(divergence.isnan().any()):
        raise ShapeError(
            f"divergence has the shape {tuple(divergence.shape)}{', with NaN' * bool(divergence.isnan().any())}; an "
            "order needs a square matrix of numbers, such as head_divergence gives for one sequence"
        )
    between, own = divergence.double(), divergence.tolist()
    clusters = [[head] for head in range(len(own))]
    while len(clusters) > 1:
        apart = between.clone().fill_diagonal_(math.inf)
        first, second = sorted(divmod(int(apart.argmin()), len(clusters)))
        sizes = len(clusters[first]), len(clusters[second])
        joined = (sizes[0] * between[first] + sizes[1] * between[second]) / sum(sizes)
        between[first], between[:, first] = joined, joined
        left = [number for number in range(len(clusters)) if number != second]
        clusters[first] = _nearest_ends(clusters[first], clusters[second], own)
        between, clusters = between[left][:, left], [clusters[number] for number in left]
    return clusters[0] if clusters else []


def _nearest_ends(left: list[int], right: list[int], apart: list[list[float]]) -> list[int]:
    """Two chains joined where their ends are nearest, the first as it is if that is as good."""
    ways = [(one, other) for one in (left, left[::-1]) for other in (right, right[::-1])]
    one, other = min(ways, key=lambda way: apart[way[0][-1]][way[1][0]])
    return one + other
