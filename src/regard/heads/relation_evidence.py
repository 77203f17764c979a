"""Evidence for relations between words: which heads find them, against rules by position alone, with intervals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import ConfigurationError, ShapeError
from .dense_weights import checked_weights
from .relations import RelationCase
from .roles import checked_same_heads

SAMPLES, SEED = 1000, 12345
BY_CHANCE = "chance"

Numbers = NDArray[np.float64]
Interval = tuple[float, float]


@dataclass(frozen=True)
class RelationScore:
    """The accuracy of one head on the cases of a relation, that of a rule by position, and their difference.

    head: its index along the leading axes of the weights, such as (layer, head). rule: an offset such as "+1",
    "nearest", "farthest", or "chance", a uniform choice, where the relation has no rules. Intervals have 95 %, and are
    None for one text. elsewhere: the accuracy on the cases for which the rule is wrong, of which there are
    n_elsewhere; NaN without any.
    """

    head: tuple[int, ...]
    accuracy: float
    interval: Interval | None
    rule: str
    baseline: float
    gain_interval: Interval | None
    chance: float
    n: int
    texts: int
    elsewhere: float
    n_elsewhere: int

    @property
    def gain(self) -> float:
        """The accuracy of the head less that of the rule."""
        return self.accuracy - self.baseline

    @property
    def holds(self) -> bool:
        """Whether the interval of the gain is above 0."""
        return self.gain_interval is not None and self.gain_interval[0] > 0

    def __str__(self) -> str:
        def ends(interval: Interval | None) -> str:
            return "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"

        return (
            f"head {'-'.join(map(str, self.head))} {self.accuracy:.1%}{ends(self.interval)}, {self.rule} "
            f"{self.baseline:.1%}, gain {100 * self.gain:+.1f}{ends(self.gain_interval)}, n = {self.n:,}"
        )


@dataclass(frozen=True, eq=False)
class RelationEvidence:
    """Cases of one relation in several texts: which heads and which rules are right in each.

    shape: that of the heads. right: bool (cases, heads). texts: the number of each case's text, below n_texts. rules:
    those that are right in each case. chances: the share of right candidates.
    """

    shape: tuple[int, ...]
    right: Tensor
    texts: Tensor
    n_texts: int
    rules: tuple[frozenset[str], ...]
    chances: Tensor

    @classmethod
    def from_weights(cls, between: Tensor, cases: Sequence[RelationCase]) -> RelationEvidence:
        """The cases of one text, from the weights between its words, (..., W, W), as `word_weights` returns them.

        A head predicts the candidate with the largest weight, the first of equals, where the weight is summed over the
        candidate's words and averaged over the query's. Without candidates these are all words but the query. A head
        without weight on any candidate is wrong.

        Raises:
            ShapeError: weights that are not square, or a case with a word that is not among them.

        Source: Clark et al. 2019 (arXiv 1906.04341), sections 4.1 to 4.3.

        >>> back = torch.tensor([[[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.3, 0.7, 0.0]]])
        >>> cases = [RelationCase.of_word(1, [0]), RelationCase.of_word(2, [0])]
        >>> RelationEvidence.from_weights(back, cases).right.tolist()
        [[True], [False]]
        """
        between = checked_weights(between)
        words = between.shape[-1]
        for case in cases:
            spans = (case.query, *(case.candidates or [(answer, answer) for answer in case.answers]))
            if between.shape[-2] != words or any(not 0 <= first <= last < words for first, last in spans):
                raise ShapeError(
                    f"the weights between words have the shape {tuple(between.shape)}, and a case has the spans "
                    f"{spans}: they need a square of words, and each span its first and last word in 0 to {words - 1}"
                )
        flat = between.reshape(-1, *between.shape[-2:])
        right = [_right_heads(flat, case) for case in cases]
        sizes = [words - 1 if case.candidates is None else len(case.candidates) for case in cases]
        return cls(
            tuple(between.shape[:-2]),
            torch.stack(right) if right else torch.zeros(0, len(flat), dtype=torch.bool),
            torch.zeros(len(cases), dtype=torch.int64),
            1,
            tuple(case.rules for case in cases),
            torch.tensor([len(case.answers) / size for case, size in zip(cases, sizes, strict=True)]),
        )

    @staticmethod
    def total(parts: Iterable[RelationEvidence]) -> RelationEvidence:
        """The cases of several parts; their texts are numbered on.

        Raises:
            ConfigurationError: no parts.
            ShapeError: the parts are not of the same heads.
        """
        parts = checked_same_heads(parts, lambda part: part.shape)
        starts = np.cumsum([0, *(part.n_texts for part in parts)])
        return RelationEvidence(
            parts[0].shape,
            torch.cat([part.right for part in parts]),
            torch.cat([part.texts + int(start) for part, start in zip(parts, starts, strict=False)]),
            int(starts[-1]),
            tuple(rules for part in parts for rules in part.rules),
            torch.cat([part.chances for part in parts]),
        )

    def as_one_text(self) -> RelationEvidence:
        """The same cases as those of one text: chosen on and resampled together, as variants of a text should be."""
        return replace(self, texts=torch.zeros_like(self.texts), n_texts=1)

    def halves(self) -> tuple[RelationEvidence, RelationEvidence]:
        """The texts of even and of odd number: one half to choose a head on, the other to score it on.

        >>> part = RelationEvidence.from_weights(torch.ones(1, 2, 2), [RelationCase.of_word(0, [1])])
        >>> [half.n_texts for half in RelationEvidence.total([part, part, part]).halves()]
        [2, 1]
        """
        even, odd = (self._selected((self.texts % 2 == half).nonzero()[:, 0], half) for half in (0, 1))
        return even, odd

    def _selected(self, cases: Tensor, half: int) -> RelationEvidence:
        return RelationEvidence(
            self.shape,
            self.right[cases],
            self.texts[cases] // 2,
            (self.n_texts + 1 - half) // 2,
            tuple(self.rules[case] for case in cases.tolist()),
            self.chances[cases],
        )

    def score(self, *, chosen_on: RelationEvidence) -> RelationScore:
        """The score here of the head and of the rule that are best on other texts.

        The accuracy is Σ_t r_t / Σ_t n_t over texts t with n_t cases, r_t of them right. The intervals are the 2.5 and
        97.5 percentiles of 1,000 resamples of the texts, which the head and the rule share; they say nothing of other
        corpora or of another training of the model.

        Raises:
            ConfigurationError: no cases here or there.
            ShapeError: the other evidence is not of the same heads.

        Source: Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3 (percentile interval).
        """
        if self.shape != chosen_on.shape:
            raise ShapeError(
                f"heads of the shape {chosen_on.shape} are chosen for {self.shape}; both need the same heads"
            )
        if not len(self.rules) or not len(chosen_on.rules):
            raise ConfigurationError(
                f"there are {len(chosen_on.rules)} cases to choose a head on and {len(self.rules)} to score it on; "
                "both need one at least"
            )
        head = int(chosen_on.right.sum(0).argmax())
        counts = Counter(rule for rules in chosen_on.rules for rule in rules)
        rule = min(counts, key=lambda one: (-counts[one], one)) if counts else BY_CHANCE
        right = self.right[:, head].double().numpy()
        by_rule = self.chances.double().numpy() if rule == BY_CHANCE else np.array([rule in one for one in self.rules])
        wrong = by_rule == 0
        accuracy, gain = self._intervals(right, right - by_rule)
        index = torch.unravel_index(torch.tensor(head), self.shape)
        return RelationScore(
            head=tuple(map(int, index)),
            accuracy=float(right.mean()),
            interval=accuracy,
            rule=rule,
            baseline=float(by_rule.mean()),
            gain_interval=gain,
            chance=float(self.chances.mean()),
            n=len(right),
            texts=len(set(self.texts.tolist())),
            elsewhere=float(right[wrong].mean()) if wrong.any() else float("nan"),
            n_elsewhere=int(wrong.sum()),
        )

    def _intervals(self, *values: Numbers) -> list[Interval | None]:
        """The interval of the mean of each array of values, one value a case, over resamples of the texts."""
        _, texts = np.unique(self.texts.numpy(), return_inverse=True)
        count = int(texts.max()) + 1
        if count == 1:
            return [None] * len(values)
        sizes, *sums = (np.bincount(texts, weights, count) for weights in (None, *values))
        draws = np.random.default_rng(SEED).integers(count, size=(SAMPLES, count))
        totals = sizes[draws].sum(1)
        ends = (np.percentile(each[draws].sum(1) / totals, (2.5, 97.5)) for each in sums)
        return [(float(low), float(high)) for low, high in ends]


def _right_heads(between: Tensor, case: RelationCase) -> Tensor:
    """Whether each head of weights (heads, W, W) chooses a right candidate."""
    first, last = case.query
    row = between[:, first : last + 1].mean(1)
    if case.candidates is None:
        row[:, first : last + 1] = 0.0
    else:
        row = torch.stack([row[:, start : end + 1].sum(1) for start, end in case.candidates], 1)
    best = row.max(1)
    return torch.isin(best.indices, torch.tensor(sorted(case.answers))) & (best.values > 0)
