from pathlib import Path

import pytest
import torch
from small_runs import experiment, write_text
from torch import nn

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.checkpoint import load_weights, save_tensors, save_weights
from regard.translation.run_folder import RunFolder, average, mean
from regard.translation.training import train
from regard.translation.translator import Translator

LOSSES = {10: 3.0, 20: 1.0, 30: 2.0, 40: 2.5}


def weights_of(update: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(update)
    table = torch.randn(5, 3, generator=generator)
    return {"source": table, "target": table, "counts": torch.tensor([7]), "half": table.bfloat16()}


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    folder.saved_weights.mkdir()
    for update, loss in LOSSES.items():
        header = {"update": update, "scores": {"validation_loss": loss}, "model": {"kind": "toy"}}
        save_tensors(weights_of(update), folder.weights_after(update), header)
    return folder


@pytest.mark.parametrize(
    ("options", "updates"),
    [({}, [10, 20, 30, 40]), ({"last": 2}, [30, 40]), ({"best": 2}, [20, 30]), ({"best": 3}, [20, 30, 40])],
)
def test_the_mean_is_of_those_that_are_asked_for(run: RunFolder, options: dict, updates: list[int]):
    assert average(run.path, **options) == run.path / "average.safetensors"
    tensors, header = load_weights(run.average)
    assert sorted(header["averaged_updates"]) == updates
    assert header["model"] == {"kind": "toy"}
    expected = torch.stack([weights_of(update)["source"] for update in updates]).double().mean(0)
    assert torch.equal(tensors["source"], expected.float())
    assert tensors["source"] is tensors["target"]
    assert tensors["counts"].tolist() == [7]
    halves = torch.stack([weights_of(update)["half"] for update in updates]).double().mean(0)
    assert torch.equal(tensors["half"], halves.bfloat16())


def test_the_mean_of_one_is_that_one(run: RunFolder):
    tensors, _ = mean([run.weights_after(20)])
    assert torch.equal(tensors["source"], weights_of(20)["source"])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"last": 5}, CheckpointError, "has kept 4 weights, and 5 were asked for: .* training.keep_last=N"),
        ({"last": 1, "best": 1}, ConfigurationError, "give last= or best=, not both"),
        ({"best": 0}, ConfigurationError, "the number of weights to average is 0; it needs to be at least 1"),
    ],
)
def test_what_cannot_be_averaged_is_refused(run: RunFolder, options: dict, error: type[Exception], message: str):
    with pytest.raises(error, match=message):
        average(run.path, **options)
    assert not run.average.exists()


def test_a_run_that_kept_nothing_says_how_to_keep(tmp_path: Path):
    with pytest.raises(CheckpointError, match=r"has kept no weights: a run keeps those of its stops"):
        average(tmp_path)


def test_weights_of_other_models_are_not_mixed(run: RunFolder):
    save_weights(nn.Linear(2, 2), run.weights_after(50), {})
    with pytest.raises(CheckpointError, match=r"update-00000050.safetensors is of another .*: they differ in counts"):
        average(run.path, last=2)
    save_tensors({**weights_of(60), "counts": torch.tensor([8])}, run.weights_after(60), {})
    with pytest.raises(CheckpointError, match="different numbers in counts, which cannot be averaged"):
        mean([run.weights_after(40), run.weights_after(60)])


def test_a_pickle_is_refused(run: RunFolder):
    torch.save(weights_of(70), run.weights_after(70))
    with pytest.raises(CheckpointError, match="is not a whole safetensors file"):
        average(run.path)


def test_a_run_keeps_the_last_and_the_best_of_its_stops(tmp_path: Path):
    write_text(tmp_path)
    told = {"validate_every": 2, "max_epochs": 2, "learning_rate": 0.05}
    train(experiment(tmp_path, **told, keep_last=99), tmp_path / "all")
    kept = sorted((tmp_path / "all" / "weights").iterdir())
    losses = [load_weights(path)[1]["scores"]["validation_loss"] for path in kept]
    assert len(kept) > 5
    train(experiment(tmp_path, **told, keep_last=2, keep_best=1), tmp_path / "few")
    best = kept[losses.index(min(losses))].name
    few = {path.name for path in (tmp_path / "few" / "weights").iterdir()}
    assert few == {best, kept[-2].name, kept[-1].name}
    train(experiment(tmp_path, **told), tmp_path / "none")
    assert not (tmp_path / "none" / "weights").exists()


def test_an_average_over_parts_of_an_epoch_is_loaded_and_translates(tmp_path: Path):
    write_text(tmp_path)
    train(experiment(tmp_path, validate_every=0.5, keep_last=9), tmp_path / "run")
    kept = sorted(path.name for path in (tmp_path / "run" / "weights").iterdir())
    assert kept == [f"update-{update:08}.safetensors" for update in (4, 7, 11, 14)]  # halves of 7 updates, twice
    with pytest.raises(CheckpointError, match="has no average.safetensors; choose 'best', which it has"):
        Translator.load(tmp_path / "run", "average")
    average(tmp_path / "run")
    assert len(Translator.load(tmp_path / "run", "average").translate(["abc"])) == 1
