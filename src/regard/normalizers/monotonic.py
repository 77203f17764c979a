"""Monotonic attention: a query looks for its key from where the query before it has stopped."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.normalizer import INFINITY, Normalizer, OrderedNormalizer
from ..core.problem import Problem
from ..core.stored_normalizer import PairMask, Stored, StoredNormalizer
from ..errors import ConfigurationError
from .parameters import check_parameter, over_heads, sum_over_heads

MOST_APART = 60.0
"""Scores that are no farther apart have exponentials in one unit, of which none comes near to float32's smallest."""


@dataclass(frozen=True, eq=False)
class Monotonic(OrderedNormalizer, StoredNormalizer):
    """w_ij, the probability that query i stops at key j: it looks at keys from that of query i - 1 on, to the right.

    It stops at key j with the probability p_ij = σ(s_ij + b), else it goes on:
    w_ij = p_ij q_ij, where q_ij = (1 - p_i,j-1) q_i,j-1 + w_i-1,j; the first query begins at the first key. These are
    the expected weights, for training; a row sums to less than 1 where it may stop at no key.

    Rows follow from one another: a call has all queries, in their order. Some rows at a time are in memory, forward and
    backward. The recurrence is computed as it stands: the closed form with a quotient of products is off by half in
    float32.

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

    def normalize_after(self, scores: Tensor, before: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """The weights of some rows, the logarithm of their sums, and the probabilities of stopping in the last."""
        alignments = self.alignments(scores, before)[0]
        weights = self.from_alignments(alignments, scores)
        return weights, weights.detach().sum(-1).log(), alignments[..., -1, :]

    def from_alignments(self, alignments: Tensor, scores: Tensor) -> Tensor:
        """The weights, from the probabilities of stopping: these."""
        return alignments

    def alignments(self, scores: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """The probabilities of stopping at a key, w, of getting to it, q, and of stopping where one is, p."""
        stop = torch.sigmoid(scores + over_heads(self.bias, scores))
        start = pad(torch.ones_like(scores[..., 0, :1]), (0, scores.shape[-1] - 1)) if before is None else before
        if (code := _code_for(stop, start)) is not None:
            return *code.forward(stop, start), stop
        going_on = pad(1.0 - stop, (1, 0))[..., :-1]  # 0 before the first key
        rows, reached = [], []
        for row in range(scores.shape[-2]):
            reached.append(_running_sum(start, going_on[..., row, :]))
            start = stop[..., row, :] * reached[-1]
            rows.append(start)
        return torch.stack(rows, -2), torch.stack(reached, -2), stop

    def backward_after(
        self, scores: Tensor, before: Tensor | None, upstream: Tensor, upstream_after: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """From the last row to the first, with w̄ the gradient in w, and q̄ in q, which is that in the row before's w.

        q̄_j = p_j w̄_j + (1 - p_j) q̄_j+1 and p̄_j = q_j (w̄_j - q̄_j+1).
        """
        alignments, reached, stop = self.alignments(scores, before)
        of_alignments, of_scores = self._of_weights(alignments, scores, upstream)
        later = torch.zeros_like(stop[..., 0, :]) if upstream_after is None else upstream_after.to(stop.dtype)
        of_stop, later = _row_gradients(stop, reached, of_alignments, later)
        by_scores, parameters = self._of_stopping(scores, stop, of_stop)
        return by_scores if of_scores is None else by_scores + of_scores, later, parameters

    def _of_weights(self, alignments: Tensor, scores: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        """The gradients of `from_alignments` in its arguments."""
        return upstream, None

    def weigh(self, scores: Tensor, mask: PairMask | None) -> tuple[Tensor, Stored]:
        """The probabilities of stopping at a key; stored are the scores, and what `alignments` returns besides."""
        scores = scores if mask is None else scores + mask.added
        alignments, reached, stop = self.alignments(scores)
        return alignments, (scores, reached, stop)

    def differentiate(
        self, stored: Stored, upstream: Tensor, mask: PairMask | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """As `backward_after`, of all rows."""
        scores, reached, stop = stored
        of_stop, _ = _row_gradients(stop, reached, upstream, torch.zeros_like(stop[..., 0, :]))
        return self._of_stopping(scores, stop, of_stop)

    def _of_stopping(self, scores: Tensor, stop: Tensor, of_stop: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients in scores and bias, from that in the probabilities p."""
        slopes = stop * torch.sigmoid(-(scores + over_heads(self.bias, scores)))  # never p (1 - p), 0 where p is near 1
        by_scores = of_stop * slopes
        return by_scores, (sum_over_heads(self.bias, by_scores),) if isinstance(self.bias, Tensor) else ()

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

    def from_alignments(self, alignments: Tensor, scores: Tensor) -> Tensor:
        """The probabilities of stopping, each divided among the keys of its chunk."""
        keys, padded = scores.shape[-1], pad(scores, (self.width - 1, 0), value=-INFINITY)
        chunks = [padded[..., place : place + keys] for place in range(self.width)]  # by the last key of each chunk
        # By chunk: shifted by the maximum of the row, a chunk far below it would be 0 / 0.
        peak = reduce(torch.maximum, chunks).detach()
        peak = peak.masked_fill(peak == -INFINITY, 0.0)
        exponentials = [(chunk - peak).exp() for chunk in chunks]
        total = sum(exponentials[1:], exponentials[0])
        share = alignments / total.masked_fill(total == 0, 1.0)
        weights = exponentials[-1] * share
        for place, own in enumerate(exponentials[:-1]):  # of the key at `width - 1 - place` positions before the end
            ahead = min(self.width - 1 - place, keys)
            weights = weights + pad((own * share)[..., ahead:], (0, ahead))
        return weights

    def weigh(self, scores: Tensor, mask: PairMask | None) -> tuple[Tensor, Stored]:
        """The weights; stored is what `Monotonic` stores, the alignments, e^s in one unit, and the share of a chunk."""
        lowest, highest = torch.aminmax(scores)
        alignments, stored = super().weigh(scores, mask)
        scores = stored[0]
        if not float(highest - lowest) <= MOST_APART:
            return self.from_alignments(alignments, scores), (*stored, alignments)
        exponentials = (scores - highest).exp_()
        total = _sums_back(exponentials, self.width)
        share = alignments / (total if mask is None else total.masked_fill_(total == 0, 1.0))
        return exponentials * _sums_ahead(share, self.width), (*stored, alignments, exponentials, total, share)

    def differentiate(
        self, stored: Stored, upstream: Tensor, mask: PairMask | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Of a chunk k with m_k = Σ_j u_j e_j / total_k: m_k in its alignment, and e_j share_k (u_j - m_k) in s_j."""
        scores, _, _, alignments, *in_one_unit = stored
        if not in_one_unit:
            of_alignments, of_scores = self._of_weights(alignments, scores, upstream)
        else:
            exponentials, total, share = in_one_unit
            of_alignments = _sums_back(exponentials * upstream, self.width).div_(total)
            expected = _sums_ahead(share * of_alignments, self.width)
            of_scores = (upstream * _sums_ahead(share, self.width)).sub_(expected).mul_(exponentials)
        by_stopping, parameters = super().differentiate(stored[:3], of_alignments, mask)
        return by_stopping if of_scores is None else by_stopping.add_(of_scores), parameters

    def _of_weights(self, alignments: Tensor, scores: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor | None]:
        leaves = [tensor.detach().requires_grad_() for tensor in (alignments, scores)]
        with torch.enable_grad():
            weights = self.from_alignments(leaves[0], leaves[1])
        of_alignments, of_scores = torch.autograd.grad(weights, leaves, upstream)
        return of_alignments, of_scores.masked_fill_(scores == -INFINITY, 0.0)


def _sums_back(rows: Tensor, width: int) -> Tensor:
    """For each key the sum over the last `width` up to it."""
    total, keys = rows.clone(), rows.shape[-1]
    for place in range(1, min(width, keys)):
        total[..., place:] += rows[..., : keys - place]
    return total


def _sums_ahead(rows: Tensor, width: int) -> Tensor:
    """For each key the sum over the next `width` from it on."""
    total, keys = rows.clone(), rows.shape[-1]
    for place in range(1, min(width, keys)):
        total[..., : keys - place] += rows[..., place:]
    return total


class MonotonicRows(Protocol):
    """A backend's code for rows of which each follows from the one before, (..., M, N), from `before` (..., N)."""

    def takes(self, *rows: Tensor) -> bool:
        """Whether it computes rows of this dtype and device."""
        ...

    def forward(self, stop: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """The w and q of `Monotonic.alignments`."""
        ...

    def backward(self, stop: Tensor, reached: Tensor, of_alignments: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
        """The p̄ of `Monotonic.backward_after`, and q̄ of the first row."""
        ...


_codes: list[MonotonicRows] = []


def register_rows(code: MonotonicRows) -> None:
    """Have a backend compute the rows that it takes."""
    _codes.append(code)


def _code_for(*rows: Tensor) -> MonotonicRows | None:
    return next((code for code in _codes if code.takes(*rows)), None)


def _row_gradients(stop: Tensor, reached: Tensor, of_alignments: Tensor, later: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients in p, and in the w of the row before the first."""
    if (code := _code_for(stop, reached, of_alignments, later)) is not None:
        return code.backward(stop, reached, of_alignments, later)
    of_stop = torch.empty_like(stop)
    for row in range(stop.shape[-2] - 1, -1, -1):
        own, above = stop[..., row, :], of_alignments[..., row, :] + later
        later = _running_sum((own * above).flip(-1), (1.0 - own).flip(-1)).flip(-1)
        of_stop[..., row, :] = reached[..., row, :] * (above - pad(later, (0, 1))[..., 1:])
    return of_stop, later


def _running_sum(added: Tensor, kept: Tensor) -> Tensor:
    """x_j = kept_j x_j-1 + added_j along the last axis, by doubling: sums and products of numbers from 0 to 1 alone."""
    step = 1
    while step < added.shape[-1]:
        added = added + kept * pad(added, (step, 0))[..., :-step]
        kept = kept * pad(kept, (step, 0))[..., :-step]
        step *= 2
    return added
