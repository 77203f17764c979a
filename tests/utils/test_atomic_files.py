import errno
import os
import subprocess
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


@pytest.mark.parametrize("failing", ["open", "replace"])
def test_a_read_only_file_system_is_named_though_nothing_can_be_cleaned_up(tmp_path, monkeypatch, failing):
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, failing, refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with (
        pytest.raises(CheckpointError, match=r"cannot write .*state: Read-only file system; what the file held before"),
        atomic_write(tmp_path / "state") as partial,
    ):
        partial.write_text("new")


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o755])
def test_permissions_of_a_file_that_is_replaced_stay(tmp_path, mode):
    path = tmp_path / "weights"
    path.touch()
    path.chmod(mode)
    with atomic_write(path) as partial:
        assert partial.stat().st_mode & 0o777 == mode
        save_file({"a": torch.zeros(7)}, partial)
    assert path.stat().st_mode & 0o777 == mode


def test_a_symbolic_link_stays_and_its_file_is_replaced(tmp_path):
    (tmp_path / "store").mkdir()
    target, link = tmp_path / "store" / "weights", tmp_path / "link"
    target.write_text("old")
    link.symlink_to("store/weights")
    with atomic_write(link) as partial:
        partial.write_text("new")
        assert partial.parent == target.parent
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert names(tmp_path) == ["link", "store"]


def test_a_link_to_a_file_that_is_not_there_makes_it(tmp_path):
    (tmp_path / "link").symlink_to("target")
    with atomic_write(tmp_path / "link") as partial:
        partial.write_text("new")
    assert (tmp_path / "target").read_text() == "new"


def test_what_killed_processes_left_is_removed_and_what_others_write_is_not(tmp_path, warm_python):
    killed = (
        "import os, signal, sys; from regard.utils.atomic_files import atomic_write\n"
        "with atomic_write(sys.argv[1]): os.kill(os.getpid(), signal.SIGKILL)"
    )
    for name in ("state", "weights"):
        subprocess.run([*warm_python, "-c", killed, str(tmp_path / name)], check=False)
    assert len(names(tmp_path)) == 1  # the second one removed what the first one left
    (tmp_path / ".mine.partial").touch()
    with atomic_write(tmp_path / "other") as other:
        assert set(names(tmp_path)) == {".mine.partial", other.name}
        with atomic_write(tmp_path / "state") as partial:
            partial.touch()
        assert other.exists()
    assert names(tmp_path) == [".mine.partial", "other", "state"]


def test_a_long_name_is_written(tmp_path):
    path = tmp_path / ("n" * 250)
    with atomic_write(path) as partial:
        partial.write_text("new")
    assert path.read_text() == "new"


@pytest.mark.parametrize(
    ("name", "reason"), [("n" * 256, "File name too long"), ("a\0b", "null"), ("n" * 5000, "too long")]
)
def test_an_impossible_name_is_refused(tmp_path, name, reason):
    with pytest.raises(CheckpointError, match=rf"cannot write .*{reason}.*; choose another name"):
        write_half_and_raise(tmp_path / name, AssertionError("the block must not run"))


def test_a_device_and_a_folder_are_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in (
        (tmp_path / "pipe", "not a regular file"),
        (tmp_path, "a folder"),
        (Path("/dev/null"), "not a reg"),
    ):
        with pytest.raises(CheckpointError, match=f"cannot write .*: it is {kind}"):
            write_half_and_raise(path, AssertionError("the block must not run"))
