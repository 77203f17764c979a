import os
import signal
import subprocess
import time

import pytest

from regard.translation.experiment import Experiment


def test_the_settings_in_effect_are_shown_and_kept_and_the_folder_is_printed(regard, corpus, tmp_path):
    folder = tmp_path / "run"
    shorter = ["--set", "training.max_epochs=1", "--set", "model.hidden_dim=8"]
    result = regard("train", corpus / "digits.yaml", "--folder", folder, *shorter)
    assert result.exit_code == 0
    assert result.stdout == f"{folder}\n"
    settings = (folder / "experiment.yaml").read_text(encoding="utf-8")
    assert result.stderr.startswith(settings)
    assert "1 epochs, " in result.stderr
    experiment = Experiment.load(folder / "experiment.yaml")
    assert (experiment.training.max_epochs, experiment.model.hidden_dim) == (1, 8)


def test_without_a_folder_the_run_is_kept_by_its_name(regard, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = regard("train", corpus / "digits.yaml", "--set", "training.max_epochs=1", "--set", "name=short")
    assert result.stdout == "runs/short\n"
    assert (tmp_path / "runs" / "short" / "best.safetensors").is_file()


@pytest.mark.slow
def test_one_of_two_processes_speaks_for_both(corpus, tmp_path, warm_training):
    script, folder = tmp_path / "command.py", tmp_path / "run"
    script.write_text("from regard_command import main; main()")  # each process starts the command by its file
    two = ["training.max_epochs=1", "training.devices=2", "training.strategy=ddp", "training.accelerator=cpu"]
    overrides = [word for override in two for word in ("--set", override)]
    done = subprocess.run(
        [*warm_training, script, "train", corpus / "digits.yaml", "--folder", folder, *overrides],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert (done.returncode, done.stdout) == (0, f"{folder}\n"), done.stderr
    assert done.stderr.count("max_epochs: 1\n") == done.stderr.count("1 epochs, ") == 1


def test_a_run_that_has_ended_is_not_trained_again(regard, corpus, run):
    before = (run / "best.safetensors").read_bytes()
    result = regard("train", corpus / "digits.yaml", "--folder", run)
    assert result.stdout == f"{run}\n"
    assert (run / "best.safetensors").read_bytes() == before


@pytest.mark.parametrize("name", ["../../evil", "/evil", "..", "a/b", "a\\\\b", "a\\0b", "a\\nb"])
def test_a_name_does_not_lead_out_of_runs(regard, corpus, tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    result = regard("train", corpus / "digits.yaml", "--set", f'name="{name}"')
    assert result.exit_code == 2
    assert "which cannot be the name of a folder in runs; write a name without slashes" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_mistakes_leave_nothing_behind(regard, corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for override, message in (
        ("training.max_epoch=1", "training.max_epoch: unknown key; did you mean 'max_epochs'?"),
        ("training.max_epochs=many", "training.max_epochs: has 'many'"),
        ("training.max_epochs", "is not of the form key=value"),
    ):
        result = regard("train", corpus / "digits.yaml", "--set", override)
        assert result.exit_code == 2
        assert message in result.stderr
        assert result.stdout == ""
    missing = regard("train", "nowhere.yaml")
    assert missing.exit_code == 2
    assert "nowhere.yaml: cannot be read" in missing.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_a_signal_saves_the_state_and_the_same_command_goes_on(training_shell, regard, corpus, tmp_path, sent, status):
    folder = tmp_path / "run"
    command = ["train", corpus / "digits.yaml", "--folder", folder, "--set"]
    training = training_shell(*command, "training.max_epochs=100000")
    deadline = time.monotonic() + 200
    while not (folder / "last.safetensors").exists():
        assert training.process.poll() is None, training.end()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    training.process.send_signal(sent)
    code, stdout, stderr = training.end()
    assert (code, stdout) == (status, b"")
    assert f"interrupted; {folder} has the state, and the same command goes on from there" in stderr.decode()
    assert "Traceback" not in stderr.decode()
    result = regard(*command, "training.max_epochs=1")
    assert (result.exit_code, result.stdout) == (0, f"{folder}\n")
