"""The page of `regard examine --zoo --html`: the table of all classes, and the findings of each with their code."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from regard_doctor.finding import Severity

from .code_excerpt import escaped
from .examination_page import finding_entry, shown_file
from .examination_report import Evidence, ModelFinding
from .findings_page import PageFinding, definitions, findings_page, page_rule, prose
from .zoo_report import COLUMNS, COUNT_HEADS, LEGEND, ZooEntry, ZooReport

if TYPE_CHECKING:
    from ..explorer.static_page import StaticPage


def zoo_page(report: ZooReport) -> StaticPage:
    """A self-contained HTML page of what `examine_zoo` found; `.save(path)` writes it.

    First the table of docs/zoo.md, whose findings lead to the class; then each class with its findings, their evidence
    and the code of the module that is concerned; at the end the classes that were not examined. The page works without
    a network, from a file.

    >>> page = zoo_page(ZooReport((), "5.23.0", 0.0))
    >>> page.contents, "Not examined" in page.text
    ('nothing found in 0 of 0 classes of transformers 5.23.0', False)
    """
    entries = [finding for entry in report.examined for finding in _findings(entry)]
    sections = {name: number for number, name in enumerate(dict.fromkeys(entry.file for entry in entries))}
    return findings_page(
        "regard examine --zoo",
        entries,
        [page_rule(code) for code in sorted({entry.code for entry in entries})],
        scope=f"{len(report.examined)} of {len(report.entries)} classes of transformers {report.version}",
        opening=(_counts(report), _classes(report, sections)),
        closing=(_not_examined(report),),
    )


def _findings(entry: ZooEntry) -> list[PageFinding]:
    """The findings of a class as those of one file of its name."""
    found = []
    for one in entry.findings:
        finding = ModelFinding(
            one["code"], one["message"], Evidence(**one["evidence"]), Severity(one["severity"]), one["mended_by_swap"]
        )
        page_finding = finding_entry(finding, {})
        file = finding.evidence.file
        place = page_finding.place if file is None else f"{shown_file(file)}, {page_finding.place}"
        found.append(replace(page_finding, file=entry.name, place=place))
    return found


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table that scrolls by itself; cells are HTML, the first of a row is its head."""
    top = "".join(f'<th scope="col">{escaped(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th scope="row">{first}</th>{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'
        for first, *cells in rows
    )
    return (
        f'<div class="table" tabindex="0" role="region" aria-label="{escaped(heads[0])}"><table><thead><tr>{top}</tr>'
        f"</thead><tbody>{body}</tbody></table></div>"
    )


def _counts(report: ZooReport) -> str:
    table = _table(COUNT_HEADS, [[prose(cell) for cell in row] for row in report.count_rows()])
    return f'<section id="columns"><h2>What was found</h2><p class="muted">{prose(LEGEND)}</p>{table}</section>'


def _classes(report: ZooReport, sections: dict[str, int]) -> str:
    """The table of classes, in which a cell with a finding is a link to those of its class."""
    rows = [
        [escaped(name), *(_linked(cell, sections.get(name)) for cell in cells)] for name, *cells in report.class_rows()
    ]
    return f'<section id="classes"><h2>By class</h2>{_table(["class", *COLUMNS], rows)}</section>'


def _linked(cell: str, section: int | None) -> str:
    return cell if section is None or cell in ("", "–") else f'<a href="#file-{section}">{cell}</a>'


def _not_examined(report: ZooReport) -> str:
    failures = definitions(report.failures())
    return f"<section><h2>Not examined</h2>{failures}</section>" if failures else ""
