import signal
import subprocess
import sys
from pathlib import Path

import pytest
from small_runs import copier, experiment, text, write_text

from regard.errors import CheckpointError
from regard.translation.run_folder import RunFolder
from regard.translation.settings import TrainingSettings
from regard.translation.training import fit, train

HOLDER = """
import sys, time
from pathlib import Path
from regard.translation.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("locked", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path: Path):
    """A process that holds the lock of the folder `run`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path / "run"], stdout=subprocess.PIPE)
    assert process.stdout
    assert process.stdout.readline() == b"locked\n"
    yield process
    process.kill()
    process.communicate()


def test_one_process_at_a_time_trains_in_a_folder_until_it_is_killed(holder, tmp_path: Path):
    write_text(tmp_path)
    for training in (
        lambda: train(experiment(tmp_path), tmp_path / "run"),
        lambda: fit(copier(), text(9), TrainingSettings(accelerator="cpu"), folder=tmp_path / "run"),
    ):
        with pytest.raises(CheckpointError, match=r"another process is training in .*run, and one would overwrite"):
            training()
    assert list((tmp_path / "run").iterdir()) == []
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with RunFolder(tmp_path / "run").locked():
        pass


def test_a_lock_leaves_no_file_and_can_be_had_again(tmp_path: Path):
    run = RunFolder(tmp_path / "run")
    for _ in range(2):
        with run.locked():
            assert list(run.path.iterdir()) == []


def test_a_run_that_began_while_the_text_was_read_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from regard.errors import ConfigurationError
    from regard.translation import training

    write_text(tmp_path)
    prepare = training.prepare

    def slow(one, run, resume):
        prepared = prepare(one, run, resume)
        monkeypatch.setattr(training, "prepare", prepare)
        train(experiment(tmp_path, max_epochs=1, learning_rate=0.5), tmp_path / "run")
        return prepared

    monkeypatch.setattr(training, "prepare", slow)
    with pytest.raises(ConfigurationError, match=r"holds a run with other settings: training\.learning_rate; give"):
        train(experiment(tmp_path, max_epochs=1), tmp_path / "run")
    assert "learning_rate: 0.5" in (tmp_path / "run" / "experiment.yaml").read_text()
