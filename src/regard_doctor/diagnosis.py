"""Diagnosis of files: reads them, evaluates them, applies the rules, in several processes where that is worth it."""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

from .attention_sites import attention_sites
from .doctor_error import nearest
from .finding import CodeFinding, Severity
from .notebook_source import SUFFIX, NotebookSource, notebook_source
from .python_source import (
    Suppressions,
    UnreadableSource,
    decoded,
    is_test,
    mentions_attention,
    other_framework,
    parsed,
    read_bytes,
    suppressions,
)
from .rules import RULES, AttentionRule, Report, certain, is_on_purpose
from .symbolic_evaluation import evaluate

UNREADABLE = "ATT000"
"""The code of a file that cannot be read or does not parse."""
_WORTH_PROCESSES = 64
"""Files from which on several processes are used."""
_CHUNK = 8


@dataclass(frozen=True, slots=True)
class RuleSelection:
    """Which findings are wanted: codes by their prefixes, the least severity, codes ignored by patterns of paths."""

    select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()
    least: Severity = Severity.HINT
    per_file: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def wants(self, code: str, severity: Severity) -> bool:
        """Whether findings of that code and severity are wanted; files that cannot be read always are reported."""
        if code == UNREADABLE:
            return True
        chosen = not self.select or code.startswith(self.select)
        return chosen and not code.startswith(self.ignore or ("\0",)) and severity.rank <= self.least.rank

    def within(self, path: str) -> RuleSelection:
        """The selection for one file: what its path ignores is ignored."""
        ignored = [code for pattern, codes in self.per_file if fnmatch(path, f"*{pattern}") for code in codes]
        return replace(self, ignore=(*self.ignore, *ignored), per_file=()) if ignored else self


EVERYTHING = RuleSelection()


def diagnose(source: str, *, path: str = "<source>", selection: RuleSelection = EVERYTHING) -> list[CodeFinding]:
    r"""The findings in the source of one module, sorted by place.

    >>> source = "def f(q, k, v):\n    return (q @ k.mT / 8).softmax(-2) @ v"
    >>> print(*diagnose(source, selection=RuleSelection(least=Severity.ERROR)))
    <source>:2:12: ATT111 softmax over axis -2, but the product with the values sums over axis -1: the weights of a
    query do not sum to 1; use dim=-1
    """
    return [finding for finding, _ in reported(source, path=path, selection=selection)]


def reported(
    source: str, *, path: str = "<source>", selection: RuleSelection = EVERYTHING
) -> list[tuple[CodeFinding, Report | None]]:
    """As `diagnose`, each finding with the report of its rule, which has the rewrite."""
    selection = selection.within(Path(path).as_posix())
    try:
        found = _reports(source, path, selection)
    except UnreadableSource as error:
        return [(_unreadable(path, error), None)]
    except RecursionError:
        error = UnreadableSource("has expressions that are nested too deeply to be evaluated; exclude it")
        return [(_unreadable(path, error), None)]
    return _without_rewrites_of_errors(sorted(found, key=lambda one: one[0]))


def _unknown_codes(path: str, suppressed: Suppressions) -> Iterator[CodeFinding]:
    """An error for each comment that ignores a code which no rule has: it would never ignore anything."""
    named = [(line, code) for line, codes in suppressed.lines.items() for code in sorted(codes or ())]
    for line, code in [*named, *((1, code) for code in sorted(suppressed.everywhere or ()))]:
        if code not in RULES and code != UNREADABLE:
            message = f"a comment ignores the unknown code {code!r}; {nearest(code, RULES).partition(' Known')[0]}"
            yield CodeFinding(path, line, 1, UNREADABLE, message, Severity.ERROR, line, 1)


def _reports(source: str, path: str, selection: RuleSelection) -> list[tuple[CodeFinding, Report | None]]:
    """The findings of all rules, each at one place once, without those that comments suppress, or call intended."""
    facts = evaluate(source, parsed(source))
    facts.sites = attention_sites(facts)
    facts.path = path
    facts.is_test = is_test(path, facts.imports.values())
    lines, suppressed = source.splitlines(), suppressions(source)
    found: dict[tuple[str, int, int], tuple[CodeFinding, Report | None]] = {
        (one.message, one.line, one.column): (one, None) for one in _unknown_codes(path, suppressed)
    }
    for rule in RULES.values():
        if not selection.wants(rule.code, rule.severity) or (facts.framework and not rule.reads_arrays):
            continue
        for report in rule.check(facts):
            report = certain(rule, report, facts)
            finding = _finding(path, lines, rule, report)
            if not selection.wants(finding.code, finding.severity):
                continue
            is_suppressed = suppressed.covers(finding.code, finding.line, finding.end_line)
            if not is_suppressed and not is_on_purpose(report.node, facts):
                found.setdefault((finding.code, finding.line, finding.column), (finding, report))
    return list(found.values())


