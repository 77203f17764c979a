"""The distance between queries and the keys that they attend to: means and histograms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Reduction, RowShard, WeightsLayout, WeightTile, select_batches
from .forms import DistanceSums, within_max_distance


class DistanceResult(NamedTuple):
    """mean (..., heads, M), histogram (..., heads, bins), and edges (bins - 1,): the lower edges of bins 1, 2, ..."""

    mean: Tensor
    histogram: Tensor
    edges: Tensor


@dataclass(frozen=True)
class Distance:
    """The distance d_ij = |query position - key position|, weighted: `DistanceResult(mean, histogram, edges)`.

    mean: Σ_j w_ij · d_ij / Σ_j w_ij for each row i; 0 for a row that attends to nothing. histogram: Σ w_ij over all
    pairs of a head whose distance is in a bin: it sums to the number of rows that attend to something, less the
    weight of sinks. Bins are closed intervals: 0 to e₁ - 1, e₁ to e₂ - 1, ..., and all from the last edge on.

    Args:
        edges: e₁ < e₂ < ..., whole numbers of at least 1. Without them powers of two as far as the positions reach:
            bins 0, 1, 2 to 3, 4 to 7, 8 to 15 and so on.

    Positions are those of the call, with its `query_positions` and `key_positions`. A row that attends to NaN has the
    mean NaN, and the histogram of its head is NaN. Dropout is not applied. No autograd. Without edges, positions that
    are a tensor on another device than the CPU are waited for: they decide how many bins there are.

    Raises:
        ConfigurationError: edges that do not grow, or are not whole numbers of at least 1.

    Source: the mean attention distance of Dosovitskiy et al. 2021 (arXiv 2010.11929, section 4.5), in tokens.

    >>> import torch, regard
    >>> distance = regard.lenses.Distance()
    >>> q = torch.zeros(4, 8)
    >>> result = regard.observe(q, q, q, distance, mask=regard.masks.causal())[distance]
    >>> result.mean
    tensor([0.0000, 0.5000, 1.0000, 1.5000])
    >>> result.histogram, result.edges
    (tensor([2.0833, 1.0833, 0.8333]), tensor([1, 2]))
    """

    edges: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.edges is None:
            return
        edges = tuple(self.edges)
        whole = all(isinstance(edge, int) and not isinstance(edge, bool) and edge >= 1 for edge in edges)
        if not edges or not whole or any(later <= edge for edge, later in pairwise(edges)):
            raise ConfigurationError(
                "Distance needs edges as whole numbers of at least 1, each larger than the one before, such as "
                f"(1, 2, 4, 8); they are {self.edges!r}"
            )
        object.__setattr__(self, "edges", edges)

    def start(self, problem: Problem) -> _DistanceState:
        """The state of one run."""
        return self._start(problem, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _DistanceState:
        """The state of one run over the rows of one process."""
        return self._start(problem, WeightsLayout.from_problem(problem, shard))

    def _start(self, problem: Problem, layout: WeightsLayout) -> _DistanceState:
        edges, shard, known = self.edges, layout.shard, layout.positions_on_host(problem)
        if edges is None:
            queries, keys = layout.positions(problem) if known is None else known
            if shard is not None:
                queries = torch.tensor([shard.positions[0], shard.positions[-1]], device="cpu")
            edges = _powers(queries.cpu(), keys.cpu())
        return _DistanceState(layout, layout.positions(problem), known, edges)


def _distances(queries: Tensor, keys: Tensor, tile: WeightTile) -> Tensor:
    """The distance of each pair of a tile: (b or 1, 1, m, n)."""
    queries = select_batches(queries, tile.batch)[:, tile.rows]
    keys = select_batches(keys, tile.batch)[:, tile.columns]
    return (queries.unsqueeze(-1) - keys.unsqueeze(-2)).abs_().unsqueeze(1)


def _powers(queries: Tensor, keys: Tensor) -> tuple[int, ...]:
    """Powers of two up to the largest distance between positions."""
    if not queries.numel() or not keys.numel():
        return ()
    farthest = max(int(queries.max() - keys.min()), int(keys.max() - queries.min()))
    return tuple(2**power for power in range(farthest.bit_length()))


class _DistanceState:
    """Σ w and Σ w · d of each row, and Σ w of each bin.

    positions: of queries and keys, (B or 1, M) and (B or 1, N). known: the same on the CPU, if they are known there.
    """

    needs_entropy_terms = False

    def __init__(
        self,
        layout: WeightsLayout,
        positions: tuple[Tensor, Tensor],
        known: tuple[Tensor, Tensor] | None,
        edges: tuple[int, ...],
    ) -> None:
        self.layout, (self.queries, self.keys), self.known = layout, positions, known
        self.bounds = torch.tensor(edges, dtype=torch.long, device="cpu")
        self.edges = self.bounds.to(layout.device, non_blocking=True)
        self.mass, self.moment = layout.zeros(layout.queries), layout.zeros(layout.queries)
        self.histogram = layout.zeros(len(edges) + 1)

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        distances = _distances(self.queries, self.keys, tile)
        mass = tile.weights.sum(-1)
        self.mass[tile.batch, :, tile.rows].add_(mass)
        self.moment[tile.batch, :, tile.rows].add_((tile.weights * distances).sum(-1))
        histogram = self.histogram[tile.batch]
        nearest, farthest = self._bins(tile)
        if nearest == farthest:
            histogram[..., nearest] += mass.sum(-1)
            return
        bins = torch.bucketize(distances, self.edges, right=True)
        for number in range(nearest, farthest + 1):
            histogram[..., number] += (tile.weights * (bins == number)).sum((-2, -1))

    def _bins(self, tile: WeightTile) -> tuple[int, int]:
        """The first and the last bin that a tile may have weights in; of all bins, where positions are not known."""
        if self.known is None:
            return 0, len(self.bounds)
        extremes = torch.stack(_distances(*self.known, tile).aminmax())
        nearest, farthest = torch.bucketize(extremes, self.bounds, right=True).tolist()
        return nearest, farthest

    def native(self) -> DistanceSums | None:
        """Supported where all batches have the same positions, as far as is known within the range of the code."""
        if len(self.queries) != 1 or len(self.keys) != 1:
            return None
        if self.known is not None and not within_max_distance(*(positions[0] for positions in self.known)):
            return None
        return DistanceSums(self.queries[0], self.keys[0], self.edges, self.mass, self.moment, self.histogram)

    def finish(self, problem: Problem, lse: Tensor) -> DistanceResult:
        broken = self.layout.nan_rows(lse)
        mean = self.moment / self.mass.masked_fill(self.mass == 0, 1.0)
        histogram = self.histogram.masked_fill(broken.any(-1, keepdim=True), math.nan)
        return DistanceResult(
            self.layout.to_result(mean.masked_fill(broken, math.nan)),
            self.layout.to_result(self.layout.total(histogram)),
            self.edges,
        )
