import errno
import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_runs import copier, experiment, text, write_text

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.callbacks import SaveRun
from regard.translation.checkpoint import load_state, load_weights
from regard.translation.experiment import Experiment
from regard.translation.lightning_module import Training
from regard.translation.settings import TrainingSettings
from regard.translation.training import TrainingResult, fit, train
from regard.utils import atomic_files

SCRIPT = Path(__file__).with_name("kill_and_resume.py")
KILLED_AT = {
    2: "after experiment.yaml",
    9: "update",  # before anything was saved
    12: "before training.safetensors",  # the first state is on the disk, but not in its place
    14: "update",
    16: "validation",
    19: "after best.safetensors",  # better than what the state knows
    21: "after last.safetensors",  # newer weights than the state
    31: "update",  # in the second epoch
    0: "after training.safetensors",  # the last event: nothing is left to do
}


REDONE = {2: 14, 9: 14, 12: 14, 14: 11, 16: 11, 19: 11, 21: 11, 31: 8, 0: 0}
"""How many of the 14 updates the resumed run computes."""
FEW = (12, 21, 31)
"""Before there is a state, where weights are newer than it, and in the second epoch."""


@pytest.fixture(
    scope="module",
    params=[FEW, pytest.param(tuple(sorted(KILLED_AT.keys() - FEW)), marks=pytest.mark.slow)],
    ids=["few moments", "the other moments"],
)
def kills(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[int, ...], str]:
    """Moments, and what the script prints of them."""
    home = tmp_path_factory.mktemp("kills")
    command = [sys.executable, str(SCRIPT), str(home), *map(str, request.param)]
    run = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert run.returncode == 0, run.stderr
    assert "unbroken: ended with 0" in run.stdout, run.stderr
    return request.param, run.stdout


def test_a_run_killed_at_any_moment_comes_to_the_same_weights(kills: tuple[tuple[int, ...], str]):
    events, printed = kills
    said = [line for line in printed.splitlines() if line[:1].isdigit() and "resumed with" not in line]
    assert said == [
        f"{event}: {line}"
        for event in events
        for line in (f"killed at {KILLED_AT[event]}", "ended with -9, then 0", "the same")
    ]


def test_a_resumed_run_goes_on_from_the_latest_save_rather_than_from_the_start(kills: tuple[tuple[int, ...], str]):
    events, printed = kills
    lines = printed.splitlines()
    assert lines.count("update") == 14
    redone = {event: lines.count(f"{event}: resumed with update") for event in events}
    assert redone == {event: REDONE[event] for event in events}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    write_text(tmp_path)
    return tmp_path


SIGNALS = [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)]


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: str, number: int, sent: signal.Signals) -> None:
    """Press Ctrl-C, or send another signal, in the middle of a training or validation step."""
    original, count = getattr(Training, step), iter(range(1, 999))

    def interrupted(self: Training, batch: Any, batch_idx: int) -> Any:
        if next(count) == number:
            os.kill(os.getpid(), sent)
        return original(self, batch, batch_idx)

    monkeypatch.setattr(Training, step, interrupted)


@pytest.mark.parametrize(("sent", "ends"), SIGNALS)
@pytest.mark.parametrize(("step", "number", "saved"), [("training_step", 3, 3), ("validation_step", 1, 4)])
def test_a_signal_saves_the_last_state_and_resuming_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int, saved: int, sent: signal.Signals, ends: type
):
    settings = experiment(home, validate_every=4)
    train(settings, home / "unbroken")
    handler = signal.getsignal(sent)
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, number, sent)
        with pytest.raises(ends):
            train(settings, home / "run")
    assert signal.getsignal(sent) is handler
    assert load_weights(home / "run" / "last.safetensors")[1]["update"] == saved
    train(settings, home / "run", resume="must")
    assert_same_weights(home / "run", home / "unbroken")


