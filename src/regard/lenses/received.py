"""The weight that each key receives: the column sums."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.problem import Problem
from .base import WeightsLayout
from .weight_sums import ColumnSums


@dataclass(frozen=True)
class Received:
    """Σ_i w_ij for each key j, the column sums of the weights: (..., heads, N).

    All of a head sum to the number of rows that attend to something, less the weight of sinks; with M queries and N
    keys M / N is an equal share. heads are query heads, also where several share a key head. One row that attends to
    NaN makes all columns of its head NaN. Dropout is not applied. No autograd.

    Source: the "heavy hitters" of Zhang et al. 2023 (arXiv 2306.14048, section 3), here of all queries at once.

    >>> import torch, regard
    >>> received = regard.lenses.Received()
    >>> q = torch.zeros(3, 4)
    >>> regard.observe(q, q, q, received, mask=regard.masks.causal())[received]
    tensor([1.8333, 0.8333, 0.3333])
    """

    def start(self, problem: Problem) -> _ReceivedState:
        """The state of one run."""
        return _ReceivedState(WeightsLayout.from_problem(problem))


class _ReceivedState:
    """Σ w of each column."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout, self.columns = layout, ColumnSums(layout)
        self.reductions = (self.columns,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.layout.nan_rows(lse).any(-1, keepdim=True)  # [B, H, 1]
        return self.layout.to_result(self.columns.sums.masked_fill(broken, math.nan))
