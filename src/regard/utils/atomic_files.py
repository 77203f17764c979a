"""Files that are replaced atomically: a reader finds the old content or the new one, never a part."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import re
import secrets
import shutil
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ..errors import CheckpointError

_NAME_IN_PARTIAL = 40
"""Characters of the file's name in that of its temporary file, so that it fits where the name itself does."""
_PARTIAL = re.compile(r"\..+\.(?P<machine>[0-9a-f]{8})-(?P<process>[0-9]+)-[0-9a-f]{4}\.partial", re.DOTALL)
_LONGEST_SHOWN = 300
_NO_MATTER_OF_SPACE = (errno.EROFS, errno.ENAMETOOLONG, errno.EACCES, errno.EPERM)


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Replace a file atomically: the block writes to the temporary path that it gets, which is then renamed to `path`.

    The block finds an empty file at the temporary path and fills or replaces it, by whatever means it likes. When the
    block ends, the file is forced to the disk and renamed, so that whoever opens `path`, even after a power cut, finds
    the old content or the new one. When the block raises, or is interrupted, the temporary file is removed and `path`
    stays as it was. Only a process that is killed leaves its temporary file, `.NAME.xxxxxxxx-PID-xxxx.partial`, behind;
    the next write into the folder, on the same machine, removes it.

    The permissions of a file that is replaced stay; a new file has those of the umask. Where `path` is a symbolic link,
    the file that it points to is replaced, and the link stays.

    Raises:
        CheckpointError: the file cannot be written: the disk is full or read-only, the folder is missing or not
            writable, the name is too long, or there is something at `path` that is not a file.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with atomic_write(Path(folder) / "greeting.txt") as partial:
    ...         _ = partial.write_text("hello")
    ...     [(file.name, file.read_text()) for file in Path(folder).iterdir()]
    [('greeting.txt', 'hello')]
    """
    path = _without_links(Path(path))
    partial = path.with_name(
        f".{path.name[:_NAME_IN_PARTIAL]}.{_machine()}-{os.getpid()}-{secrets.token_hex(2)}.partial"
    )
    try:
        mode = _create(partial, path)
        _remove_abandoned(path.parent)
        yield partial
        partial.chmod(mode | stat.S_IWUSR)  # safetensors makes files that only their owner can read
        _force_to_disk(partial)
        partial.chmod(mode)
        os.replace(partial, path)
        _force_folder_to_disk(path.parent)
    except Exception as error:
        if not _is_failed_write(error):
            raise
        _remove(partial)  # before the free space is measured
        raise CheckpointError(_explain(path, error)) from error
    finally:
        _remove(partial)


def _without_links(path: Path) -> Path:
    """The file that a path leads to, behind symbolic links.

    Raises:
        CheckpointError: the path is not one that a file system can have, or is that of a device, pipe or folder.
    """
    if "\0" in str(path):
        raise CheckpointError(f"cannot write {str(path)!r}: there is a null character in the name; choose another name")
    try:
        target = path.resolve() if path.is_symlink() else path
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "not a regular file, and files are replaced as a whole"
            raise CheckpointError(f"cannot write {path}: it is {kind}; choose another name")
    except (OSError, RuntimeError) as error:  # too long; a link to itself
        reason = error.strerror if isinstance(error, OSError) else error
        shown = repr(str(path)) if len(str(path)) < _LONGEST_SHOWN else f"{str(path)[:_LONGEST_SHOWN]!r}..."
        raise CheckpointError(f"cannot write {shown}: {reason}; choose another name") from None
    return target


def _create(partial: Path, path: Path) -> int:
    """Create an empty temporary file, and return the mode of the finished file."""
    os.close(os.open(partial, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    if not path.exists():
        return stat.S_IMODE(partial.stat().st_mode)
    mode = stat.S_IMODE(path.stat().st_mode)
    # What only its owner may read is not open to others while it is written; its owner has to write it.
    partial.chmod(mode | stat.S_IWUSR)
    return mode


@functools.cache
def _machine() -> str:
    """Eight hexadecimal digits that identify this machine and the container that numbers its processes."""
    try:
        numbering = os.stat("/proc/self/ns/pid").st_ino
    except OSError:  # a system without namespaces
        numbering = 0
    return hashlib.blake2b(f"{socket.gethostname()} {numbering}".encode(), digest_size=4).hexdigest()


def _remove_abandoned(folder: Path) -> None:
    """Remove the temporary files of processes of this machine that no longer run."""
    for name in os.listdir(folder):
        found = _PARTIAL.fullmatch(name)
        if found and found["machine"] == _machine() and not _runs(int(found["process"])):
            _remove(folder / name)


def _runs(process: int) -> bool:
    if os.name != "posix":
        return True  # signal 0 would end the process elsewhere
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # it runs, and belongs to another user
    return True


def _remove(path: Path) -> None:
    """Remove a file if possible: a failure to clean up must not hide the earlier error."""
    with suppress(OSError):
        path.unlink(missing_ok=True)


def _force_to_disk(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _force_folder_to_disk(folder: Path) -> None:
    """Force the rename to the disk; only POSIX systems let a folder be opened for that."""
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
    if isinstance(error, OSError) and error.errno in _NO_MATTER_OF_SPACE:
        return f"cannot write {path}: {reason}; what the file held before is untouched; choose another name or folder"
    free = shutil.disk_usage(folder).free
    return (
        f"cannot write {path}: {reason}; {free / 1e6:,.1f} MB are free in {folder}. "
        "What the file held before is untouched; make room or choose another folder"
    )
