import logging
import math
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from small_runs import copier, experiment, text, write_text
from torch import nn
from torch.nn.functional import cross_entropy

import regard
from regard.errors import ConfigurationError, VocabularyError
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.callbacks import UPDATES_BETWEEN_LOGS, as_training
from regard.translation.checkpoint import load_weights, restore
from regard.translation.data_split import training_text
from regard.translation.experiment import Experiment
from regard.translation.lightning_module import Training
from regard.translation.settings import InverseSquareRootDecay, PlateauDecay, TrainingSettings
from regard.translation.training import fit, train
from regard.translation.translator import Translator
from regard.translation.vocabulary import PAD, Vocabulary


class Witness(Callback):
    """Writes down what Lightning goes through."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.validated_at: list[int] = []
        self.scores: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: dict, *_) -> None:
        self.rates.append(trainer.optimizers[0].param_groups[0]["lr"])
        self.losses.append(float(outputs["loss"]))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = as_training(pl_module).progress
        self.validated_at.append(progress.position.update)
        self.scores.append(progress.scores["validation_loss"])


def settings(**options) -> TrainingSettings:
    return TrainingSettings(**{"batch_tokens": 60, "max_epochs": 3, "accelerator": "cpu", **options})


def mean_cross_entropy(model: nn.Module, words: EncodedText) -> float:
    """Pair by pair, without padding."""
    total, tokens = 0.0, 0
    with torch.no_grad():
        for row in range(len(words)):
            batch = collate(words, numpy.array([row]))
            logits = model(batch.source, batch.source_lengths, batch.target_input)
            total += cross_entropy(logits[0].double(), batch.target_output[0], reduction="sum").item()
            tokens += batch.target_tokens
    return total / tokens


def test_training_makes_the_validation_loss_smaller():
    witness = Witness()
    result = fit(copier(), text(200), settings(learning_rate=0.03), validation=text(30, seed=2), callbacks=[witness])
    assert result.folder is None
    assert result.epochs == 3
    assert result.updates == len(witness.losses)
    assert witness.scores[-1] < 0.95 * witness.scores[0]
    assert result.best_score == min(witness.scores)


def test_the_validation_loss_is_the_mean_over_tokens_however_they_are_batched():
    words, validation, scores = text(50), text(31, seed=2), []
    for batch_tokens in (7, 60, 10_000):
        model, witness = copier(), Witness()
        fit(model, words, settings(batch_tokens=batch_tokens, max_epochs=1), validation=validation, callbacks=[witness])
        scores.append(witness.scores)
        model.eval()
        assert witness.scores[-1] == pytest.approx(mean_cross_entropy(model, validation), rel=1e-6)
    assert scores[0] != scores[1]


def test_the_loss_of_an_update_is_the_smoothed_mean_over_its_tokens():
    words, model, witness = text(20), copier(dropout=0.0), Witness()
    batch = collate(words, numpy.arange(20))
    logits = model(batch.source, batch.source_lengths, batch.target_input).flatten(0, 1)
    expected = cross_entropy(logits, batch.target_output.flatten(), ignore_index=PAD, label_smoothing=0.3)
    fit(model, words, settings(batch_tokens=10_000, max_epochs=1, label_smoothing=0.3), callbacks=[witness])
    assert witness.losses == [pytest.approx(expected.item(), rel=1e-6)]


def test_without_validation_text_nothing_is_validated():
    witness = Witness()
    result = fit(copier(), text(20), settings(), callbacks=[witness])
    assert witness.validated_at == []
    assert result.best_score is None
    assert result.epochs == 3


def test_validation_comes_as_often_as_asked_and_at_the_end():
    witness = Witness()
    result = fit(copier(), text(60), settings(validate_every=4), validation=text(9), callbacks=[witness])
    assert witness.validated_at == [*range(4, result.updates, 4), result.updates]
    assert result.updates % 4


def test_the_learning_rate_follows_its_schedule():
    witness = Witness()
    fit(copier(), text(60), settings(warmup_steps=4, decay=InverseSquareRootDecay(), max_epochs=2), callbacks=[witness])
    assert witness.rates[:4] == pytest.approx([0.00025, 0.0005, 0.00075, 0.001])
    assert witness.rates[8] == pytest.approx(0.001 * math.sqrt(4 / 9))


def test_the_learning_rate_falls_on_a_plateau():
    class Rising(Witness):
        def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_) -> None:
            with torch.no_grad():
                as_training(pl_module).model.get_parameter("predict.bias")[PAD] += (
                    1.0  # whatever is learned, validations get worse
                )

    witness = Rising()
    decay = PlateauDecay(factor=0.5, patience=1)
    options = settings(decay=decay, validate_every=1, max_epochs=2, learning_rate=1e-9)
    fit(copier(), text(60), options, validation=text(9), callbacks=[witness])
    assert witness.scores == sorted(witness.scores)
    assert [round(rate / 1e-9, 4) for rate in witness.rates] == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]


def test_training_ends_when_patience_does():
    result = fit(
        copier(), text(60), settings(patience=2, validate_every=1, max_epochs=99, learning_rate=3.0), validation=text(9)
    )
    assert result.epochs < 99


def test_gradients_are_clipped():
    class Norm(Witness):
        def on_before_zero_grad(self, trainer: Trainer, pl_module: LightningModule, *_) -> None:
            gradients = [weight.grad for weight in pl_module.parameters() if weight.grad is not None]
            if gradients:  # those of the step before
                self.scores.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())

    clipped, free = Norm(), Norm()
    fit(copier(), text(60), settings(clip_norm=0.01, max_epochs=1), callbacks=[clipped])
    fit(copier(), text(60), settings(clip_norm=None, max_epochs=1), callbacks=[free])
    assert clipped.scores == pytest.approx([0.01] * len(clipped.scores), rel=1e-3)
    assert min(free.scores) > 0.02


def test_the_same_seed_gives_the_same_weights_whatever_was_drawn_before():
    models = [copier(), copier(), copier()]
    for model, seed in zip(models, (1, 1, 2), strict=True):
        torch.rand(3)
        fit(model, text(30), settings(), seed=seed)
    first, second, other = (model.predict.weight for model in models)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_the_generators_of_the_caller_are_left_alone():
    before = torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())
    fit(copier(), text(20), settings())
    assert (torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())) == before


def test_mixed_precision_trains():
    witness = Witness()
    fit(
        copier(),
        text(60),
        settings(precision="bf16-mixed", learning_rate=0.03),
        validation=text(9),
        callbacks=[witness],
    )
    assert witness.scores[-1] < witness.scores[0]


def test_nothing_is_said_and_nothing_written_by_a_run_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture, logged: list[logging.LogRecord]
):
    monkeypatch.chdir(tmp_path)
    level = logging.getLogger("lightning.pytorch").level
    fit(copier(), text(20), settings(), validation=text(9))
    assert capfd.readouterr() == ("", "")
    assert logged == []
    assert logging.getLogger("lightning.pytorch").level == level
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"accelerator": "abacus"}, "training cannot start with accelerator 'abacus', devices 1, strategy 'auto'"),
        ({"strategy": "telepathy"}, "strategy 'telepathy', precision '32-true': "),
        ({"devices": 0}, "devices 0"),
    ],
)
def test_what_this_machine_lacks_is_told(options: dict, message: str):
    with pytest.raises(ConfigurationError, match=message):
        fit(copier(), text(20), settings(**options))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("finished")
    write_text(home)
    train(experiment(home, max_epochs=8, learning_rate=0.1, validate_every=3), home / "run")
    return home


def test_a_run_folder_holds_all_of_the_run(finished: Path):
    folder = finished / "run"
    assert {path.name for path in folder.iterdir()} == {
        "experiment.yaml", "source.vocabulary.json", "target.vocabulary.json", "best.safetensors", "last.safetensors",
        "state", "logs",
    }  # fmt: skip
    assert Experiment.load(folder / "experiment.yaml") == experiment(
        finished, max_epochs=8, learning_rate=0.1, validate_every=3
    )
    source = Vocabulary.load(folder / "source.vocabulary.json")
    _, header = load_weights(folder / "last.safetensors")
    assert header["regard"] == regard.__version__
    assert header["source_vocabulary"] == len(source) == 10
    assert header["model"]["hidden_dim"] == 8
    sources = (len(source.encode(line)) for line in training_text(experiment(finished).data)[0].sources)
    assert header["longest_source"] == max(sources) == Translator.load(folder).longest_trained
    assert (header["update"], header["epoch"]) == (56, 8)
    assert header["scores"].keys() == {"validation_loss", "validation_perplexity"}
    assert header["scores"]["validation_perplexity"] == pytest.approx(math.exp(header["scores"]["validation_loss"]))


def test_the_best_weights_have_the_best_score(finished: Path):
    trained = experiment(finished)
    _, header = load_weights(finished / "run" / "best.safetensors")
    _, last = load_weights(finished / "run" / "last.safetensors")
    assert header["scores"]["validation_loss"] <= last["scores"]["validation_loss"]
    model = build_model(trained.model, header["source_vocabulary"], header["target_vocabulary"])
    restore(model, finished / "run" / "best.safetensors")
    sides = []
    for side, name in (("source", "dev.src"), ("target", "dev.trg")):
        vocabulary = Vocabulary.load(finished / "run" / f"{side}.vocabulary.json")
        sides.append(IdSequences.pack(vocabulary.encode_batch((finished / name).read_text().split())))
    assert mean_cross_entropy(model.eval(), EncodedText(*sides)) == pytest.approx(header["scores"]["validation_loss"])


def test_tensorboard_is_told_by_the_number_of_updates(finished: Path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    told = events.EventAccumulator(str(finished / "run" / "logs")).Reload()
    tags = set(told.Tags()["scalars"])
    training = {f"training_{name}" for name in ("loss", "perplexity", "learning_rate", "target_tokens_per_second")}
    assert tags == training | {"validation_loss", "validation_perplexity"}
    assert [event.step for event in told.Scalars("validation_loss")] == [*range(3, 56, 3), 56]
    assert [event.step for event in told.Scalars("training_loss")] == [UPDATES_BETWEEN_LOGS]


def test_a_shared_vocabulary_is_one_for_both_sides(tmp_path: Path):
    write_text(tmp_path)
    shared = experiment(tmp_path, max_epochs=1).model_dump(mode="json") | {
        "vocabulary": {"kind": "bpe", "size": 30, "shared": True}
    }
    train(Experiment.from_mapping(shared), tmp_path / "run")
    source, target = ((tmp_path / "run" / f"{side}.vocabulary.json").read_text() for side in ("source", "target"))
    assert source == target


def test_a_vocabulary_that_cannot_be_learned_is_told(tmp_path: Path):
    write_text(tmp_path)
    small = experiment(tmp_path).model_dump(mode="json") | {"vocabulary": {"kind": "bpe", "size": 5}}
    with pytest.raises(VocabularyError):
        train(Experiment.from_mapping(small), tmp_path / "run")


PROCESSES = """
import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from regard.translation.checkpoint import save_weights
from regard.translation.settings import TrainingSettings
from regard.translation.training import fit
from small_runs import copier, text

