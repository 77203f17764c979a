"""How much weight each key receives."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.problem import Problem
from .base import Frame
from .weight_sums import ColumnSums


@dataclass(frozen=True)
class Received:
    """Σ_i w_ij for each key j, the column sums of the weights: (..., heads, N).

    All of them sum to the number of rows that attend to something, less what a sink takes; with M queries of N keys
    M / N is an equal share. They have query heads also where several share their keys. One row that attends to NaN
    makes all columns of its head NaN. With dropout: of the weights before it. Computed without autograd.

    Source: the "heavy hitters" of Zhang et al. 2023 (arXiv 2306.14048, section 3), here of all queries at once.

    >>> import torch, regard
    >>> received = regard.lenses.Received()
    >>> q = torch.zeros(3, 4)
    >>> regard.observe(q, q, q, received, mask=regard.masks.causal())[received]
    tensor([1.8333, 0.8333, 0.3333])
    """

    def start(self, problem: Problem) -> _Shares:
        """Begin to look."""
        return _Shares(Frame.of(problem))


class _Shares:
    """Σ w of each column."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.columns = frame, ColumnSums(frame)
        self.reductions = (self.columns,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.frame.broken(lse).any(-1, keepdim=True)  # [B, H, 1]
        return self.frame.shown(self.columns.sums.masked_fill(broken, math.nan))
