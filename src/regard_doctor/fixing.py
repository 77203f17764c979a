"""Fixes of files: rewrites what the findings offer, and replaces each file as a whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .call_layout import WIDTH, line_width
from .diagnosis import EVERYTHING, RuleSelection, reported
from .doctor_error import DoctorError
from .notebook_source import SUFFIX
from .python_source import UnreadableSource, decoded, encoded, mentions_attention, parsed, read_bytes
from .rewriting import Rewrite, rewritten


@dataclass(frozen=True, slots=True)
class FixedFile:
    """A file that was rewritten, and how many findings that mended."""

    path: Path
    fixes: int


def fixed_source(
    source: str, *, to: str = "sdpa", selection: RuleSelection = EVERYTHING, width: int = WIDTH
) -> tuple[str, int]:
    """The source after all rewrites that its findings offer, and their number.

    `to` is "sdpa", torch's `scaled_dot_product_attention`, or "regard", `regard.attention`. width: columns of a line,
    beyond which a call is laid out on several. Code that a rewrite would make unparsable is left as it is.
    """
    found = [report.rewrite for _, report in reported(source, selection=selection) if report and report.rewrite]
    if not found:
        return source, 0
    result, done = rewritten(source, chosen_rewrites(found, to), width)
    try:
        parsed(result)
    except UnreadableSource:
        return source, 0
    return result, done


def chosen_rewrites(found: Iterable[Rewrite], to: str) -> list[Rewrite]:
    """The rewrites to torch's function ("sdpa") or to `regard.attention` ("regard")."""
    return [rewrite.to_regard() if to == "regard" else rewrite for rewrite in found]


def fix_files(paths: Iterable[Path], *, to: str = "sdpa", selection: RuleSelection = EVERYTHING) -> list[FixedFile]:
    """Rewrite files, each replaced as a whole, no notebooks; what cannot be read is left to `diagnose_files`.

    Raises:
        DoctorError: a file cannot be written; it is as it was.
    """
    changed = []
    for path in (path for path in paths if path.suffix != SUFFIX):
        try:
            content = read_bytes(path)
            if not mentions_attention(content):
                continue
            text = decoded(content)
            chosen = selection.within(path.as_posix())
            result, fixes = fixed_source(text, to=to, selection=chosen, width=line_width(path))
            if fixes:
                _replace(path, encoded(result, content))
                changed.append(FixedFile(path, fixes))
        except UnreadableSource:
            continue
    return changed


def _replace(path: Path, content: bytes) -> None:
    """Replace a file, or the one that a link leads to, so that a reader finds the old content or the new one.

    Raises:
        DoctorError: it cannot be written.
    """
    target = path.resolve()
    written = ""
    try:
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name[:40]}.", delete=False) as file:
            written = file.name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, written)
        os.replace(written, target)
    except OSError as error:
        raise DoctorError(
            f"cannot write {path}: {error.strerror or error}; the file is as it was; make it and its folder writable, "
            "with room for it"
        ) from None
    finally:
        if written:
            Path(written).unlink(missing_ok=True)


def check_clean(paths: Sequence[Path]) -> None:
    """Refuse paths in a git repository that have changes which are not committed.

    Raises:
        DoctorError: there are such changes; a rewrite could not be told from them, nor undone.
    """
    for path in paths:
        folder = path if path.is_dir() else path.parent
        command = ["git", "-C", str(folder), "status", "--porcelain", "--untracked-files=no", "--", "."]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return  # no git, so no repository to speak of
        if done.returncode == 0 and done.stdout.strip():
            first = done.stdout.strip().splitlines()[0].split(maxsplit=1)[-1]
            raise DoctorError(
                f"the git repository of {str(path)!r} has changes that are not committed ({first}); "
                "commit or stash them, or pass --allow-dirty"
            )