@pytest.mark.parametrize(("step", "number"), [("training_step", 8), ("validation_step", 1)])
def test_a_signal_at_a_checkpoint_stop_keeps_its_weights(
    home: Path, monkeypatch: pytest.MonkeyPatch, step: str, number: int
):
    settings = experiment(home, validate_every=4, keep_last=9)
    train(settings, home / "unbroken")
    with monkeypatch.context() as patch:
        interrupt_at(patch, step, number, signal.SIGTERM)
        with pytest.raises(SystemExit):
            train(settings, home / "run")
    train(settings, home / "run", resume="must")
    kept = [sorted(path.name for path in (home / name / "weights").iterdir()) for name in ("unbroken", "run")]
    assert kept[0] == kept[1] == [f"update-{update:08}.safetensors" for update in (4, 8, 12, 14)]


@pytest.mark.parametrize(("first", "ends"), SIGNALS)
def test_ctrl_c_after_a_signal_ends_at_once(
    home: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, ends: type
):
    def interrupted(self: Training, batch: Any, batch_idx: int) -> None:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGINT)
        pytest.fail("the second one should have ended this step")

    monkeypatch.setattr(Training, "training_step", interrupted)
    with pytest.raises(ends):
        train(experiment(home), home / "run")
    assert not (home / "run" / "state").exists()


@pytest.mark.parametrize(("first", "ends"), SIGNALS)
def test_sigterm_after_a_signal_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch, first: signal.Signals, ends: type
):
    step = Training.training_step

    def interrupted(self: Training, batch: Any, batch_idx: int) -> Any:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), signal.SIGTERM)
        return step(self, batch, batch_idx)

    monkeypatch.setattr(Training, "training_step", interrupted)
    with pytest.raises(ends):
        train(experiment(home), home / "run")
    assert load_weights(home / "run" / "last.safetensors")[1]["update"] == 1


@pytest.mark.parametrize(("sent", "ends"), SIGNALS)
def test_a_signal_in_the_last_save_ends_the_caller_too(
    home: Path, monkeypatch: pytest.MonkeyPatch, sent: signal.Signals, ends: type
):
    settings, save = experiment(home, max_epochs=1), SaveRun.save

    def interrupted(self: SaveRun, trainer: Any, training: Training) -> None:
        os.kill(os.getpid(), sent)
        save(self, trainer, training)

    with monkeypatch.context() as patch:
        patch.setattr(SaveRun, "save", interrupted)
        with pytest.raises(ends):
            train(settings, home / "run")
    assert without_updates(monkeypatch, lambda: train(settings, home / "run")).epochs == 1


