"""Structured attention: keys are selected together with their neighbours, by a linear-chain random field."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer
from ..core.problem import Problem
from ..errors import ShapeError
from .parameters import check_tensor, check_tensors, with_shapes


@dataclass(frozen=True, eq=False, repr=False)
class LinearChain(Normalizer):
    """w_ij = p(z_j = 1), the probability that key j is selected where the choices z of neighbouring keys are a chain.

    p(z) ∝ exp(Σ_j s_ij z_j + Σ_j b[z_j, z_j+1]) over all z in {0, 1}^n of the keys that query i attends to, in their
    order; masked keys are no part of the chain. With b[1, 1] above 0 segments are selected, with b = 0 each key on its
    own: w_ij = σ(s_ij). A row sums to the expected number of selected keys.

    The marginals are computed exactly, in log-odds from left to right and from right to left, key by key for some rows
    at a time: memory is linear in the lengths.

    Source: Kim et al. 2017 (arXiv 1702.00887), section 3.1, subsequence selection; in the published code the chain
    begins and ends with transitions too, of the means of their rows and columns of b.

    There is no log-sum-exp and no sink. `Observation.lse` has the logarithm of the sum of each row.

    Args:
        transitions: b, (2, 2), or (heads, 2, 2): that of [a, b] is added where key j has z = a and the next one b. It
            may be learned.

    Raises:
        ShapeError, DtypeError, DeviceError: of the call, for transitions that do not fit it.

    >>> import torch, regard
    >>> together = regard.normalizers.LinearChain(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    >>> together.normalize(torch.tensor([[[2.0, 0.0, -2.0]]]))[0]
    tensor([[[0.8418, 0.5000, 0.1582]]])
    """

    transitions: Tensor

    name = "linear-chain"
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "each key has a probability of its own, and nothing is divided"}

    def __post_init__(self) -> None:
        check_tensors(self)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The probabilities of selection, and the logarithm of the expected number of selected keys."""
        if not scores.numel():
            return scores, scores.sum(-1) - INFINITY
        chain = _Chain.of(scores, self.transitions)
        weights = chain.log_odds(scores, chain.messages()).sigmoid()
        return weights, weights.detach().sum(-1).log()

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Messages have slopes below 1 in those before them; their gradients go the other way along the chain."""
        if not scores.numel():
            return torch.zeros_like(scores), (torch.zeros_like(self.transitions),)
        chain = _Chain.of(scores, self.transitions)
        messages = chain.messages()
        direct = upstream * weights * torch.sigmoid(-chain.log_odds(scores, messages))
        return chain.gradients(messages, direct, self.transitions)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        check_tensor("transitions", self.transitions, problem)
        heads = problem.pairs.query.shape[-3] if problem.heads else 1
        if tuple(self.transitions.shape) not in ((2, 2), (heads, 2, 2)):
            raise ShapeError(
                f"transitions is {tuple(self.transitions.shape)}; it needs (2, 2), a number for each two states of "
                f"neighbouring keys, or ({heads}, 2, 2) for each head"
            )
        return Normalizer.for_problem(self, problem)

    def of_head(self, head: int) -> LinearChain:
        """The chain of one head."""
        return LinearChain(self.transitions[head]) if self.transitions.ndim == 3 else self

    def __repr__(self) -> str:
        return with_shapes(self)


class _Chain(NamedTuple):
    """The keys of some rows from left to right, and beside them from right to left.

    A message is the log-odds of a key's z that the keys before it give, the first one's 0: with λ = s + m of a key, the
    next has log (e^b01 + e^(λ + b11)) - log (e^b00 + e^(λ + b10)).

    lifted: s + b11 - b10, (n, 2, ..., heads, M), of keys that exist. lift: b11 - b10; on: b01 - b11; off: b00 - b10,
    for both directions (2, 1, ..., heads or 1, 1), of which the second has b transposed.
    """

    lifted: Tensor
    exists: Tensor
    lift: Tensor
    on: Tensor
    off: Tensor

    @classmethod
    def of(cls, scores: Tensor, transitions: Tensor) -> _Chain:
        columns = scores.movedim(-1, 0)
        both = torch.stack([columns, columns.flip(0)], 1)
        b = torch.stack([transitions, transitions.mT]).to(scores.dtype)
        b = b.view(2, *[1] * (scores.ndim - 3), -1, 1, 2, 2)
        lift, exists = b[..., 1, 1] - b[..., 1, 0], both > -INFINITY
        lifted = both.masked_fill(~exists, 0.0) + lift  # second derivatives at -infinity would be NaN
        return cls(lifted, exists, lift, b[..., 0, 1] - b[..., 1, 1], b[..., 0, 0] - b[..., 1, 0])

    def messages(self) -> Tensor:
        """The messages of all keys but for `lift`, (n, 2, ..., heads, M)."""
        message = torch.zeros_like(self.lifted[0]) - self.lift
        messages = []
        for lifted, exists in zip(self.lifted, self.exists, strict=True):
            messages.append(message)
            odds = lifted + message
            passed = torch.logaddexp(odds, self.on) - torch.logaddexp(odds, self.off)
            message = torch.where(exists, passed, message)
        return torch.stack(messages)

    def log_odds(self, scores: Tensor, messages: Tensor) -> Tensor:
        """Log p(z = 1) / p(z = 0) of each key, from its score and the messages of both directions: as the scores."""
        before, after = (messages + self.lift).unbind(1)
        return scores + (before + after.flip(0)).movedim(0, -1)

    def gradients(self, messages: Tensor, direct: Tensor, transitions: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Those of the scores and of the transitions, from the gradient in the log-odds of each key."""
        odds = self.lifted + messages
        on, off = torch.sigmoid(odds - self.on), torch.sigmoid(odds - self.off)
        slopes = torch.where(self.exists, on - off, 1.0)
        columns = direct.movedim(-1, 0)
        of_messages = torch.stack([columns, columns.flip(0)], 1)
        after, passed = torch.zeros_like(slopes[0]), []  # the gradient in the message that a key passes on
        for own, slope in zip(reversed(of_messages.unbind()), reversed(slopes.unbind()), strict=True):
            passed.append(after)
            after = torch.addcmul(own, slope, after)
        above = torch.stack(passed[::-1]).masked_fill_(~self.exists, 0.0)
        before, behind = (above * slopes).unbind(1)
        of_scores = direct + (before + behind.flip(0)).movedim(0, -1)
        return of_scores, (self._of_transitions(above, on, off, transitions),)

    def _of_transitions(self, above: Tensor, on: Tensor, off: Tensor, transitions: Tensor) -> Tensor:
        """Σ above · the derivatives of a message: σ of `on` in b11, the rest in b01, and so, negative, b10 and b00."""
        entries = torch.stack([above * (off - 1), above * (1 - on), above * -off, above * on])  # 00, 01, 10, 11
        if transitions.ndim == 2:
            left, right = entries.flatten(3).sum((1, 3)).view(2, 2, 2).unbind(-1)
        else:
            whole = entries.movedim(-2, 1).movedim(3, 1)  # [4, 2, heads, n, ..., M]
            left, right = whole.flatten(3).sum(-1).permute(1, 2, 0).unflatten(-1, (2, 2)).unbind(0)
        return left + right.mT
