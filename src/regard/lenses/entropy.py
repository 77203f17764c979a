"""The entropy of each row of weights."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.problem import Problem
from .base import WeightsLayout
from .weight_sums import RowEntropySums


@dataclass(frozen=True)
class Entropy:
    """-Σ_j w_ij · ln w_ij for each row i: (..., heads, M), in nats; 0 for a row that attends to nothing.

    Between 0, where one key has all the weight, and ln N, where all have as much; its exponential is how many keys a
    row attends to in effect. The weight of a sink is no term of the sum. Dropout is not applied. No autograd.

    Source: Shannon 1948, A Mathematical Theory of Communication, section 6; for attention Clark et al. 2019
    (arXiv 1906.04341, section 3.3), who average over the rows of a corpus.

    >>> import torch, regard
    >>> spread = regard.lenses.Entropy()
    >>> regard.observe(torch.zeros(2, 4), torch.zeros(3, 4), torch.ones(3, 1), spread)[spread].exp()
    tensor([3., 3.])
    """

    def start(self, problem: Problem) -> _EntropyState:
        """The state of one run."""
        return _EntropyState(WeightsLayout.from_problem(problem))


class _EntropyState:
    """-Σ w · log w of each row."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout, self.rows = layout, RowEntropySums(layout)
        self.reductions = (self.rows,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        # Rounding may make a weight larger than 1, and its term then negative. 0.0 - x: a sum of 0 gives 0, not -0.
        entropy = (0.0 - math.log(2) * self.rows.sums).clamp_(min=0.0)
        return self.layout.to_result(entropy.masked_fill_(self.layout.nan_rows(lse), math.nan))
