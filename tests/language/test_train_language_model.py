"""Trainings in one process, and in two that torchrun starts: the same losses, weights and errors."""

import math
import os
import re
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard.errors import CheckpointError, ConfigurationError
from regard.language import train_language_model as module
from regard.language.language_experiment import LanguageExperiment
from regard.language.long_text import LongText
from regard.language.sequence_training import sequence_loss
from regard.language.train_language_model import train_language_model
from regard.models import LanguageModel
from regard_command.app import app

TEXT = "".join(f"{number} times {number} is {number**2}.\n" for number in range(300))
SECTIONS = {
    "name": "toy",
    "task": "language-model",
    "data": {"files": ["text.txt"], "length": 50, "held_out": 210},
    "model": {
        "dim": 16,
        "num_heads": 2,
        "hidden_dim": 24,
        "layers": [{"kind": "window", "before": 9}, "causal", "linear"],
    },
    "training": {"max_updates": 6, "report_every": 1, "validate_every": 4, "accelerator": "cpu", "warmup_steps": 2},
}


def experiment(folder, **training) -> LanguageExperiment:
    (folder / "text.txt").write_text(TEXT)
    sections = {**SECTIONS, "data": {**SECTIONS["data"], "folder": folder}}
    return LanguageExperiment.from_mapping({**sections, "training": {**SECTIONS["training"], **training}})


def weights(folder) -> dict[str, torch.Tensor]:
    return LanguageModel.load(folder / "model").state_dict()


def bits(lines: str) -> list[float]:
    """The losses and validations that a training printed, in order."""
    return [float(line.split()[2]) for line in lines.splitlines() if line.startswith("update")]


# Lightning reads the rank when it is loaded, which is before a process of `warm_training` has one.
TRAIN = """
import os
from lightning.pytorch.utilities import rank_zero_only
from regard_command import main

rank_zero_only.rank = int(os.environ["RANK"])
main()
"""


@pytest.fixture
def start(tmp_path, warm_training) -> Callable[[int], subprocess.Popen]:
    """`regard train` of the experiment in the folder of the test, in processes that torchrun starts."""

    def started(processes: int) -> subprocess.Popen:
        torchrun = [*warm_training, "-c", "from torch.distributed.run import main; main()"]
        program = ["--no-python", *warm_training, "-c", TRAIN]
        arguments = ["train", str(tmp_path / "toy.yaml"), "--folder", str(tmp_path / "run")]
        return subprocess.Popen(
            [*torchrun, "--standalone", "--nproc-per-node", str(processes), *program, *arguments],
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    return started


@pytest.mark.slow
def test_a_ring_has_the_losses_and_the_weights_of_one_process(tmp_path, capsys, start):
    train_language_model(experiment(tmp_path), tmp_path / "alone")
    alone = bits(capsys.readouterr().out)
    experiment(tmp_path, ring="zigzag").save(tmp_path / "toy.yaml")
    process = start(2)
    lines, _ = process.communicate(timeout=300)
    assert process.returncode == 0, lines
    assert len(alone) == 6 + 2  # updates, and validations after 4 and 6
    assert alone[-1] < alone[4] < alone[0] - 0.3
    assert bits(lines) == pytest.approx(alone, abs=2e-4)
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "alone")
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-5), name


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("ring", "alone", "tolerance"),
    [
        ({"ring": "zigzag", "ring_size": 2}, {"accumulate": 2}, 2e-5),
        (
            {"ring": "contiguous", "ring_size": 2, "accumulate": 2, "checkpointing": True, "precision": "bf16-mixed"},
            {"accumulate": 4, "precision": "bf16-mixed"},
            1e-2,
        ),
    ],
)
def test_rings_of_two_have_the_losses_and_the_weights_of_one_process(tmp_path, capsys, ring, alone, tolerance, start):
    """Four processes, two rings: the sequences that one process reads one after the other."""
    train_language_model(experiment(tmp_path, **alone), tmp_path / "alone")
    of_one = bits(capsys.readouterr().out)
    experiment(tmp_path, **ring).save(tmp_path / "toy.yaml")
    process = start(4)
    lines, _ = process.communicate(timeout=800)
    assert process.returncode == 0, lines
    assert len(of_one) == 6 + 2
    assert bits(lines) == pytest.approx(of_one, abs=max(tolerance, 2e-4))
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "alone")
    for name, tensor in theirs.items():
        assert (ours[name] - tensor).norm() <= tolerance * tensor.norm(), name


