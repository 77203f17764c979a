"""How far a translation can be trusted: the quality that a model's own numbers predict, calibrated on known text."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from regard.errors import CheckpointError, CorpusError
from regard.utils.atomic_files import atomic_write

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

    def features(self) -> list[float]:
        """1, p, r, l, p², r² and l r: p the mean log probability of a token, r tokens for each source token, l the log
        of the source's length.
        """
        p = self.log_probability / max(self.tokens, 1)
        r, l = self.tokens / max(self.source_tokens, 1), math.log(max(self.source_tokens, 1))  # noqa: E741
        return [1.0, p, r, l, p * p, r * r, l * r]


@dataclass(frozen=True)
class Trust:
    """Predicts chrF / 100 of a translation, in 0..1, from its log probability and lengths: w · features, least squares.

    correlation: Pearson's, of predicted and true quality of pairs that the fit has not seen (five folds). pairs: of so
    many pairs.

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
        if len(numbers) != len(qualities) or len(numbers) < FEWEST_PAIRS:
            raise CorpusError(
                f"there are {len(numbers):,} translations with numbers and {len(qualities):,} with a quality; trust "
                f"needs both of {FEWEST_PAIRS} at least"
            )
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
        return min(max(float(np.dot(self.weights, numbers.features())), 0.0), 1.0)

    def save(self, folder: Path) -> None:
        """Write trust.json into the folder of a model, which every later translation reads.

        Raises:
            CheckpointError: it cannot be written.
        """
        with atomic_write(folder / FILE) as partial:
            partial.write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, folder: Path) -> Trust | None:
        """What is kept in the folder of a model, None where nothing is.

        Raises:
            CheckpointError: trust.json was damaged.
        """
        path = folder / FILE
        if not path.exists():
            return None
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
            trust = cls(tuple(map(float, read["weights"])), float(read["correlation"]), int(read["pairs"]))
        except (ValueError, TypeError, KeyError, OSError) as error:
            raise CheckpointError(f"{path} is no calibration: {error}; remove it, or calibrate anew") from None
        if len(trust.weights) != len(TranslationNumbers(0, 1, 1).features()):
            raise CheckpointError(f"{path} has {len(trust.weights)} weights, of another version: calibrate anew")
        return trust


def _least_squares(features: np.ndarray, true: np.ndarray) -> np.ndarray:
    return np.linalg.solve(features.T @ features + RIDGE * np.eye(features.shape[1]), features.T @ true)