TWO_PROCESSES = """
import os, signal, sys
from pathlib import Path
from regard.translation.experiment import Experiment
from regard.translation.lightning_module import Training
from regard.translation.training import train

step, home = Training.training_step, Path(sys.argv[1])

def interrupted(self, batch, batch_idx):
    if self.trainer.global_rank == int(sys.argv[2]) and self.progress.position.update == 3:
        os.kill(os.getpid(), getattr(signal, sys.argv[3]))
    return step(self, batch, batch_idx)

Training.training_step = interrupted
try:
    train(Experiment.load(home / "two.yaml"), home / "run")
except BaseException as error:
    rank = os.environ.get("LOCAL_RANK", "0")
    (home / f"ended-{rank}").write_text(repr(error))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rank", "sent", "said"), [("0", "SIGTERM", "SystemExit(143)"), ("1", "SIGINT", "KeyboardInterrupt()")]
)
def test_a_signal_to_one_process_ends_all_in_the_same_way(home: Path, rank: str, sent: str, said: str):
    experiment(home, devices=2, strategy="ddp").save(home / "two.yaml")
    (home / "script.py").write_text(TWO_PROCESSES)
    subprocess.run([sys.executable, home / "script.py", home, rank, sent], env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert [(home / f"ended-{one}").read_text() for one in (0, 1)] == [said, said]
    assert load_weights(home / "run" / "last.safetensors")[1]["update"] == 4


def assert_same_weights(one: Path, other: Path) -> None:
    for name in ("best", "last"):
        ours, theirs = (load_weights(folder / f"{name}.safetensors") for folder in (one, other))
        assert ours[1] == theirs[1]
        assert all(torch.equal(ours[0][key], theirs[0][key]) for key in ours[0] | theirs[0])


def without_updates(monkeypatch: pytest.MonkeyPatch, work: Callable[[], TrainingResult]) -> TrainingResult:
    """The work, which must not train."""
    with monkeypatch.context() as patch:
        patch.setattr(Training, "training_step", lambda *_: pytest.fail("there is nothing left to train"))
        return work()


def test_a_run_that_has_ended_stays_as_it_is_until_it_is_given_more(home: Path, monkeypatch: pytest.MonkeyPatch):
    first = train(experiment(home, max_epochs=1), home / "run")
    assert without_updates(monkeypatch, lambda: train(experiment(home, max_epochs=1), home / "run")) == first
    more = train(experiment(home, max_epochs=2), home / "run")
    assert (more.epochs, more.updates) == (2, 2 * first.updates)
    train(experiment(home, max_epochs=2), home / "unbroken")
    assert_same_weights(home / "run", home / "unbroken")


def test_a_run_out_of_patience_stays_so_until_it_is_given_more(home: Path, monkeypatch: pytest.MonkeyPatch):
    worse = {"learning_rate": 3.0, "validate_every": 1, "max_epochs": 9}
    result = train(experiment(home, patience=2, **worse), home / "run")
    state = load_state(home / "run" / "state" / "training.safetensors")["state_dict"]["_extra_state"]["progress"]
    assert state["stale_validations"] == 2
    assert result.updates == state["best_update"] + 2 == state["position"]["update"]
    assert without_updates(monkeypatch, lambda: train(experiment(home, patience=2, **worse), home / "run")) == result
    assert train(experiment(home, patience=3, **worse), home / "run").updates > result.updates


def test_time_runs_out_in_the_middle_of_an_epoch_and_more_time_goes_on_from_there(home: Path):
    result = train(experiment(home, max_minutes=1e-6), home / "run")
    assert result.updates == 1
    assert result.best_score is not None
    assert train(experiment(home, max_minutes=5, max_epochs=1), home / "run").updates == 7
    assert train(experiment(home), home / "run").updates == 14


def test_another_experiment_in_the_same_folder_is_refused_by_the_names_of_its_keys(home: Path):
    train(experiment(home, max_epochs=1), home / "run")
    before = (home / "run" / "experiment.yaml").read_text()
    with pytest.raises(ConfigurationError, match=r"holds a run with other settings: training\.learning_rate; give"):
        train(experiment(home, max_epochs=1, learning_rate=0.1), home / "run")
    assert (home / "run" / "experiment.yaml").read_text() == before


def test_fit_refuses_other_settings_too(tmp_path: Path):
    def train_on(**options: Any) -> TrainingResult:
        chosen = TrainingSettings(**{"batch_tokens": 60, "max_epochs": 2, "accelerator": "cpu", **options})
        return fit(copier(), text(30), chosen, folder=tmp_path / "run")

    train_on(max_epochs=1)
    with pytest.raises(
        ConfigurationError,
        match=r"the state to resume from is of a run with other settings: training\.learning_rate, "
        r"training\.label_smoothing; give this one another folder",
    ):
        train_on(learning_rate=0.1, label_smoothing=0.2)
    assert train_on(save_every=7, keep_last=1).epochs == 2


def test_what_does_not_touch_an_update_may_change(home: Path):
    train(experiment(home, max_epochs=1), home / "run")
    moved = home / "moved"
    moved.mkdir()
    write_text(moved)
    again = experiment(moved, max_epochs=1, patience=7, max_minutes=3.0, save_every=3)
    train(again.model_copy(update={"search": again.search.model_copy(update={"beam": 2})}), home / "run")
    assert "patience: 7" in (home / "run" / "experiment.yaml").read_text()


def test_another_test_text_is_refused_where_it_says_what_is_trained_on(home: Path):
    def told(test: str, extra: bool) -> Experiment:
        data: dict[str, Any] = experiment(home, max_epochs=1).model_dump(mode="json")
        data["data"]["test"] = {"source": f"{test}.src", "target": f"{test}.trg"}
        data["data"]["extra"] = {"source": "dev.src", "target": "dev.trg"} if extra else None
        data["data"]["validation"] = {"source": "train.src", "target": "train.trg"}
        return Experiment.from_mapping(data)

    (home / "other.src").write_text("ab\n")
    (home / "other.trg").write_text("ba\n")
    for extra in (False, True):
        train(told("other", extra), home / f"{extra}")
    train(told("train", False), home / "False")
    with pytest.raises(ConfigurationError, match=r"other settings: data\.test\.source, data\.test\.target; give"):
        train(told("train", True), home / "True")


def test_other_text_under_the_same_name_is_refused(home: Path):
    train(experiment(home, max_epochs=1), home / "run")
    (home / "train.src").write_text((home / "train.src").read_text().replace("a", "b"))
    with pytest.raises(
        CheckpointError, match=r"its batches have changed: text was \d+ and is \d+; resume with the text"
    ):
        train(experiment(home, max_epochs=2), home / "run")


def test_whether_to_resume_can_be_told(home: Path):
    with pytest.raises(CheckpointError, match=r"run has no state to resume from: .*training\.safetensors does not"):
        train(experiment(home), home / "run", resume="must")
    assert not (home / "run").exists()
    train(experiment(home, max_epochs=1), home / "run", resume="never")
    with pytest.raises(ConfigurationError, match="run already holds a run; choose another folder"):
        train(experiment(home, max_epochs=1), home / "run", resume="never")


def test_a_damaged_state_is_told(home: Path):
    train(experiment(home, max_epochs=1), home / "run")
    state = home / "run" / "state" / "training.safetensors"
    state.write_bytes(state.read_bytes()[:-9])
    with pytest.raises(CheckpointError, match=r"state/training\.safetensors is not a whole safetensors file"):
        train(experiment(home, max_epochs=1), home / "run")


def test_a_folder_that_cannot_be_made_is_told(home: Path):
    with pytest.raises(CheckpointError, match=r"cannot make the folder .*train\.src/run \(Not a directory\)"):
        train(experiment(home), home / "train.src" / "run")


def test_a_full_disk_ends_the_run_and_leaves_the_earlier_save_whole(home: Path, monkeypatch: pytest.MonkeyPatch):
    settings = experiment(home, save_every=2)
    train(settings, home / "unbroken")
    force, saves = atomic_files._force_to_disk, iter(range(1, 999))

    def full_at_the_third_state(path: Path) -> None:
        if path.parent.name == "state" and next(saves) == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        force(path)

    with monkeypatch.context() as patch:
        patch.setattr(atomic_files, "_force_to_disk", full_at_the_third_state)
        message = re.escape(str(home / "run" / "state" / "training.safetensors")) + ": No space left on device"
        with pytest.raises(CheckpointError, match=f"cannot write {message}"):
            train(settings, home / "run")
    state = load_state(home / "run" / "state" / "training.safetensors")
    assert state["state_dict"]["_extra_state"]["progress"]["position"]["update"] == 4
    train(settings, home / "run")
    assert_same_weights(home / "run", home / "unbroken")


def test_resuming_unpickles_nothing(home: Path, monkeypatch: pytest.MonkeyPatch):
    train(experiment(home, max_epochs=1), home / "run")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("torch.load was called"))
    monkeypatch.setattr("pickle.Unpickler", lambda *_, **__: pytest.fail("something was unpickled"))
    assert train(experiment(home, max_epochs=2), home / "run").epochs == 2


def test_seconds_and_speed_are_of_all_parts_of_a_run(home: Path):
    first = train(experiment(home, max_epochs=1), home / "run")
    second = train(experiment(home, max_epochs=2), home / "run")
    assert second.seconds > first.seconds > 0
    tokens = sum(len(line) + 1 for line in (home / "train.trg").read_text().split())
    assert math.isclose(second.seconds * second.target_tokens_per_second, 2 * tokens)
