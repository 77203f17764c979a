"""The page of `regard doctor --html`: findings in source code, with the code, the rule and the rewrite."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from regard_doctor.diagnosis import EVERYTHING, UNREADABLE, RuleSelection, reported
from regard_doctor.doctor_error import DoctorError
from regard_doctor.finding import CodeFinding
from regard_doctor.fixing import chosen_rewrites
from regard_doctor.notebook_source import SUFFIX, notebook_source
from regard_doctor.python_source import UnreadableSource, decoded, parsed, read_bytes
from regard_doctor.rewriting import rewritten

from .code_excerpt import CodeRange, changed_blocks, diff, escaped, excerpt, source_lines
from .findings_page import PageFinding, findings_page, page_rule

if TYPE_CHECKING:
    from ..explorer.static_page import StaticPage

Block = tuple[int, int, int, int]


def diagnosis_page(
    findings: Sequence[CodeFinding],
    *,
    sources: Mapping[str, str] | None = None,
    scope: str = "",
    to: str = "sdpa",
    selection: RuleSelection = EVERYTHING,
    documentation: str = "",
) -> StaticPage:
    r"""A self-contained HTML page of findings in source code; `.save(path)` writes it.

    Each finding has the lines around it, the explanation of its rule with a wrong and a right example, and the diff of
    what `regard doctor --fix` writes, where there is a rewrite. The page works without a network, from a file.

    Args:
        findings: of `diagnose` or `diagnose_files`.
        sources: the texts of files by path; others are read from their paths.
        scope: what was examined, in words; by default the number of files with findings.
        to: what rewrites call, as of `fixed_source`.
        selection: the one that the findings were made with; rewrites of other findings are not displayed.
        documentation: the address of the folder of the documentation, which rules link to; without one they name the
            file and the place in it.

    >>> from regard.doctor import diagnose
    >>> source = "def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v"
    >>> page = diagnosis_page(diagnose(source), sources={"<source>": source})
    >>> page.contents, "softmax over axis -2" in page.text
    ('1 error in 1 file', True)
    """
    texts = dict(sources or {})
    by_path: dict[str, list[CodeFinding]] = {}
    for finding in findings:
        by_path.setdefault(finding.path, []).append(finding)
    entries: list[PageFinding] = []
    for path, found in by_path.items():
        text = texts[path] if path in texts else _read(path)
        entries += _entries(found, text, to, selection)
    files = "1 file" if len(by_path) == 1 else f"{len(by_path):,} files"
    rules = [page_rule(code, documentation) for code in sorted({finding.code for finding in findings})]
    return findings_page("regard doctor", entries, rules, scope=scope or files)


def _read(path: str) -> str | None:
    """The text of a file; None where it cannot be read as such."""
    try:
        return decoded(read_bytes(Path(path)))
    except UnreadableSource:
        return None


def _entries(found: Sequence[CodeFinding], text: str | None, to: str, selection: RuleSelection) -> list[PageFinding]:
    lines = [] if text is None else source_lines(text)
    cells = _cells(text) if text is not None and found[0].path.endswith(SUFFIX) else {}
    is_fixable = any(finding.fixable for finding in found)
    fixes = _Fixes.of(text, found[0].path, to, selection) if is_fixable and text is not None else _Fixes()
    entries = []
    for finding in found:
        place = CodeRange(finding.line, finding.column, finding.end_line, finding.end_column)
        parts = () if finding.code == UNREADABLE else (excerpt(cells.get(finding.cell, lines), place),)
        if finding.fixable:
            parts = (*parts, fixes.part(finding))
        where = f"line {finding.line}, column {finding.column}"
        where = where if finding.cell is None else f"cell {finding.cell}, {where}"
        entries.append(PageFinding(finding.code, "", finding.message, finding.severity, finding.path, where, parts))
    return entries


def _cells(text: str) -> Mapping[int | None, Sequence[str]]:
    """The lines of the cells of a notebook, by their numbers; none where it is none."""
    try:
        return {number: source_lines("\n".join(cell)) for number, cell in notebook_source(text).cells.items()}
    except UnreadableSource:
        return {}


@dataclass(frozen=True, slots=True)
class _Fixes:
    """The source before and after all rewrites, its differing blocks, and the lines that edits of findings are on."""

    before: Sequence[str] = ()
    after: Sequence[str] = ()
    blocks: Sequence[Block] = ()
    edited: Mapping[tuple[str, int, int], Sequence[tuple[int, int]]] = field(default_factory=dict)
    missing: str = ""

    @classmethod
    def of(cls, text: str, path: str, to: str, selection: RuleSelection) -> _Fixes:
        """The rewrites of one file, all carried out at once, as `regard doctor --fix` does."""
        found = [(one, report.rewrite) for one, report in reported(text, path=path, selection=selection) if report]
        rewrites = {(one.code, one.line, one.column): rewrite for one, rewrite in found if rewrite}
        try:
            result, _ = rewritten(text, chosen_rewrites(rewrites.values(), to))
            parsed(result)
        except DoctorError as error:
            return cls(missing=str(error))
        except UnreadableSource:
            return cls()
        before, after = source_lines(text), source_lines(result)
        edited = {key: rewrite.lines() for key, rewrite in rewrites.items()}
        return cls(before, after, changed_blocks(before, after), edited)

    def part(self, finding: CodeFinding) -> str:
        """The diff of one finding: the blocks on the lines of its edits, and those of no finding, which are imports."""
        if self.missing:
            return f'<p class="muted">regard doctor --fix rewrites this; to see how, {escaped(self.missing)}.</p>'
        own = self.edited.get((finding.code, finding.line, finding.column), ())
        anyones = [span for spans in self.edited.values() for span in spans]
        blocks = [b for b in self.blocks if _touches(b, own) or not _touches(b, anyones)]
        if not any(_touches(block, own) for block in blocks):
            return ""
        return (
            '<details class="more" open><summary>What regard doctor --fix writes</summary>'
            f"{diff(self.before, self.after, blocks)}</details>"
        )


def _touches(block: Block, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a block of `before` has one of the lines; an insertion, the line before or behind it."""
    first, last = block[0] + 1, block[1]
    if first > last:
        first, last = last, first
    return any(start <= last and first <= end for start, end in spans)
