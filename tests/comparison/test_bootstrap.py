import math
import random
from typing import Any

import numpy as np
import pytest
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest

from regard.comparison.bootstrap import T_975, holm, paired_p_value, resampled_scores, seed_interval
from regard.comparison.quality import bleu_statistics, exact_statistics, score_of_sums


def bleu(sums):
    return score_of_sums("bleu", sums)


def share(sums):
    return float(sums[0] / sums[1])


def translations(share_wrong: float, seed: int, count: int = 80) -> tuple[list[str], list[str]]:
    generator = random.Random(seed)
    references = [" ".join(generator.choices("abcdefgh", k=generator.randrange(4, 12))) for _ in range(count)]
    wrong = [
        " ".join(generator.choice("abcdefgh") if generator.random() < share_wrong else word for word in line.split())
        for line in references
    ]
    return wrong, references


def test_quantiles_are_those_of_student():
    # The integral of the density up to each quantile, by the trapezoidal rule.
    for degrees, quantile in enumerate(T_975, start=1):
        x = np.linspace(0, quantile, 200_001)
        scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
        density = scale * (1 + x**2 / degrees) ** (-(degrees + 1) / 2)
        area = float(((density[1:] + density[:-1]) / 2).sum() * (x[1] - x[0]))
        assert area == pytest.approx(0.475, abs=1e-5)


def test_an_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(1)
    intervals = [seed_interval(draw) for draw in generator.normal(size=(4000, 3))]
    covered = [interval is not None and interval[0] <= 0 <= interval[1] for interval in intervals]
    assert np.mean(covered) == pytest.approx(0.95, abs=0.012)


def test_one_seed_has_no_interval():
    assert seed_interval([3.0]) is None


def test_sums_of_sentence_statistics_are_the_bleu_of_the_corpus():
    hypotheses, references = translations(0.3, seed=1)
    sums = np.array(bleu_statistics(hypotheses, references)).sum(0)
    assert bleu(sums) == pytest.approx(BLEU().corpus_score(hypotheses, [references]).score, abs=1e-9)


def test_resamples_of_bleu_are_those_of_sacrebleu():
    references = translations(0.0, seed=2)[1]
    first = [line if number % 3 else "a b c" for number, line in enumerate(references)]
    second = [line if number % 4 else "a b c" for number, line in enumerate(references)]
    paired = PairedTest([("one", first), ("two", second)], {"BLEU": BLEU()}, [references], "bs", 1000)
    theirs: Any = paired()[1]["BLEU"]
    one, two = (np.array(bleu_statistics(lines, references), dtype=float) for lines in (first, second))
    drawn = np.sort(resampled_scores(two, bleu))
    assert drawn.mean() == pytest.approx(theirs[1].mean, abs=1e-3)
    # Theirs is one-sided in effect, ours two-sided.
    assert theirs[1].p_value <= paired_p_value(one, two, bleu) <= 2.6 * theirs[1].p_value + 0.01


def test_p_is_that_of_the_normal_distribution_for_a_mean():
    generator = np.random.default_rng(3)
    first = generator.random(400) < 0.60
    second = np.where(generator.random(400) < 0.15, generator.random(400) < 0.80, first)
    one, two = (np.stack([right.astype(float), np.ones(400)], 1) for right in (first, second))
    differences = second.astype(float) - first
    deviations = abs(differences.mean()) / (differences.std() / math.sqrt(400))
    assert paired_p_value(one, two, share, samples=4000) == pytest.approx(
        math.erfc(deviations / math.sqrt(2)), abs=0.02
    )


def test_equal_systems_do_not_differ():
    same = np.array(exact_statistics(["a", "b", "c"], ["a", "b", "x"]))
    assert paired_p_value(same, same, share) == 1.0


def test_p_of_no_difference_is_uniform():
    generator = np.random.default_rng(4)
    found = []
    for _ in range(200):
        one, two = (np.stack([generator.random(60), np.ones(60)], 1) for _ in range(2))
        found.append(paired_p_value(one, two, share, samples=200))
    assert np.mean(np.array(found) < 0.05) < 0.10
    assert np.mean(found) == pytest.approx(0.5, abs=0.07)


def test_holm_rejects_what_the_procedure_rejects():
    # Holm's steps by hand: 0.01 ≤ 0.05 / 4, 0.013 ≤ 0.05 / 3, 0.03 > 0.05 / 2, and no further.
    adjusted = holm([0.03, 0.01, 0.04, 0.013])
    assert [one <= 0.05 for one in adjusted] == [False, True, False, True]
    assert adjusted == pytest.approx([0.06, 0.04, 0.06, 0.04])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
