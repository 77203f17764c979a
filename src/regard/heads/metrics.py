"""Metrics of each head: entropy, distance, weight on the first key, largest weight, local weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.problem import Problem
from ..lenses import Distance, Entropy, LensState, Received, RowShard, ShardedLens, TopK
from ..lenses.base import WeightsLayout
from ..masks import Mask
from ..utils.numbers import whole_number
from .dense_weights import observe_weights


class HeadMetrics(NamedTuple):
    """One number for each head, (..., heads): means over the rows that attend to something; NaN where none does."""

    entropy: Tensor
    """-Σ_j w_ij · ln w_ij, in nats."""
    effective_keys: Tensor
    """exp(entropy) of each row: the number of keys that, with equal weights, have this entropy."""
    distance: Tensor
    """Σ_j w_ij · |query position - key position| / Σ_j w_ij, in tokens."""
    sink: Tensor
    """The weight of the first key."""
    top1: Tensor
    """The largest weight of a row."""
    local: Tensor
    """The weight of the keys at most `local` positions away."""


@dataclass(frozen=True)
class Metrics:
    """The lens for `HeadMetrics`: entropy, effective keys, distance, sink, top1 and local, means over rows.

    It combines `Entropy`, `Distance`, `Received` and `TopK(1)`, in memory linear in the lengths. Apply it to a whole
    model by `regard.huggingface.observing`, to a tensor of weights by `head_metrics`. A head with a row that attends to
    NaN has NaN.

    Args:
        local: keys at distances 0 to `local`, in positions, count as local.

    Raises:
        ConfigurationError: `local` is no whole number of at least 0.

    Source: the entropy and the weight on the first key as in Clark et al. 2019 (arXiv 1906.04341, sections 3.2 and
    3.3), the distance of Dosovitskiy et al. 2021 (arXiv 2010.11929, section 4.5).

    >>> import torch, regard
    >>> lens, q = regard.heads.Metrics(local=1), torch.zeros(1, 2, 4, 8)
    >>> metrics = regard.observe(q, q, q, lens, mask=regard.masks.causal())[lens]
    >>> metrics.effective_keys, metrics.distance, metrics.sink
    (tensor([[2.5000, 2.5000]]), tensor([[0.7500, 0.7500]]), tensor([[0.5208, 0.5208]]))
    """

    local: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "local", whole_number("local", self.local, least=0))

    def start(self, problem: Problem) -> _MetricsState:
        """The state of one run."""
        parts = {name: lens.start(problem) for name, lens in self._parts().items()}
        return _MetricsState(parts, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _MetricsState:
        """The state of one run over the rows of one process."""
        parts = {name: lens.start_shard(problem, shard) for name, lens in self._parts().items()}
        return _MetricsState(parts, WeightsLayout.from_problem(problem, shard))

    def _parts(self) -> dict[str, ShardedLens[Any]]:
        return {
            "entropy": Entropy(),
            "reach": Distance((self.local + 1,)),
            "received": Received(),
            "top": TopK(1),
        }


class _MetricsState:
    """The states of the lenses that the metrics combine."""

    def __init__(self, parts: dict[str, LensState[Any]], layout: WeightsLayout) -> None:
        self.parts, self.layout = parts, layout
        self.reductions = [reduction for part in parts.values() for reduction in part.reductions]

    def finish(self, problem: Problem, lse: Tensor) -> HeadMetrics:
        results = {name: part.finish(problem, lse) for name, part in self.parts.items()}
        attends = lse != float("-inf")
        rows = self.layout.total(attends.sum(-1))

        def mean(rows_values: Tensor) -> Tensor:
            return self.layout.total(rows_values.where(attends, 0.0).sum(-1)) / rows

        none = torch.zeros_like(rows, dtype=results["entropy"].dtype)
        return HeadMetrics(
            entropy=mean(results["entropy"]),
            effective_keys=mean(results["entropy"].exp()),
            distance=mean(results["reach"].mean),
            sink=(results["received"][..., 0] if self.layout.keys else none) / rows,
            top1=mean(results["top"].weights[..., 0]),
            local=results["reach"].histogram[..., 0] / rows,
        )


def head_metrics(
    weights: Tensor,
    *,
    local: int = 8,
    mask: Mask | Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> HeadMetrics:
    """The `HeadMetrics` of a tensor of weights (..., heads, M, N), as of the lens `Metrics`.

    Arguments and errors are those of `observe_weights`, and of `Metrics`.

    >>> import torch
    >>> head_metrics(torch.eye(5)[None, [0, 0, 1, 2, 3]]).distance  # each token attends to the one before it
    tensor([0.8000])
    """
    lens = Metrics(local)
    return observe_weights(weights, lens, mask=mask, query_positions=query_positions, key_positions=key_positions)[lens]
