"""Discovery of Python files and notebooks in folders, each once, symbolic links in a circle included."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from pathlib import Path

from .doctor_error import DoctorError

SKIPPED_FOLDERS = frozenset(
    (
        *(".git", ".hg", ".svn", ".venv", "venv", ".tox", ".nox", ".eggs", "__pycache__", "node_modules"),
        *(".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", ".ipynb_checkpoints"),
        *("build", "dist", "site-packages"),
    )
)
"""Folders that are not entered, unless they are named."""

ENDINGS = (".py", ".pyi", ".ipynb")


def python_files(paths: Iterable[Path], exclude: Iterable[str] = ()) -> list[Path]:
    """The Python files and notebooks of the paths, sorted within each folder; what is named counts whatever its ending.

    Files that begin with `._` are none: macOS keeps what is no content of a file in them.

    `exclude` are patterns as of `fnmatch`, for names, and for paths or their ends. Symbolic links to files are
    followed; a folder is entered once, by whatever path it is reached first.

    Raises:
        DoctorError: a path does not exist.
    """
    patterns, files = list(exclude), {}
    for path in paths:
        if not path.exists():
            raise DoctorError(f"there is no file or folder {str(path)!r}; name one that exists")
        for one in [path] if path.is_file() else _files_below(path, patterns):
            files.setdefault(os.path.realpath(one), one)
    return list(files.values())


def _files_below(folder: Path, patterns: list[str]) -> Iterator[Path]:
    entered: set[str] = set()
    for root, folders, names in os.walk(folder, followlinks=True):
        real = os.path.realpath(root)
        if real in entered:
            folders.clear()
            continue
        entered.add(real)
        known = (name for name in folders if name not in SKIPPED_FOLDERS)
        folders[:] = sorted(name for name in known if not _excluded(Path(root) / name, folder, patterns))
        read = (name for name in sorted(names) if name.endswith(ENDINGS) and not name.startswith("._"))
        yield from (path for name in read if not _excluded(path := Path(root) / name, folder, patterns))


def _excluded(path: Path, folder: Path, patterns: list[str]) -> bool:
    relative = path.relative_to(folder).as_posix()
    return any(
        fnmatch(path.name, pattern) or fnmatch(relative, pattern) or fnmatch(f"/{path.as_posix()}", f"*/{pattern}")
        for pattern in patterns
    )
