import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from regard.errors import CheckpointError
from regard.utils.atomic_files import atomic_write


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def write_half_and_raise(path: Path, error: BaseException) -> None:
    with atomic_write(path) as partial:
        partial.write_text("half")
        raise error


def test_the_new_file_takes_the_old_one_s_place(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    with atomic_write(str(path)) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
        assert partial.parent == tmp_path
    assert path.read_text() == "new"
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_interruption_leaves_the_old_file_and_nothing_else(tmp_path, error):
    path = tmp_path / "state"
    path.write_text("old")
    with pytest.raises(error):
        write_half_and_raise(path, error())
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state"]


def test_a_full_disk_names_the_file_and_the_free_space(tmp_path):
    path = tmp_path / "state"
    path.write_text("old")
    pattern = r"cannot write .*state: No space left on device; [\d.,]+ MB are free in .*untouched; make room or choose"
    with pytest.raises(CheckpointError, match=pattern):
        write_half_and_raise(path, OSError(errno.ENOSPC, "No space left on device"))
    assert path.read_text() == "old"
    assert names(tmp_path) == ["state"]


def test_a_failure_is_understood_from_a_writer_in_rust(tmp_path):
    # safetensors does not raise an OSError; a folder in its way is a failure that needs no full disk
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*weights: .*\(os error \d+\)"),
        atomic_write(tmp_path / "weights") as partial,
    ):
        save_file({"a": torch.zeros(7)}, partial / "no-such-folder")
    assert names(tmp_path) == []


def test_who_may_read_the_file_is_up_to_the_user_s_umask(tmp_path):
    with atomic_write(tmp_path / "weights") as partial:
        save_file({"a": torch.zeros(7)}, partial)
    (tmp_path / "plain").touch()
    assert (tmp_path / "weights").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_two_writers_do_not_share_their_temporary_file(tmp_path):
    path = tmp_path / "state"
    with atomic_write(path) as first, atomic_write(path) as second:
        assert first != second
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"  # the outer block ends last
    assert names(tmp_path) == ["state"]


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"cannot write .*the folder .*absent does not exist; make it first"):
        write_half_and_raise(tmp_path / "absent" / "state", AssertionError("the block must not run"))
