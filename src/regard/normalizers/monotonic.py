"""Monotonic attention: a query looks for its key from where the query before it has stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.normalizer import INFINITY, Normalizer
from ..core.problem import Problem
from ..errors import ConfigurationError
from .parameters import check_parameter, over_heads


@dataclass(frozen=True, eq=False)
class Monotonic(Normalizer):
    """w_ij, the probability that query i stops at key j: it looks at keys from that of query i - 1 on, to the right.

    It stops at key j with the probability p_ij = σ(s_ij + b), else it goes on:
    w_ij = p_ij q_ij, where q_ij = (1 - p_i,j-1) q_i,j-1 + w_i-1,j; the first query begins at the first key. These are
    the expected weights, for training; a row sums to less than 1 where it may stop at no key.

    Rows depend on one another: a call has all queries, in their order, and all weights are in memory. The recurrence is
    computed as it stands: the closed form with a quotient of products is off by half in float32.

    Source: Raffel et al. 2017 (arXiv 1704.00784), Eq. 9 to 14.

    There is no log-sum-exp, no sink and no dropout. `Observation.lse` has the logarithm of the sum of each row.

    Args:
        bias: b, a number, or a tensor () or (heads,), which may be learned.

    >>> import torch, regard
    >>> scores = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]])
    >>> regard.normalizers.Monotonic().normalize(scores)[0]
    tensor([[[0.5000, 0.2500, 0.1250],
             [0.2500, 0.2500, 0.1875]]])
    """

    bias: Tensor | float = 0.0

    name = "monotonic"
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {
        "sinks": "a query that stops nowhere has no weight already",
        "dropout_p": "the next row goes on from the weights of the one before",
    }

    @property
    def rows_before(self) -> None:
        """All rows: each follows from the one before."""
        return

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of all rows, and the logarithm of their sums."""
        alignments = self.alignments(scores)
        return alignments, alignments.detach().sum(-1).log()

    def alignments(self, scores: Tensor) -> Tensor:
        """The probabilities of stopping."""
        keys = scores.shape[-1]
        if not scores.numel():
            return scores
        stop = torch.sigmoid(scores + over_heads(self.bias, scores))
        going_on = pad(1.0 - stop, (1, 0))[..., :-1]  # 0 before the first key
        rows, before = [], pad(torch.ones_like(scores[..., 0, :1]), (0, keys - 1))
        for row in range(scores.shape[-2]):
            reached = _running_sum(before, going_on[..., row, :])
            before = stop[..., row, :] * reached
            rows.append(before)
        return torch.stack(rows, -2)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        check_parameter("bias", self.bias, problem)
        return Normalizer.for_problem(self, problem)


@dataclass(frozen=True, eq=False)
class MoChA(Monotonic):
    """Monotonic attention whose query, where it stops, attends softly to the last `width` keys up to there.

    w_ij = Σ_k α_ik softmax(s_i,k-width+1 … s_ik)_j over the chunks with key j, α the weights of `Monotonic`. One score
    serves both here; the paper has one for stopping and one within the chunk.

    Source: Chiu and Raffel 2018 (arXiv 1712.05382), monotonic chunkwise attention.

    Args:
        bias: b of the probability of stopping, a number, or a tensor () or (heads,), which may be learned.
        width: keys in a chunk.

    Raises:
        ConfigurationError: a width that is no whole number of at least 1.

    >>> import torch, regard
    >>> scores = torch.tensor([[[0.0, 0.0, 0.0]]])
    >>> regard.normalizers.MoChA(width=2).normalize(scores)[0]
    tensor([[[0.6250, 0.1875, 0.0625]]])
    """

    width: int = 2

    name = "mocha"

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise ConfigurationError(
                f"MoChA needs width as a whole number of at least 1, such as 4; it is {self.width!r}"
            )

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights of all rows, and the logarithm of their sums."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        alignments, keys = self.alignments(scores), scores.shape[-1]
        chunks = pad(scores, (self.width - 1, 0), value=-INFINITY).unfold(-1, self.width, 1)  # [..., M, N, width]
        # By chunk: shifted by the maximum of the row, a chunk far below it would be 0 / 0.
        exists = (chunks > -INFINITY).any(-1, keepdim=True)
        within = torch.where(exists, chunks, 0.0).softmax(-1) * alignments.unsqueeze(-1)
        weights = torch.zeros_like(scores)
        for place in range(self.width):  # of the key at `width - 1 - place` positions before the end of its chunk
            ahead = min(self.width - 1 - place, keys)
            weights = weights + pad(within[..., ahead:, place], (0, ahead))
        return weights, weights.detach().sum(-1).log()


def _running_sum(added: Tensor, kept: Tensor) -> Tensor:
    """x_j = kept_j x_j-1 + added_j along the last axis, by doubling: sums and products of numbers from 0 to 1 alone."""
    step = 1
    while step < added.shape[-1]:
        added = added + kept * pad(added, (step, 0))[..., :-step]
        kept = kept * pad(kept, (step, 0))[..., :-step]
        step *= 2
    return added
