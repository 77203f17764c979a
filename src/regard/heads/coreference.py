"""How often heads attend to an antecedent of a mention, against the nearest mention before it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import ShapeError
from .dense_weights import checked_weights
from .role_evidence import checked_same_heads

Span = tuple[int, int]
"""The first and the last word of a mention, from 0: a closed interval."""


@dataclass(frozen=True, eq=False)
class CoreferenceEvidence:
    """How many of n mentions each head resolves, how many the nearest mention before it resolves, and chance.

    `CoreferenceEvidence.total(parts)` sums the evidence of several texts.
    """

    right: Tensor
    n: int
    nearest: int
    chance: float

    @classmethod
    def from_weights(cls, between: Tensor, clusters: Sequence[Sequence[Span]]) -> CoreferenceEvidence:
        """Counts for one text, from the weights between its words, (..., W, W), as `word_weights` returns them.

        A mention's candidates are all mentions that end before it begins; the prediction is the candidate with
        the largest weight, summed over the candidate's words and averaged over the mention's own, the first of equals.
        It is right if it is of the same cluster. Only mentions with a choice count: an antecedent and another mention
        among the candidates. The baseline predicts the candidate that ends last; chance is a uniform choice.

        Args:
            between: weights between words.
            clusters: mentions that refer to the same entity; an entity with one mention is a cluster of one.

        Raises:
            ShapeError: weights that are not square, or mentions that are not among the words.

        Source: Clark et al. 2019 (arXiv 1906.04341), section 4.3, who use the weight between head words.

        >>> import torch
        >>> between = torch.tensor([[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.7, 0.2, 0.1]]])
        >>> found = CoreferenceEvidence.from_weights(between, [[(0, 0), (2, 2)], [(1, 1)]])
        >>> found.n, found.accuracies, found.nearest
        (1, tensor([1.]), 0)
        """
        between = checked_weights(between)
        words = between.shape[-1]
        spans = [(span, number) for number, cluster in enumerate(clusters) for span in cluster]
        if between.shape[-2] != words or any(not 0 <= first <= last < words for (first, last), _ in spans):
            raise ShapeError(
                f"the weights between words have the shape {tuple(between.shape)}, and the mentions are "
                f"{[span for span, _ in spans]}: they need a square of words, and each mention its first and last word "
                f"in 0 to {words - 1}"
            )
        right = torch.zeros(between.shape[:-2], dtype=torch.int64)
        n, nearest, chance = 0, 0, 0.0
        for (first, last), cluster in spans:
            before = [(span, number) for span, number in spans if span[1] < first]
            matches = [number == cluster for _, number in before]
            if not any(matches) or all(matches):
                continue
            row = between[..., first : last + 1, :].mean(-2)
            weights = torch.stack([row[..., start : end + 1].sum(-1) for (start, end), _ in before], -1)
            best = weights.max(-1)
            right += torch.tensor(matches)[best.indices] & (best.values > 0)
            closest = max(range(len(before)), key=lambda number: before[number][0][::-1])
            n, nearest, chance = n + 1, nearest + matches[closest], chance + sum(matches) / len(matches)
        return cls(right, n, nearest, chance)

    @staticmethod
    def total(parts: Iterable[CoreferenceEvidence]) -> CoreferenceEvidence:
        """The sum of several parts.

        Raises:
            ConfigurationError: no parts.
            ShapeError: the parts are not of the same heads.
        """
        parts = checked_same_heads(parts, lambda part: tuple(part.right.shape))
        return CoreferenceEvidence(
            torch.stack([part.right for part in parts]).sum(0),
            sum(part.n for part in parts),
            sum(part.nearest for part in parts),
            sum(part.chance for part in parts),
        )

    @property
    def accuracies(self) -> Tensor:
        """The share of mentions that each head resolves; NaN where none counts."""
        return self.right / self.n if self.n else torch.full(self.right.shape, float("nan"))

    def __str__(self) -> str:
        if not self.n or not self.right.numel():
            return "no mention with a choice was counted"
        best = int(self.right.argmax())
        index = torch.unravel_index(torch.tensor(best), self.right.shape)
        return (
            f"head {'-'.join(str(int(number)) for number in index)}: {int(self.right.flatten()[best]) / self.n:.1%} of "
            f"{self.n:,} mentions, nearest mention {self.nearest / self.n:.1%}, by chance {self.chance / self.n:.1%}"
        )
