"""Trainings in one process, and in two that torchrun starts: the same losses, weights and errors."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from regard.cli.app import app
from regard.errors import CheckpointError, ConfigurationError
from regard.language import train_language_model as module
from regard.language.language_experiment import LanguageExperiment
from regard.language.train_language_model import train_language_model
from regard.models import LanguageModel

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


def started(folder: Path, processes: int, *options: str) -> subprocess.Popen:
    """`regard train` of the experiment in a folder, under torchrun."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    program = ["--no-python", sys.executable, "-c", "from regard_command import main; main()"]
    return subprocess.Popen(
        [*command, *program, "train", str(folder / "toy.yaml"), "--folder", str(folder / "run"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow  # processes import Lightning
def test_a_ring_has_the_losses_and_the_weights_of_one_process(tmp_path, capsys):
    train_language_model(experiment(tmp_path), tmp_path / "alone")
    alone = bits(capsys.readouterr().out)
    experiment(tmp_path, ring="zigzag").save(tmp_path / "toy.yaml")
    process = started(tmp_path, 2)
    lines, _ = process.communicate(timeout=300)
    assert process.returncode == 0, lines
    assert len(alone) == 6 + 2  # updates, and validations after 4 and 6
    assert alone[-1] < alone[4] < alone[0] - 0.3
    assert bits(lines) == pytest.approx(alone, abs=2e-4)
    ours, theirs = weights(tmp_path / "run"), weights(tmp_path / "alone")
    for name, tensor in theirs.items():
        assert torch.allclose(ours[name], tensor, atol=2e-5), name


@pytest.mark.slow
def test_processes_without_a_ring_read_sequences_of_their_own(tmp_path):
    experiment(tmp_path).save(tmp_path / "toy.yaml")
    process = started(tmp_path, 2)
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
def test_a_ring_goes_on_where_one_process_was_interrupted(tmp_path, interrupted_run):
    whole = train_language_model(experiment(tmp_path, decay="linear"), tmp_path / "whole", verbose=False)
    experiment(tmp_path, decay="linear", ring="contiguous").save(tmp_path / "toy.yaml")
    process = started(tmp_path, 2)
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
    command = ["train", str(tmp_path / "toy.yaml"), "--folder", str(tmp_path / "run"), "--set", override]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "run").exists()


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
