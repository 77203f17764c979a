"""Batches of sentences: how many are together, that none is lost, and how much they need at most."""

import random

import pytest

from regard.errors import ConfigurationError
from regard.translation.sentence_batches import batches_by_length


def sources(*lengths: int) -> list[list[int]]:
    return [[7] * length for length in lengths]


@pytest.mark.parametrize(
    ("length", "beam", "together"),
    [
        *((1, 1, 640), (4, 1, 512), (20, 1, 102), (31, 1, 66), (32, 1, 64), (33, 1, 64), (1000, 1, 64)),
        *((1, 5, 128), (16, 5, 128), (17, 5, 120), (33, 5, 64), (5, 9, 71), (5, 10, 64), (5, 50, 64)),
    ],
)
def test_short_sentences_are_more_than_64_as_far_as_2048_tokens_and_640_hypotheses_go(length, beam, together):
    sizes = [len(rows) for rows in batches_by_length(sources(*[length] * 700), None, beam)]
    assert sizes[0] == together
    assert sizes == [together] * (700 // together) + [700 % together]


@pytest.mark.parametrize("batch_size", [1, 5, 64, 1000])
def test_a_number_that_is_named_is_that_of_every_batch(batch_size):
    sizes = [len(rows) for rows in batches_by_length(sources(*[2, 40] * 77), batch_size)]
    assert sizes == [batch_size] * (154 // batch_size) + ([154 % batch_size] if 154 % batch_size else [])


@pytest.mark.parametrize("batch_size", [None, 7])
@pytest.mark.parametrize("constrained", [False, True])
def test_every_sentence_with_tokens_is_in_one_batch_and_the_longest_come_first(batch_size, constrained):
    draw = random.Random(5)
    some = sources(*(draw.randrange(60) for _ in range(701)))
    forced = [draw.randrange(3) if constrained else 0 for _ in some]
    batches = list(batches_by_length(some, batch_size, 3, forced if constrained else None))
    assert sorted(row for rows in batches for row in rows) == [row for row, ids in enumerate(some) if ids]
    assert all({forced[row] for row in rows} == {forced[rows[0]]} for rows in batches)
    for count in set(forced):
        lengths = [len(some[row]) for rows in batches for row in rows if forced[row] == count]
        assert lengths == sorted(lengths, reverse=True)


def test_a_batch_of_unlike_lengths_has_no_more_tokens_than_64_of_its_longest_or_2048():
    draw = random.Random(6)
    some = sources(*(draw.choice([1, 3, 9, 30, 31, 33, 200]) for _ in range(900)))
    for rows in batches_by_length(some, None, 2):
        padded = len(rows) * max(len(some[row]) for row in rows)
        assert len(rows) <= 64 or (padded <= 2048 and len(rows) <= 320)


def test_tokens_that_a_translation_holds_make_batches_smaller():
    found = list(batches_by_length(sources(*[4] * 100), None, 5, [0] * 50 + [3] * 50))
    assert [len(rows) for rows in found] == [50, 32, 18]  # 128 sentences of one beam, 32 of four


def test_no_sentence_is_no_batch():
    assert list(batches_by_length(sources(0, 0), None)) == list(batches_by_length([], 3)) == []


@pytest.mark.parametrize(
    ("batch_size", "message"),
    [
        (0, "batch_size is 0; it needs at least 1"),
        (-2, "batch_size is -2; it needs at least 1"),
        (True, "batch_size needs a whole number; it is True"),
        (2.0, "batch_size needs a whole number; it is 2.0"),
        ("8", "batch_size needs a whole number; it is '8'"),
    ],
)
def test_sizes_that_are_refused_before_the_first_batch(batch_size, message):
    with pytest.raises(ConfigurationError, match=message):
        batches_by_length([], batch_size)
