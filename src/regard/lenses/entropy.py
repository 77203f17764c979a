"""How spread out the weights of each row are."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from ..core.problem import Problem
from .base import Frame
from .weight_sums import RowTerms


@dataclass(frozen=True)
class Entropy:
    """-Σ_j w_ij · ln w_ij for each row i: (..., heads, M), in nats; 0 for a row that attends to nothing.

    Between 0, where one key has all the weight, and ln N, where all have as much; its exponential is how many keys a
    row attends to in effect. What a sink takes is no term of the sum. With dropout: of the weights before it. Computed
    without autograd.

    Source: Shannon 1948, A Mathematical Theory of Communication, section 6; for attention Clark et al. 2019
    (arXiv 1906.04341, section 3.3), who average over the rows of a corpus.

    >>> import torch, regard
    >>> spread = regard.lenses.Entropy()
    >>> regard.observe(torch.zeros(2, 4), torch.zeros(3, 4), torch.ones(3, 1), spread)[spread].exp()
    tensor([3., 3.])
    """

    def start(self, problem: Problem) -> _Spread:
        """Begin to look."""
        return _Spread(Frame.of(problem))


class _Spread:
    """-Σ w · log w of each row."""

    def __init__(self, frame: Frame) -> None:
        self.frame, self.terms = frame, RowTerms(frame)
        self.reductions = (self.terms,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        # A weight of 1 may be 1 and a bit, and its term then below 0; taken from 0, no term gives no -0.
        entropy = (0.0 - math.log(2) * self.terms.sums).clamp_(min=0.0)
        return self.frame.shown(entropy.masked_fill_(self.frame.broken(lse), math.nan))
