"""Pages: taken and given back, shared by what is in them, and never lost or held twice."""

import random

import pytest

from regard.errors import ConfigurationError, PagesExhausted
from regard.nn.caches import PagePool


def check(pool):
    """Each page is free, or held by as many as its count says, or kept for its tokens."""
    holders = [0] * pool.count
    for sequence in pool.sequences:
        assert len(sequence.pages) == pool.pages_for(len(sequence))
        for page in sequence.pages:
            holders[page] += 1
    assert holders == pool._holders
    assert all(not (free and held) for free, held in zip(pool._is_free, holders, strict=True))
    assert pool.free == holders.count(0)


def test_random_texts_come_and_go():
    """The keys that a sequence reads are those that were written for its tokens, whoever wrote them."""
    draw, pool, written = random.Random(3), PagePool(23, 4), {}
    common, living = [draw.randrange(5) for _ in range(20)], []
    for step in range(1000):
        if draw.random() < 0.3:
            text = common[: draw.choice([0, 9, 20])] + [draw.randrange(5) for _ in range(draw.randrange(1, 30))]
            sequence = pool.sequence(step)
            found = sequence.adopt(text)
            assert found % 4 == 0
            assert found < len(text)
            living.append((sequence, text))
        elif living:
            sequence, text = draw.choice(living)
            kind, before = draw.random(), len(sequence)
            if kind < 0.6 and before < len(text):
                part = text[before : before + draw.randrange(1, 9)]
                try:
                    sequence.extend(part)
                except PagesExhausted:
                    assert len(sequence) == before
                else:
                    for position, slot in enumerate(sequence.slots(range(before, len(sequence))), before):
                        written[slot] = tuple(text[: position + 1])
                    if draw.random() < 0.5:
                        sequence.share()
            elif kind < 0.7 and before:
                least = len(sequence._contents) * 4
                sequence.truncate(draw.randint(least, before))
            elif kind > 0.85:
                sequence.end()
                living.remove((sequence, text))
        check(pool)
        for sequence, _ in living:
            slots = sequence.slots(range(len(sequence)))
            assert [written[slot] for slot in slots] == [tuple(sequence.tokens[: at + 1]) for at in range(len(slots))]
            assert [
                slot for first, count in sequence.runs(0, len(sequence)) for slot in range(first, first + count)
            ] == slots
    for sequence, _ in living:
        sequence.end()
    assert pool.free == 23


def test_a_prefix_is_found_by_its_tokens():
    pool = PagePool(10, 4)
    first, second, third = (pool.sequence(name) for name in "abc")
    first.extend(range(10))
    first.share()
    assert second.adopt(range(10)) == 8
    assert second.pages == first.pages[:2]
    assert third.adopt([9, 1, 2, 3, 4, 5, 6, 7, 8]) == 0  # the same second page, but not what comes before it
    assert pool.free == 10 - 3
    first.end()
    second.extend([8, 9])
    assert second.pages[:2] == [*second.pages[:2]]
    assert pool.free == 10 - 3


def test_one_token_is_left_to_go_on_from():
    pool = PagePool(10, 4)
    first, second = pool.sequence("a"), pool.sequence("b")
    first.extend(range(8))
    first.share()
    assert second.adopt(range(8)) == 4


def test_what_nobody_holds_is_kept_until_it_is_needed():
    pool = PagePool(4, 4)
    first = pool.sequence("a")
    first.extend(range(8))
    first.share()
    first.end()
    assert pool.free == 4
    assert pool.sequence("b").adopt(range(9)) == 8
    other = PagePool(4, 4)
    first = other.sequence("a")
    first.extend(range(8))
    first.share()
    first.end()
    other.sequence("b").extend(range(20, 33))  # needs the end of what was kept too
    assert other.sequence("c").adopt(range(9)) == 0


def test_exhausted_says_who_holds_how_many():
    pool = PagePool(6, 4)
    first, second = pool.sequence("long"), pool.sequence("short")
    first.extend(range(14))
    second.extend(range(3))
    with pytest.raises(
        PagesExhausted, match="2 more pages of 4 tokens are needed, and 1 of the 6 are free; held.* 'long' 4, 'short' 1"
    ):
        second.extend(range(8))
    assert len(second) == 3
    first.end()
    second.extend(range(8))
    check(pool)


def test_pages_that_others_find_are_not_cut():
    sequence = PagePool(6, 4).sequence("a")
    sequence.extend(range(10))
    sequence.share()
    sequence.truncate(9)
    with pytest.raises(
        ConfigurationError, match="has 9 tokens, of which others can find 8: it can be cut to a length of 8..9, not 7"
    ):
        sequence.truncate(7)


def test_neighbouring_pages_are_one_run():
    pool = PagePool(100, 4)
    sequences = [pool.sequence(name) for name in range(3)]
    for sequence in sequences:
        sequence.extend(range(20))
    for _ in range(12):
        for sequence in sequences:
            sequence.extend([1])
    assert [len(list(sequence.runs(0, 32))) for sequence in sequences] == [1, 1, 1]
    (run,) = sequences[0].runs(5, 30)
    assert run == (sequences[0].slots(range(5, 6))[0], 25)


@pytest.mark.parametrize("arguments", [(0, 4), (4, 0), (1.5, 4)])
def test_numbers_of_a_pool(arguments):
    with pytest.raises(ConfigurationError, match="count|size"):
        PagePool(*arguments)
