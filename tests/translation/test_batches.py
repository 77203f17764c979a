import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import CorpusError
from regard.translation.batches import Batch, EncodedText, IdSequences, OrderedBatches, TokenBatches


def make_text(lengths: list[tuple[int, int]]) -> EncodedText:
    """Pairs of the given lengths, where the first id of a source tells the pair."""
    sources = [[100 + row, *[7] * (source - 1)] for row, (source, _) in enumerate(lengths)]
    targets = [[8] * target for _, target in lengths]
    return EncodedText(IdSequences.pack(sources), IdSequences.pack(targets))


def random_text(pairs: int, longest: int = 23) -> EncodedText:
    random = np.random.default_rng(3)
    return make_text([(int(s), int(t)) for s, t in random.integers(1, longest, (pairs, 2))])


def pairs_in(batches: list[Batch]) -> list[int]:
    return [int(row) - 100 for batch in batches for row in batch.source[:, 0]]


texts = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 40)), min_size=8, max_size=80).map(make_text)


@given(text=texts, batch_tokens=st.integers(1, 300), seed=st.integers(0, 9), world_size=st.integers(1, 4))
def test_every_pair_once_within_the_budget_on_one_process_each(text, batch_tokens, seed, world_size):
    try:
        plans = [TokenBatches(text, batch_tokens, seed, rank, world_size) for rank in range(world_size)]
    except CorpusError:
        assert len(text) % world_size
        return
    for epoch in range(2):
        shares = [plan.epoch(epoch) for plan in plans]
        assert {len(batches) for batches in shares} == {len(plans[0])}
        rows = np.concatenate([batch for batches in shares for batch in batches])
        assert sorted(rows) == list(range(len(text)))
        for batch in (batch for batches in shares for batch in batches):
            padded = len(batch) * max(text.sources.lengths[batch].max(), text.targets.lengths[batch].max() + 1)
            assert padded <= batch_tokens or len(batch) == 1


@given(text=texts, batch_tokens=st.integers(1, 300), world_size=st.integers(1, 4))
def test_ordered_batches_have_every_pair_once_short_ones_first(text, batch_tokens, world_size):
    shares = [OrderedBatches(text, batch_tokens, rank, world_size).epoch(0) for rank in range(world_size)]
    assert sorted(row for batches in shares for batch in batches for row in batch) == list(range(len(text)))
    for batches in shares:
        lengths = [int(length) for batch in batches for length in text.lengths[batch]]
        assert lengths == sorted(lengths)


def test_an_epoch_is_a_pure_function_of_seed_and_epoch():
    text = random_text(500)

    def plan(seed: int, epoch: int) -> list[list[int]]:
        return [rows.tolist() for rows in TokenBatches(text, 200, seed).epoch(epoch)]

    assert plan(1, 0) == plan(1, 0)
    assert plan(1, 0) != plan(1, 1)
    assert plan(1, 0) != plan(2, 0)
    in_order = TokenBatches(text, 200, 1)
    assert [rows.tolist() for epoch in range(3) for rows in in_order.epoch(epoch)] == [
        rows for epoch in range(3) for rows in plan(1, epoch)
    ]


def test_batches_are_full_and_their_order_is_random():
    text = random_text(2000)
    batches = TokenBatches(text, 300, seed=1).epoch(0)
    used = sum(int(text.lengths[rows].sum()) for rows in batches)
    assert used > 0.9 * 300 * len(batches)
    longest = [int(text.lengths[rows].max()) for rows in batches]
    assert longest != sorted(longest)


def test_processes_get_batches_of_about_the_same_length_at_each_step():
    text = random_text(3000)
    one, other = (TokenBatches(text, 100, seed=1, rank=rank, world_size=2).epoch(0) for rank in range(2))
    assert all(abs(text.lengths[a].max() - text.lengths[b].max()) <= 1 for a, b in zip(one, other, strict=True))


def test_a_pair_longer_than_the_budget_is_a_batch_of_its_own():
    text = make_text([(3, 3), (50, 4), (3, 3)])
    assert sorted(rows.tolist() for rows in OrderedBatches(text, 20).epoch(0)) == [[0, 2], [1]]


def test_too_few_pairs_for_the_processes():
    pattern = r"3 batches of one pair each cannot be shared evenly among 2 processes; use fewer processes"
    with pytest.raises(CorpusError, match=pattern):
        TokenBatches(make_text([(5, 5)] * 3), batch_tokens=5, seed=1, world_size=2)
