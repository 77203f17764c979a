"""Figures that cannot be saved: other formats, missing folders, read-only file systems, interruptions."""

import errno
import os
from pathlib import Path
from unittest.mock import Mock

import pytest
from matplotlib.figure import Figure

from regard.errors import CheckpointError, ConfigurationError
from regard.plots import save


def test_files_that_cannot_be(tmp_path):
    with pytest.raises(ConfigurationError, match="ends in '.jpeg'; a figure is written as .png, .svg or .pdf"):
        save(Figure(), tmp_path / "figure.jpeg")
    with pytest.raises(ConfigurationError, match="dpi is 0; it needs to be above 0, such as 300 for print"):
        save(Figure(), tmp_path / "figure.png", dpi=0)
    with pytest.raises(CheckpointError, match="the folder .*nowhere does not exist; make it first"):
        save(Figure(), tmp_path / "nowhere" / "figure.png")


@pytest.mark.parametrize("ending", ["png", "svg", "pdf"])
def test_a_read_only_file_system_is_named(tmp_path, monkeypatch, ending):
    """Where the file cannot even be made, and where the system turns read-only while it is written."""
    refusal = OSError(errno.EROFS, os.strerror(errno.EROFS))
    path = tmp_path / f"figure.{ending}"
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", Mock(side_effect=refusal))
        patched.setattr(Path, "unlink", Mock(side_effect=refusal))
        with pytest.raises(CheckpointError, match=rf"cannot write .*figure\.{ending}: Read-only file system"):
            save(Figure(), path)
    figure = Figure()
    monkeypatch.setattr(figure, "savefig", Mock(side_effect=refusal))
    with pytest.raises(CheckpointError, match=rf"cannot write .*figure\.{ending}: Read-only file system"):
        save(figure, path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_figure(tmp_path, monkeypatch):
    figure, path = Figure(), tmp_path / "figure.png"
    save(figure, path, dpi=10)
    before = path.read_bytes()
    monkeypatch.setattr(figure, "savefig", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        save(figure, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
