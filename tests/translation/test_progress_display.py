import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from small_runs import copier, experiment, text, write_text

from regard.translation import terminal
from regard.translation.settings import TrainingSettings
from regard.translation.terminal import ProgressBar, ProgressLines
from regard.translation.training import fit, train


def settings(**values: Any) -> TrainingSettings:
    return TrainingSettings(batch_tokens=60, accelerator="cpu", **values)


def shown(width: int) -> str:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=width)
    fit(copier(), text(60), settings(max_epochs=9), validation=text(9), callbacks=[ProgressBar(console)])
    return screen.getvalue()


def test_the_bar_shows_the_epoch_and_how_it_goes():
    screen = shown(width=200)
    assert "training: 5 updates an epoch, 9 epochs at most" in screen
    assert "validation loss" in screen
    assert "9/9" in screen
    assert "5/5" in screen
    assert "0/5" not in screen.split("\r")[-1]


@pytest.mark.parametrize("width", [40, 80])
def test_nothing_is_cut_in_a_narrow_terminal(width):
    screen = shown(width)
    assert "…" not in screen
    words = re.sub(r"\s+", " ", re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", screen))
    assert re.search(r"validation loss [\d.]+, validation perplexity [\d.]+ ", words)


def test_lines_where_there_is_no_terminal(monkeypatch):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0.0)
    stream = io.StringIO()
    fit(copier(), text(60), settings(max_epochs=2), validation=text(9), callbacks=[ProgressLines(stream)])
    first, *lines = stream.getvalue().splitlines()
    assert first == "training: 5 updates an epoch, 2 epochs at most"
    assert lines[0] == "epoch 1/2, 1 of 5 updates"
    assert len(lines) == 12
    assert re.fullmatch(r"epoch 2/2, 5 of 5 updates: validation loss [\d.]+, validation perplexity [\d.]+", lines[-1])


def test_lines_are_few(capsys, tmp_path: Path):
    write_text(tmp_path)
    train(experiment(tmp_path, max_epochs=2), tmp_path / "run", verbose=True)
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "training: 7 updates an epoch, 2 epochs at most"
    assert [line.split(":")[0] for line in lines if "validation" in line] == [
        "epoch 1/2, 7 of 7 updates",
        "epoch 2/2, 7 of 7 updates",
    ]
    train(experiment(tmp_path, max_epochs=3), tmp_path / "run", verbose=True)
    assert capsys.readouterr().out.startswith("resuming after update 14, in epoch 3 of 3\n")
    train(experiment(tmp_path, max_epochs=3), tmp_path / "run", verbose=True)
    assert capsys.readouterr().out == (
        "this training has ended already, after 21 updates; it goes on with larger training.max_epochs, "
        "training.max_updates or training.patience\n"
    )


def test_the_library_prints_nothing_unless_it_is_told_to(capsys, tmp_path: Path):
    write_text(tmp_path)
    train(experiment(tmp_path, max_epochs=1), tmp_path / "run")
    assert capsys.readouterr() == ("", "")
