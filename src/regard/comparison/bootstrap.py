"""Intervals over seeds, and tests of differences by paired bootstrap over the sentences of a test set."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.float64]
Score = Callable[[Numbers], float]
"""The quality of a test set, from the sum of the statistics of its sentences, (k,)."""

SAMPLES = 1000
"""Resamples of a test set."""

SEED = 12345
"""Seed of the resamples: that of sacreBLEU, whose draws they are."""

T_975 = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604)
"""0.975 quantiles of Student's t distribution with 1 to 13 degrees of freedom."""


def seed_interval(qualities: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the mean over seeds, by Student's t: mean ± t · s / √n; None of one seed alone.

    It is about training again, with other seeds, and testing on the same sentences.

    >>> [round(end, 3) for end in seed_interval([1.0, 2.0, 3.0])]
    [-0.484, 4.484]
    >>> seed_interval([1.0]) is None
    True
    """
    count = len(qualities)
    if count < 2:
        return None
    quantile = T_975[min(count - 1, len(T_975)) - 1]
    mean = sum(qualities) / count
    deviation = math.sqrt(sum((quality - mean) ** 2 for quality in qualities) / (count - 1))
    half = quantile * deviation / math.sqrt(count)
    return mean - half, mean + half


def resampled_scores(statistics: Numbers, score: Score, samples: int = SAMPLES) -> Numbers:
    """The quality of test sets that are drawn from the sentences with replacement, (samples,).

    Args:
        statistics: of each sentence, (sentences, k).
        score: quality of a sum of them.
        samples: how many test sets. They depend on the number of sentences alone: two systems get the same.
    """
    sentences = len(statistics)
    draws = np.random.default_rng(SEED).choice(sentences, size=(samples, sentences), replace=True)
    return np.array([score(np.bincount(rows, minlength=sentences) @ statistics) for rows in draws])


def paired_p_value(baseline: Numbers, other: Numbers, score: Score, samples: int = SAMPLES) -> float:
    """How likely a difference as large as this is by the choice of sentences alone: two-sided, by paired bootstrap.

    p = (1 + #{b : |Δ_b - mean Δ| ≥ |Δ|}) / (1 + samples), where Δ is the difference on the test set and Δ_b that on
    its b-th resample, which both systems get. Statistics of several seeds are summed by sentence before, so that a
    sentence is drawn with all its translations.

    Args:
        baseline: statistics of each sentence, (sentences, k).
        other: the same of the other system.
        score: quality of a sum of them.
        samples: how many resamples.

    Source: Koehn 2004, Statistical Significance Tests for Machine Translation Evaluation, section 5. sacreBLEU, whose
    draws these are, centres |Δ_b| instead of Δ_b, which makes its p about half of this one: one-sided.

    >>> import numpy
    >>> right, wrong = numpy.ones((50, 1)), numpy.zeros((50, 1))
    >>> paired_p_value(wrong, right, lambda total: float(total[0]) / 50) < 0.01
    True
    >>> paired_p_value(right, right, lambda total: float(total[0]) / 50)
    1.0
    """
    difference = score(other.sum(0)) - score(baseline.sum(0))
    drawn = resampled_scores(other, score, samples) - resampled_scores(baseline, score, samples)
    # A difference without spread is no accident of the sentences, unless there is none.
    extreme = np.abs(drawn - drawn.mean()) >= abs(difference) - 1e-12
    return (1 + int(extreme.sum())) / (1 + samples)


def holm(p_values: Sequence[float]) -> list[float]:
    """p-values of several tests, adjusted so that the chance of one false alarm or more stays below the level.

    Source: Holm 1979, A Simple Sequentially Rejective Multiple Test Procedure.

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, number in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[number]))
        adjusted[number] = highest
    return adjusted
