import json
import math
import random

import numpy as np
import pytest

from regard.errors import CheckpointError, CorpusError
from regard.translation.trust import TranslationNumbers, Trust


def made(count, seed=4):
    """Numbers of translations, and qualities that follow from them by known weights, with some noise."""
    random.seed(seed)
    numbers, qualities = [], []
    for _ in range(count):
        source, said = random.randint(3, 40), random.randint(2, 40)
        p = -random.random()
        numbers.append(TranslationNumbers(p * said, said, source))
        qualities.append(0.6 + 0.5 * p + 0.1 * min(said / source, 2) - 0.02 * math.log(source))
    return numbers, qualities


def test_what_follows_from_the_numbers_is_predicted():
    numbers, qualities = made(2000)
    trust = Trust.fit(numbers, [quality + random.gauss(0, 0.02) for quality in qualities])
    assert trust.pairs == 2000
    assert trust.correlation > 0.9
    new, true = made(500, seed=5)
    errors = [trust.of(one) - min(max(quality, 0), 1) for one, quality in zip(new, true, strict=True)]
    assert np.abs(errors).mean() < 0.03


def test_what_does_not_follow_from_them_is_not():
    numbers, _ = made(2000)
    random.seed(6)
    trust = Trust.fit(numbers, [random.random() for _ in numbers])
    assert abs(trust.correlation) < 0.1
    assert {round(trust.of(one), 1) for one in numbers} <= {0.4, 0.5, 0.6}


def test_predictions_stay_between_0_and_1():
    numbers, qualities = made(300)
    trust = Trust.fit(numbers, qualities)
    assert trust.of(TranslationNumbers(-1e6, 1, 1)) in (0.0, 1.0)
    assert 0 <= trust.of(TranslationNumbers(0.0, 0, 0)) <= 1


def test_it_is_kept_in_the_folder(tmp_path):
    assert Trust.load(tmp_path) is None
    trust = Trust.fit(*made(100))
    trust.save(tmp_path)
    assert Trust.load(tmp_path) == trust
    kept = json.loads((tmp_path / "trust.json").read_text())
    (tmp_path / "trust.json").write_text(json.dumps(kept | {"weights": [1.0]}))
    with pytest.raises(
        CheckpointError,
        match=r"trust.json cannot be read: it has 1 weights, and needs 8, or 7 of an older fit; remove it, or cal",
    ):
        Trust.load(tmp_path)
    (tmp_path / "trust.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"trust.json cannot be read: .*; remove it, or calibrate anew"):
        Trust.load(tmp_path)


def test_unknown_words_count():
    numbers, qualities = made(2000)
    random.seed(7)
    unknown = [random.randrange(5) for _ in numbers]
    some = [one._replace(unknown_words=count) for one, count in zip(numbers, unknown, strict=True)]
    lower = [quality - 0.04 * count for quality, count in zip(qualities, unknown, strict=True)]
    trust = Trust.fit(some, lower)
    assert trust.weights[-1] == pytest.approx(-0.04, abs=0.003)
    assert trust.correlation > Trust.fit(numbers, lower).correlation + 0.02


def test_an_older_fit_is_used_as_it_was(tmp_path):
    numbers, _ = made(200)
    kept = {"weights": [0.8, 1.6, 0.2, 0.05, 0.8, -0.06, -0.004], "correlation": 0.7, "pairs": 2961}
    (tmp_path / "trust.json").write_text(json.dumps(kept))
    trust = Trust.load(tmp_path)
    assert trust is not None
    for one in numbers:
        p, r, l = one.log_probability / one.tokens, one.tokens / one.source_tokens, math.log(one.source_tokens)  # noqa: E741
        said = 0.8 + 1.6 * p + 0.2 * r + 0.05 * l + 0.8 * p * p - 0.06 * r * r - 0.004 * l * r
        assert trust.of(one) == pytest.approx(min(max(said, 0), 1), abs=1e-12)
        assert trust.of(one._replace(unknown_words=3)) == trust.of(one)


def test_qualities_of_other_translations_are_refused():
    numbers, qualities = made(120)
    with pytest.raises(CorpusError, match="there are numbers of 120 translations and 119 qualities"):
        Trust.fit(numbers, qualities[:-1])


def test_few_pairs_are_refused():
    numbers, qualities = made(99)
    with pytest.raises(CorpusError, match="there are 99 translations with a known one; trust needs 100 at least"):
        Trust.fit(numbers, qualities)