def _without_rewrites_of_errors(
    found: list[tuple[CodeFinding, Report | None]],
) -> list[tuple[CodeFinding, Report | None]]:
    """The findings; hints and warnings offer no rewrite that edits a line with an error.

    It would compute the same, and no rule would find the error in it again.
    """
    errors = [(one.line, one.end_line) for one, _ in found if one.severity is Severity.ERROR]
    kept: list[tuple[CodeFinding, Report | None]] = []
    for finding, report in found:
        rewrite = report.rewrite if report is not None and finding.severity is not Severity.ERROR else None
        spans = rewrite.lines() if rewrite is not None else ()
        if report is not None and any(start <= last and one <= end for start, end in spans for one, last in errors):
            finding, report = replace(finding, fixable=False), replace(report, rewrite=None)
        kept.append((finding, report))
    return kept


def _finding(path: str, lines: Sequence[str], rule: AttentionRule, report: Report) -> CodeFinding:
    node, severity = report.node, Severity.HINT if report.unless else rule.severity
    message = f"{report.message}, unless {report.unless}" if report.unless else report.message
    line = getattr(node, "lineno", 1)
    end_line, fixable = getattr(node, "end_lineno", None) or line, report.rewrite is not None
    start = _characters(lines, line, getattr(node, "col_offset", 0)) + 1
    end = _characters(lines, end_line, getattr(node, "end_col_offset", None) or 0) + 1
    return CodeFinding(path, line, start, rule.code, message, severity, end_line, end, fixable)


def _characters(lines: Sequence[str], line: int, offset: int) -> int:
    """A column in characters from one in bytes of UTF-8."""
    text = lines[line - 1] if line <= len(lines) else ""
    return offset if text.isascii() else len(text.encode()[:offset].decode(errors="ignore"))


def _unreadable(path: str, error: UnreadableSource, what: str = "file") -> CodeFinding:
    severity = Severity.HINT if error.is_other else Severity.ERROR
    return CodeFinding(path, 1, 1, UNREADABLE, f"the {what} {error}", severity, 1, 1)


def diagnose_file(path: Path, selection: RuleSelection = EVERYTHING) -> list[CodeFinding]:
    """The findings in one file; one of the code ATT000 where it cannot be read."""
    return _surveyed(path, selection)[0]


def _surveyed(path: Path, selection: RuleSelection) -> tuple[list[CodeFinding], str]:
    """The findings in one file, and the framework that it is written for if no rule reads that."""
    try:
        content = read_bytes(path)
        unread = other_framework(content)
        if not mentions_attention(content):
            if not selection.select or UNREADABLE in selection.select:
                decoded(content)
            return [], unread
        text = decoded(content)
        if path.suffix == SUFFIX:
            return _in_notebook(notebook_source(text), str(path), selection), unread
    except UnreadableSource as error:
        return [_unreadable(str(path), error)], ""
    return diagnose(text, path=str(path), selection=selection), unread


def _in_notebook(notebook: NotebookSource, path: str, selection: RuleSelection) -> list[CodeFinding]:
    """The findings of all cells; no rewrites, as a cell is no file."""
    broken = [replace(_unreadable(path, error, "cell"), cell=cell) for cell, error in notebook.broken.items()]
    found = diagnose(notebook.module, path=path, selection=selection)
    placed = [replace(notebook.placed(finding), fixable=False) for finding in found]
    return sorted([*broken, *placed], key=lambda one: (one.cell or 0, one.line, one.column, one.code))


def _cores() -> int:
    """Cores that this process may use, as far as the system says so."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def diagnose_files(
    paths: Iterable[Path], selection: RuleSelection = EVERYTHING, jobs: int | None = None
) -> list[CodeFinding]:
    """The findings in many files, in the order of the paths; in `jobs` processes, by default one for each core."""
    return survey(paths, selection, jobs)[0]


def survey(
    paths: Iterable[Path], selection: RuleSelection = EVERYTHING, jobs: int | None = None
) -> tuple[list[CodeFinding], dict[str, int]]:
    """As `diagnose_files`, and how many files with attention are of each framework that no rule reads."""
    files = list(paths)
    jobs = jobs or _cores()
    work = partial(_surveyed, selection=selection)
    if jobs == 1 or len(files) < _WORTH_PROCESSES:
        found = [work(path) for path in files]
    else:
        # A forked process has the rules loaded already; where forking is unsafe, a new process loads them.
        context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        with ProcessPoolExecutor(jobs, mp_context=context) as pool:
            found = list(pool.map(work, files, chunksize=_CHUNK))
    return [one for findings, _ in found for one in findings], Counter(name for _, name in found if name)
