"""Fixes of files: rewrites what the findings offer, and replaces each file as a whole."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import ConfigurationError
from ..utils.atomic_files import atomic_write
from .diagnosis import EVERYTHING, RuleSelection, reported
from .python_source import UnreadableSource, decoded, encoded, mentions_attention, parsed, read_bytes
from .rewriting import Rewrite, rewritten


@dataclass(frozen=True, slots=True)
class FixedFile:
    """A file that was rewritten, and how many findings that mended."""

    path: Path
    fixes: int


def fixed_source(source: str, *, to: str = "sdpa", selection: RuleSelection = EVERYTHING) -> tuple[str, int]:
    """The source after all rewrites that its findings offer, and their number.

    `to` is "sdpa", torch's `scaled_dot_product_attention`, or "regard", `regard.attention`. Code that a rewrite would
    make unparsable is left as it is.

    Raises:
        MissingExtra: LibCST is not installed.
    """
    found = [report.rewrite for _, report in reported(source, selection=selection) if report and report.rewrite]
    if not found:
        return source, 0
    result, done = rewritten(source, chosen_rewrites(found, to))
    try:
        parsed(result)
    except UnreadableSource:
        return source, 0
    return result, done


def chosen_rewrites(found: Iterable[Rewrite], to: str) -> list[Rewrite]:
    """The rewrites to torch's function ("sdpa") or to `regard.attention` ("regard")."""
    return [rewrite.to_regard() if to == "regard" else rewrite for rewrite in found]


def fix_files(paths: Iterable[Path], *, to: str = "sdpa", selection: RuleSelection = EVERYTHING) -> list[FixedFile]:
    """Rewrite files, each replaced as a whole; files that cannot be read are left to `diagnose_files`.

    Raises:
        CheckpointError: a file cannot be written; it is as it was.
        MissingExtra: LibCST is not installed.
    """
    changed = []
    for path in paths:
        try:
            content = read_bytes(path)
            if not mentions_attention(content):
                continue
            text = decoded(content)
            result, fixes = fixed_source(text, to=to, selection=selection.within(path.as_posix()))
            if fixes:
                with atomic_write(path) as partial:
                    partial.write_bytes(encoded(result, content))
                changed.append(FixedFile(path, fixes))
        except UnreadableSource:
            continue
    return changed


def check_clean(paths: Sequence[Path]) -> None:
    """Refuse paths in a git repository that have changes which are not committed.

    Raises:
        ConfigurationError: there are such changes; a rewrite could not be told from them, nor undone.
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
            raise ConfigurationError(
                f"the git repository of {str(path)!r} has changes that are not committed ({first}); "
                "commit or stash them, or pass --allow-dirty"
            )
