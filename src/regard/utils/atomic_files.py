"""Files that are either the old one or the new one, never half of each."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..errors import CheckpointError


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A temporary path beside `path` to write to; it takes the place of `path` once the block has ended well.

    The block finds an empty file at the temporary path and fills or replaces it, by whatever means it likes. When the
    block ends, the file is forced to the disk and renamed, so that whoever opens `path`, even after a power cut, finds
    the old content or the new one. When the block raises, or is interrupted, the temporary file is removed and `path`
    stays as it was. Only a process that is killed leaves one behind, as `.NAME.xxxxxxxx.partial`.

    Raises:
        CheckpointError: the file cannot be written: the disk is full, the folder is missing or closed to us.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "greeting.txt") as partial:
    ...         _ = partial.write_text("hello")
    ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
    [('greeting.txt', 'hello')]
    """
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors makes files that only their owner can read
        _force_to_disk(partial)
        os.replace(partial, path)
        _force_folder_to_disk(path.parent)
    except Exception as error:
        if not _is_failed_write(error):
            raise
        partial.unlink(missing_ok=True)  # before the free space is looked up
        raise CheckpointError(_explain(path, error)) from error
    finally:
        partial.unlink(missing_ok=True)


def _force_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _force_folder_to_disk(folder: Path) -> None:
    """Make the renaming itself last; only POSIX systems let a folder be opened for that."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _is_failed_write(error: Exception) -> bool:
    # Writers in Rust, such as safetensors, put the system's error as text into exceptions of their own.
    return isinstance(error, OSError) or "(os error " in str(error)


def _explain(path: Path, error: Exception) -> str:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    folder = path.parent
    if not folder.is_dir():
        return f"cannot write {path}: the folder {folder} does not exist; make it first"
    free = shutil.disk_usage(folder).free
    return (
        f"cannot write {path}: {reason}; {free / 1e6:,.1f} MB are free in {folder}. "
        "What the file held before is untouched; make room or choose another folder"
    )
