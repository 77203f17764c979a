"""How far a translation can be trusted: the quality that a model's own numbers predict, calibrated on known text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from regard.errors import CorpusError
from regard.translation.kept_record import load_record, save_record

FILE = "trust.json"
LOW = 0.35
"""Below this predicted quality a translation gets a warning."""
FEWEST_PAIRS = 100
RIDGE = 0.01
"""Added to the normal equations, so that features that do not vary count for nothing."""
FOLDS = 5


class TranslationNumbers(NamedTuple):
    """What a model says of a translation without knowing a reference."""

    log_probability: float
    """Of the whole translation."""
    tokens: int
    """Of the translation, its END too."""
    source_tokens: int
    unknown_words: int = 0
    """Of the source, those that are copied because the model does not know them (see `Placeholders`)."""

    def features(self) -> list[float]:
        """1, p, r, l, p², r², l r and u: p the mean log probability of a token, r tokens for each source token, l the
        log of the source's length, u its unknown words.
        """
        p = self.log_probability / max(self.tokens, 1)
        r, l = self.tokens / max(self.source_tokens, 1), math.log(max(self.source_tokens, 1))  # noqa: E741
        return [1.0, p, r, l, p * p, r * r, l * r, float(self.unknown_words)]


@dataclass(frozen=True)
class Trust:
    """Predicts chrF / 100 of a translation, in 0..1, from what a model says of it: w · features, least squares.

    weights: w, one for each feature; without the last, as of older fits, unknown words count for nothing. correlation:
    Pearson's, of predicted and true quality of pairs that the fit has not seen (five folds). pairs: of so many pairs.

    Text of the kind that the model translates well and of kinds that it does not has to be in the pairs that it is
    fitted to; of a kind that is in none of them it knows nothing.
    """

    weights: tuple[float, ...]
    correlation: float
    pairs: int

    @classmethod
    def fit(cls, numbers: Sequence[TranslationNumbers], qualities: Sequence[float]) -> Trust:
        """The least squares fit to the qualities, 0..1, of known translations.

        Raises:
            CorpusError: there are fewer than 100, or not as many numbers as qualities.
        """
        if len(numbers) != len(qualities):
            raise CorpusError(f"there are numbers of {len(numbers):,} translations and {len(qualities):,} qualities")
        check_count(len(numbers))
        features, true = np.array([one.features() for one in numbers]), np.array(qualities)
        fold = np.random.default_rng(0).permutation(len(true)) % FOLDS
        predicted = np.empty(len(true))
        for number in range(FOLDS):
            inner = fold != number
            predicted[~inner] = features[~inner] @ _least_squares(features[inner], true[inner])
        vary = predicted.std() > 0 and true.std() > 0
        correlation = float(np.corrcoef(predicted, true)[0, 1]) if vary else 0.0
        weights = tuple(round(float(weight), 6) for weight in _least_squares(features, true))
        return cls(weights, round(correlation, 3), len(true))

    def of(self, numbers: TranslationNumbers) -> float:
        """The predicted quality of a translation, 0..1."""
        features = numbers.features()[: len(self.weights)]
        return min(max(float(np.dot(self.weights, features)), 0.0), 1.0)

    def save(self, folder: Path) -> None:
        """Write trust.json into the folder of a model, which every later translation reads.

        Raises:
            CheckpointError: it cannot be written.
        """
        save_record(self, folder / FILE)

    @classmethod
    def load(cls, folder: Path) -> Trust | None:
        """What is kept in the folder of a model, None where nothing is.

        Raises:
            CheckpointError: trust.json was damaged.
        """
        return load_record(folder / FILE, cls._of_fields, "remove it, or calibrate anew")

    @classmethod
    def _of_fields(cls, fields: dict[str, Any]) -> Trust:
        trust = cls(tuple(map(float, fields["weights"])), float(fields["correlation"]), int(fields["pairs"]))
        needed = len(TranslationNumbers(0, 1, 1).features())
        if len(trust.weights) not in (needed, needed - 1):
            raise ValueError(
                f"it has {len(trust.weights)} weights, and needs {needed}, or {needed - 1} of an older fit"
            )
        return trust


def check_count(pairs: int) -> None:
    """Check that there are enough known translations to learn trust from.

    Raises:
        CorpusError: there are fewer than 100.
    """
    if pairs < FEWEST_PAIRS:
        raise CorpusError(f"there are {pairs:,} translations with a known one; trust needs {FEWEST_PAIRS} at least")


def _least_squares(features: np.ndarray, true: np.ndarray) -> np.ndarray:
    return np.linalg.solve(features.T @ features + RIDGE * np.eye(features.shape[1]), features.T @ true)
