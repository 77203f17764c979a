import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import LightningModule, Trainer

from regard.errors import CheckpointError, CorpusError
from regard.translation.batches import (
    Batch,
    EncodedText,
    EpochLoader,
    IdSequences,
    OrderedBatches,
    TokenBatches,
)


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


# --- plans -----------------------------------------------------------------------------------------------------------


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


# --- going on where one stopped --------------------------------------------------------------------------------------


def make_loader(seed: int = 1, batch_tokens: int = 60) -> EpochLoader:
    text = random_text(70)
    return EpochLoader(text, TokenBatches(text, batch_tokens, seed))


def test_a_loader_gives_each_epoch_from_its_beginning():
    loader = make_loader()
    first = pairs_in(list(loader))
    assert sorted(first) == list(range(70))
    assert pairs_in(list(loader)) == first
    loader.set_epoch(1)
    assert pairs_in(list(loader)) != first
    assert len(list(loader)) == len(loader)


@given(epoch=st.integers(0, 2), done=st.integers(0, 10))
def test_a_loader_goes_on_from_any_position(epoch, done):
    loader = make_loader()
    loader.set_epoch(epoch)
    batches = iter(loader)
    for _ in range(done):
        next(batches)
    resumed = make_loader()
    resumed.load_state_dict(loader.state_dict())
    assert resumed.state_dict() == loader.state_dict()
    resumed.set_epoch(epoch)  # as Lightning does, before the first batch
    assert pairs_in(list(resumed)) == pairs_in(list(batches))
    assert resumed.state_dict() == loader.state_dict()
    assert sorted(pairs_in(list(resumed))) == list(range(70))  # the position was gone back to once
    resumed.set_epoch(epoch + 1)
    assert sorted(pairs_in(list(resumed))) == list(range(70))


def test_an_iterator_that_is_never_used_changes_nothing():
    loader = make_loader()
    batches = iter(loader)
    next(batches)
    resumed = make_loader()
    iter(resumed)
    resumed.load_state_dict(loader.state_dict())
    iter(resumed)
    assert pairs_in(list(resumed)) == pairs_in(list(batches))


def test_a_loader_that_was_left_early_begins_anew():
    loader = make_loader()
    everything = pairs_in(list(loader))
    next(iter(loader))
    assert pairs_in(list(loader)) == everything


def test_a_position_in_other_batches_is_refused():
    with pytest.raises(
        CheckpointError, match=r"is one in other batches: seed was 1 and is 2; resume with the text and"
    ):
        make_loader(seed=2).load_state_dict(make_loader().state_dict())
    with pytest.raises(CheckpointError, match="batch_tokens was 60 and is 80"):
        make_loader(batch_tokens=80).load_state_dict(make_loader().state_dict())
    other = random_text(70, longest=9)
    with pytest.raises(CheckpointError, match=r"text was \d+ and is \d+"):
        EpochLoader(other, TokenBatches(other, 60, 1)).load_state_dict(make_loader().state_dict())


class Recorder(LightningModule):
    """Takes down which pairs came in which epoch; stops dead after so many batches."""

    def __init__(self, stop_after: int | None = None):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(()))
        self.seen: list[tuple[int, list[int]]] = []
        self.stop_after = stop_after

    def training_step(self, batch: Batch) -> torch.Tensor:
        self.seen.append((self.current_epoch, pairs_in([batch])))
        return self.weight * batch.target_tokens

    def on_train_batch_end(self, *_) -> None:
        if len(self.seen) == self.stop_after:
            self.trainer.save_checkpoint(self.trainer.default_root_dir + "/stop.ckpt")
            raise KeyError("killed")

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("stop_after", [3, "epoch", "epoch and 2"])
def test_lightning_goes_on_with_the_very_next_batch(tmp_path, stop_after):
    def train(module: Recorder, checkpoint: str | None = None) -> list[tuple[int, list[int]]]:
        trainer = Trainer(
            max_epochs=3,
            accelerator="cpu",
            default_root_dir=str(tmp_path),
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, make_loader(), ckpt_path=checkpoint)
        return module.seen

    batches = len(make_loader())
    stop = {"epoch": batches, "epoch and 2": batches + 2}.get(str(stop_after), 3)
    unbroken = train(Recorder())
    assert [epoch for epoch, _ in unbroken] == [epoch for epoch in range(3) for _ in range(batches)]
    assert len({str(pairs) for _, pairs in unbroken}) > batches
    stopped = Recorder(stop_after=stop)
    with pytest.raises(KeyError, match="killed"):
        train(stopped)
    assert stopped.seen + train(Recorder(), str(tmp_path / "stop.ckpt")) == unbroken