@pytest.mark.slow
def test_more_processes_than_held_out_sequences_validate(tmp_path, start):
    data = {**SECTIONS["data"], "held_out": 60, "folder": tmp_path}
    single = LanguageExperiment.from_mapping({**experiment(tmp_path).model_dump(), "data": data})
    single.save(tmp_path / "toy.yaml")
    process = start(2)
    lines, _ = process.communicate(timeout=300)
    assert process.returncode == 0, lines
    assert len([line for line in lines.splitlines() if re.match("update .* of the held-out text", line)]) == 2


@pytest.mark.slow
def test_processes_without_a_ring_read_sequences_of_their_own(tmp_path, start):
    experiment(tmp_path).save(tmp_path / "toy.yaml")
    process = start(2)
    lines, _ = process.communicate(timeout=300)
    assert process.returncode == 0, lines
    assert len(bits(lines)) == 8
    alone = train_language_model(experiment(tmp_path), tmp_path / "alone", verbose=False)
    assert bits(lines)[-1] != pytest.approx(alone.bits_per_byte, abs=1e-3)


@pytest.fixture
def interrupted_run(tmp_path, monkeypatch) -> Path:
    """A run that Ctrl-C ended in its third update."""
    step = module.SequenceTraining.training_step

    def interrupted(training, batch, index):
        if training.updates == 2:
            signal.raise_signal(signal.SIGINT)
        return step(training, batch, index)

    monkeypatch.setattr(module.SequenceTraining, "training_step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train_language_model(experiment(tmp_path, decay="linear"), tmp_path / "run", verbose=False)
    monkeypatch.undo()
    return tmp_path / "run"


def test_an_interrupted_run_resumes_and_ends_with_the_same_weights(tmp_path, interrupted_run, capsys):
    train_language_model(experiment(tmp_path, decay="linear"), tmp_path / "whole", verbose=False)
    result = train_language_model(experiment(tmp_path, decay="linear"), interrupted_run)
    assert capsys.readouterr().out.startswith("goes on after update 3\n")
    assert result.updates == 6
    for name, tensor in weights(tmp_path / "whole").items():
        assert weights(interrupted_run)[name].equal(tensor), name
    again = train_language_model(experiment(tmp_path, decay="linear"), interrupted_run, verbose=False)
    assert again.updates == 6


@pytest.mark.slow
def test_a_ring_goes_on_where_one_process_was_interrupted(tmp_path, interrupted_run, start):
    whole = train_language_model(experiment(tmp_path, decay="linear"), tmp_path / "whole", verbose=False)
    experiment(tmp_path, decay="linear", ring="contiguous").save(tmp_path / "toy.yaml")
    process = start(2)
    lines, _ = process.communicate(timeout=300)
    assert process.returncode == 0, lines
    assert "goes on after update 3\n" in lines
    assert bits(lines)[-1] == pytest.approx(whole.bits_per_byte, abs=2e-4)


def test_training_starts_from_the_weights_of_another_run(tmp_path, capsys):
    first = train_language_model(experiment(tmp_path), tmp_path / "first", verbose=False)
    more = experiment(tmp_path, start_from=tmp_path / "first", max_updates=1, learning_rate=1e-9)
    result = train_language_model(more, tmp_path / "second", verbose=False)
    assert result.bits_per_byte == pytest.approx(first.bits_per_byte, abs=1e-5)
    other = {**more.model_dump(), "model": {**SECTIONS["model"], "hidden_dim": 32}}
    with pytest.raises(CheckpointError, match=r"training.start_from: the model of .* has another configuration"):
        train_language_model(LanguageExperiment.from_mapping(other), tmp_path / "third", verbose=False)


@pytest.mark.parametrize(
    ("processes", "override", "message"),
    [
        (1, "training.ring=zigzag", "training.ring: zigzag shards each sequence over several processes, and there is"),
        (3, "data.length=2", "data.length: has 2, and training.ring shards a sequence over 3 processes, each of which"),
        (
            6,
            "training.ring_size=4",
            "training.ring_size: has 4, and torchrun started 6 processes, which rings of 4 do not divide: start a "
            "multiple of 4, or write one of [2, 3, 6]",
        ),
        (2, "training.ring=null training.ring_size=2", "training.ring_size 2 needs training.ring, which says how"),
        (2, "training.ring_size=1", "training.ring_size: has 1, needs to be greater than or equal to 2"),
        (2, "training.precision=bf16", "training.precision: has 'bf16', needs to be '32-true' or 'bf16-mixed'"),
        (2, "training.ring=spiral", "training.ring: has 'spiral', needs to be 'contiguous', 'zigzag' or 'striped'"),
        (
            2,
            "data.length=9999",
            "data.held_out: has 210 bytes; a sequence of data.length 9,999 and the byte",
        ),
    ],
)
def test_a_ring_that_cannot_be_ends_with_exit_code_2(tmp_path, monkeypatch, processes, override, message):
    if processes > 1:
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
            monkeypatch.setenv(name, str(processes))  # as torchrun starts this process
    experiment(tmp_path, ring="contiguous").save(tmp_path / "toy.yaml")
    command = ["train", str(tmp_path / "toy.yaml"), "--folder", str(tmp_path / "run")]
    command += [part for each in override.split() for part in ("--set", each)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


def test_activations_computed_again_give_the_same_weights(tmp_path):
    train_language_model(experiment(tmp_path, max_updates=2), tmp_path / "stored", verbose=False)
    train_language_model(experiment(tmp_path, max_updates=2, checkpointing=True), tmp_path / "again", verbose=False)
    for name, tensor in weights(tmp_path / "stored").items():
        assert weights(tmp_path / "again")[name].equal(tensor), name


def test_an_update_of_several_sequences_is_that_of_their_mean_loss(tmp_path, monkeypatch, capsys):
    """The gradient that the optimiser steps with, beside that of a loop over the same sequences."""
    steps, step = [], torch.optim.AdamW.step

    def noting(optimizer, *arguments, **options):
        result = step(optimizer, *arguments, **options)
        steps.append([p.grad.clone() for group in optimizer.param_groups for p in group["params"]])
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", noting)
    settings = experiment(tmp_path, accumulate=3, max_updates=1, clip_norm=None)
    result = train_language_model(settings, tmp_path / "run")
    text = LongText.read(settings.data)
    with torch.random.fork_rng():
        torch.manual_seed(settings.seed)
        model = LanguageModel(settings.model.config())
    losses = torch.stack([sequence_loss(model, text.sequence(settings.seed, 0, number)) for number in range(3)])
    (losses.sum() / (3 * text.length)).backward()
    for gradient, parameter in zip(steps[0], model.parameters(), strict=True):
        assert parameter.grad is not None
        assert torch.allclose(gradient, parameter.grad, atol=1e-6)
    assert result.updates == len(steps) == 1
    expected = float(losses.detach().sum()) / (3 * text.length) / math.log(2)
    assert bits(capsys.readouterr().out)[0] == pytest.approx(expected, abs=1e-3)


def test_a_folder_with_another_run_is_refused(tmp_path):
    train_language_model(experiment(tmp_path), tmp_path / "run", verbose=False)
    with pytest.raises(ConfigurationError, match="holds a run with other settings: training.learning_rate; give"):
        train_language_model(experiment(tmp_path, learning_rate=0.5), tmp_path / "run")


def test_more_updates_extend_a_run_whose_rate_is_constant(tmp_path):
    train_language_model(experiment(tmp_path, max_updates=2), tmp_path / "run", verbose=False)
    extended = train_language_model(experiment(tmp_path), tmp_path / "run", verbose=False)
    whole = train_language_model(experiment(tmp_path), tmp_path / "whole", verbose=False)
    assert (extended.updates, extended.bits_per_byte) == (6, whole.bits_per_byte)
    with pytest.raises(ConfigurationError, match="other settings: training.max_updates, training.decay; give"):
        train_language_model(experiment(tmp_path, max_updates=9, decay="linear"), tmp_path / "run")


def test_another_text_is_refused(tmp_path):
    settings = experiment(tmp_path)
    train_language_model(settings, tmp_path / "run", verbose=False)
    (tmp_path / "text.txt").write_text(TEXT + "!")
    with pytest.raises(ConfigurationError, match=r"bytes of text were 6,\d+ and are 6,\d+; resume with the files"):
        train_language_model(settings, tmp_path / "run")


def test_minutes_end_a_run(tmp_path):
    result = train_language_model(experiment(tmp_path, max_minutes=1e-6), tmp_path / "run", verbose=False)
    assert result.updates < 6