folder, name, epochs = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
settings = TrainingSettings(
    batch_tokens=60, max_epochs=epochs, accelerator="cpu", devices=2, strategy="ddp", validate_every=4
)
model = copier()
result = fit(model, text(61), settings, validation=text(9, seed=2), folder=folder / name)
rank = torch.distributed.get_rank()
save_weights(model, folder / f"{name}-{rank}.safetensors", {"score": result.best_score, "updates": result.updates})
"""


@pytest.mark.slow
def test_two_processes_agree_and_resume_exactly(tmp_path: Path):
    script = tmp_path / "processes.py"
    script.write_text(PROCESSES)

    def run(name: str, epochs: int) -> None:
        command = [sys.executable, "-W", "error", str(script), str(tmp_path), name, str(epochs)]
        environment = {"PYTHONPATH": str(Path(__file__).parent)}
        done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""

    run("unbroken", 2)
    run("resumed", 1)
    run("resumed", 2)
    outcomes = [
        load_weights(tmp_path / f"{name}-{rank}.safetensors") for name in ("unbroken", "resumed") for rank in (0, 1)
    ]
    first, header = outcomes[0]
    for tensors, other in outcomes[1:]:
        assert other == header
        assert all(torch.equal(tensors[key], first[key]) for key in first)


def test_the_module_says_what_it_needs():
    with pytest.raises(RuntimeError, match="planned when the Trainer calls setup"):
        _ = Training(copier(), text(3), None, settings(), seed=1).plan
    with pytest.raises(TypeError, match="serve Training, not LightningModule"):
        as_training(LightningModule())
