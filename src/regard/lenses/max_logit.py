"""The largest score of each head or row."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Reduction, RowShard, WeightsLayout, WeightTile
from .forms import LargestWeights

Per = Literal["head", "row"]


@dataclass(frozen=True)
class MaxLogit:
    """max s_ij over the pairs of each head, the largest argument of an exponential of its softmax: (..., heads).

    s_ij is the whole score, softcap and bias included, of the pairs that the mask leaves: what QK-clip compares with
    its threshold. per="row": max_j s_ij for each row i, (..., heads, M). -∞ where there is no pair, NaN where a row
    attends to NaN. Over a batch it is `.amax(0)` of the result.

    Computed as lse_i + ln max_j w_ij. A row whose largest weight underflows to 0, as beside a sink 88 larger, counts as
    one without pairs. No autograd.

    Raises:
        ConfigurationError: another `per`; when it starts, weights that are no softmax of scores, as those of linear
            attention.

    Source: Kimi Team 2025 (arXiv 2507.20534, section 2.1), where S_max of each head decides how its projections shrink.

    >>> import torch, regard
    >>> largest, each = regard.lenses.MaxLogit(), regard.lenses.MaxLogit(per="row")
    >>> q, k = torch.ones(3, 1), torch.tensor([[2.0], [3.0], [1.0]])
    >>> seen = regard.observe(q, k, k, largest, each, mask=regard.masks.causal())
    >>> seen[largest].round(decimals=4), seen[each].round(decimals=4)
    (tensor(3.), tensor([2., 3., 3.]))
    """

    per: Per = "head"

    def __post_init__(self) -> None:
        if self.per not in get_args(Per):
            raise ConfigurationError(f"MaxLogit needs per as 'head' or 'row'; it is {self.per!r}")

    def start(self, problem: Problem) -> _MaxLogitState:
        """The state of one run."""
        return self._start(problem, WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _MaxLogitState:
        """The state of one run over the rows of one process."""
        return self._start(problem, WeightsLayout.from_problem(problem, shard))

    def _start(self, problem: Problem, layout: WeightsLayout) -> _MaxLogitState:
        if problem.normalizer is not None:
            raise ConfigurationError(
                f"MaxLogit shows the largest score under a softmax, and these are weights of {problem.normalizer_name} "
                "attention, which has none: look at Pooled(1, 'max'), the largest weight"
            )
        return _MaxLogitState(layout, by_row=self.per == "row")


class _MaxLogitState:
    """The largest weight of each row."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout, *, by_row: bool) -> None:
        self.layout, self.by_row = layout, by_row
        sizes = layout.batch, layout.heads, layout.queries, 1
        self.weights = torch.zeros(sizes, dtype=layout.dtype, device=layout.device)
        self.columns = torch.zeros(sizes, dtype=torch.int64, device=layout.device)

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        largest = self.weights[tile.batch, :, tile.rows, 0]
        torch.maximum(largest, tile.weights.amax(-1).to(largest.dtype), out=largest)

    def native(self) -> LargestWeights:
        return LargestWeights(self.weights, self.columns)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        layout = self.layout
        weights = self.weights.squeeze(-1)
        scores = weights.log() + lse.reshape(weights.shape)
        # Below the smallest normal number a weight has few digits, or is 0.
        scores = scores.masked_fill_(weights < torch.finfo(weights.dtype).tiny, -math.inf)
        broken = layout.nan_rows(lse)
        if self.by_row:
            return layout.to_result(scores.masked_fill_(broken, math.nan))
        # No score is infinite, and unlike NaN infinity is the maximum of any other number and itself.
        largest = scores.new_full((*scores.shape[:2], 1), -math.inf)
        largest = layout.maximum(torch.cat([largest, scores.masked_fill_(broken, math.inf)], -1).amax(-1))
        return layout.to_result(largest.masked_fill_(largest == math.inf, math.nan))
