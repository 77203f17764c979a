"""The page of findings as one HTML file: filters, files, each finding with its code, and all rules."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from regard_doctor.code_explanation import explanation, page_address
from regard_doctor.finding import Severity

from .code_excerpt import escaped, example

if TYPE_CHECKING:
    from ..explorer.static_page import StaticPage

PLURALS = {Severity.ERROR: "errors", Severity.WARNING: "warnings", Severity.HINT: "hints"}


@dataclass(frozen=True, slots=True)
class PageFinding:
    """One finding as the page displays it: text, but for `parts`, which are HTML.

    file: the section that it stands in. place: where in the file. name: what kind of finding it is.
    """

    code: str
    name: str
    message: str
    severity: Severity
    file: str
    place: str
    parts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class PageRule:
    """The explanation of a code: text, but for `parts`, which are HTML."""

    code: str
    severity: Severity
    explanation: str
    parts: tuple[str, ...] = ()


def findings_page(
    title: str,
    findings: Sequence[PageFinding],
    rules: Sequence[PageRule],
    *,
    scope: str,
    opening: Sequence[str] = (),
    closing: Sequence[str] = (),
    map_page: str = "",
) -> StaticPage:
    """One self-contained page of findings, which loads nothing and runs its own script alone.

    Args:
        title: the heading.
        findings: in the order in which they are displayed.
        rules: of the codes that were found.
        scope: what was examined, in words, such as "12 files".
        opening: HTML of sections before the findings.
        closing: HTML of sections behind the rules.
        map_page: a static page of the explorer, which the maps of findings open in.
    """
    from ..explorer.static_page import StaticPage, built_file, content_policy, embedded_json

    names = ("findings", "explorer") if map_page else ("findings",)
    scripts, styles = ([built_file(f"{name}.{kind}") for name in names] for kind in ("js", "css"))
    summary = f"{counted(findings)} in {scope}"
    sections: dict[str, list[PageFinding]] = {}
    for finding in findings:
        sections.setdefault(finding.file, []).append(finding)
    main = "".join(_section(number, file, found) for number, (file, found) in enumerate(sections.items()))
    if not findings:
        main = f"<section><h2>Nothing was found</h2><p>{escaped(scope)} examined.</p></section>"
    data = f'<script type="application/json" id="regard-atlas">{embedded_json(map_page)}</script>' if map_page else ""
    main = "".join(opening) + main + _rules(rules) + "".join(closing)
    text = (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{content_policy(scripts, styles)}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<meta name="referrer" content="no-referrer">\n'
        f'<title>{escaped(title)}: {escaped(summary)}</title>\n<link rel="icon" href="data:,">\n'
        f"<style>{styles[0]}</style>\n</head>\n<body>\n"
        '<div class="regard-findings" data-theme="light">\n<a class="skip" href="#findings">Skip to the findings</a>\n'
        f'<header class="top"><h1>{escaped(title)}</h1><p class="muted">{escaped(summary)}</p></header>\n'
        f'<div class="columns">\n<aside aria-label="Filters and files">{_filters(findings)}{_tree(sections)}{_KEYS}'
        f'</aside>\n<main id="findings" tabindex="-1">\n{main}</main>\n</div>\n</div>\n'
        f'{data}\n<script type="module">{scripts[0]}</script>\n</body>\n</html>\n'
    )
    return StaticPage(text, summary)


def counted(findings: Sequence[Any]) -> str:
    """How many findings of each severity there are, in words."""
    counts = Counter(finding.severity for finding in findings)
    words = [f"{counts[one]:,} {PLURALS[one] if counts[one] > 1 else one.value}" for one in Severity if counts[one]]
    return ", ".join(words) or "nothing found"


_KEYS = (
    '<p class="keys" hidden><kbd>j</kbd> next finding, <kbd>k</kbd> the one before, <kbd>/</kbd> search, '
    "<kbd>Esc</kbd> ends it</p>"
)


def _filters(findings: Sequence[PageFinding]) -> str:
    counts = Counter(finding.severity for finding in findings)
    boxes = "".join(
        f'<label><input type="checkbox" value="{one.value}" checked> <span>{PLURALS[one]}</span>'
        f'<span class="count">{counts[one]:,}</span></label>'
        for one in Severity
        if counts[one]
    )
    return (
        f'<form class="filters" role="search" hidden><fieldset><legend>Severity</legend>{boxes}</fieldset>'
        '<label><span class="label">Search codes, messages and files</span>'
        '<input type="search" autocomplete="off" spellcheck="false"></label>'
        '<p role="status" class="muted"></p></form>'
    )


def _tree(sections: Mapping[str, Sequence[PageFinding]]) -> str:
    """The files as a tree; a folder of one folder alone stands in one line with it."""
    if not sections:
        return ""
    root: dict[str, Any] = {}  # folders by name and slash, and (section, findings) of files
    for number, (file, found) in enumerate(sections.items()):
        *folders, name = re.split(r"[/\\]", file)
        folder = root
        for part in folders:
            folder = folder.setdefault(f"{part}/", {})
        folder[name] = number, len(found)
    return f'<nav aria-label="Files">{_folder_list(root)}</nav>'


def _folder_list(folder: Mapping[str, Any]) -> str:
    folders, files = [], []
    for name, inner in folder.items():
        if isinstance(inner, tuple):
            shown = f'<span>{escaped(name)}</span><span class="count">{inner[1]:,}</span>'
            files.append(f'<li><a href="#file-{inner[0]}">{shown}</a></li>')
            continue
        while len(inner) == 1 and isinstance(next(iter(inner.values())), dict):
            ((part, inner),) = inner.items()
            name += part
        folders.append(
            f'<li class="folder"><details open><summary>{escaped(name.rstrip("/")) or "/"} '
            f'<span class="muted">{_count(inner):,}</span></summary>{_folder_list(inner)}</details></li>'
        )
    return f"<ul>{''.join((*folders, *files))}</ul>"


def _count(inner: Any) -> int:
    """How many findings are in a folder, or in a file."""
    return inner[1] if isinstance(inner, tuple) else sum(map(_count, inner.values()))


def _section(number: int, file: str, findings: Sequence[PageFinding]) -> str:
    names = _names(number, findings)
    articles = "\n".join(_article(name, finding) for name, finding in zip(names, findings, strict=True))
    return f'<section class="file" id="file-{number}">\n<h2>{escaped(file)}</h2>\n{articles}\n</section>\n'


def _names(number: int, findings: Sequence[PageFinding]) -> Iterator[str]:
    """Anchors of findings, such as "file-0-ATT111-12-5"."""
    seen: Counter[str] = Counter()
    for finding in findings:
        name = f"file-{number}-{finding.code}-{re.sub(r'[^0-9A-Za-z]+', '-', finding.place).strip('-')}"
        seen[name] += 1
        yield name if seen[name] == 1 else f"{name}-{seen[name]}"


def _article(name: str, finding: PageFinding) -> str:
    place = escaped(finding.place) or "link"
    kind = f" <span>{escaped(finding.name)}</span>" if finding.name else ""
    return (
        f'<article class="finding" id="{name}" tabindex="-1" data-severity="{finding.severity.value}">'
        f'<p class="about"><span class="severity">{finding.severity.value}</span> '
        f'<a href="#{finding.code}">{finding.code}</a> <a class="place muted" href="#{name}">{place}</a>{kind}</p>'
        f"<h3>{prose(finding.message)}</h3>{''.join(finding.parts)}"
        f'<details class="more" data-rule="{finding.code}"><summary>Why, and what is right</summary>'
        f'<p><a href="#{finding.code}">{finding.code} among the rules below</a></p></details></article>'
    )


def _rules(rules: Sequence[PageRule]) -> str:
    if not rules:
        return ""
    articles = "\n".join(
        f'<article class="rule" id="{rule.code}" data-severity="{rule.severity.value}"><h3>{rule.code}, '
        f'<span class="severity">{rule.severity.value}</span></h3><div class="rule-text">'
        f"{''.join(f'<p>{prose(part)}</p>' for part in rule.explanation.split(_PARAGRAPH))}{''.join(rule.parts)}"
        "</div></article>"
        for rule in rules
    )
    return f'<section id="rules"><h2>Rules</h2>\n{articles}\n</section>\n'


_PARAGRAPH = "\n\n"


def prose(text: str) -> str:
    """Text with code in backticks."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped(" ".join(text.split())))


def definitions(pairs: Iterable[tuple[str, Any]]) -> str:
    """A list of names and what they are, without those that are None; empty where nothing is left."""
    entries = "".join(f"<dt>{escaped(name)}</dt><dd>{escaped(str(one))}</dd>" for name, one in pairs if one is not None)
    return f'<dl class="evidence">{entries}</dl>' if entries else ""


def page_rule(code: str, documentation: str = "") -> PageRule:
    """The explanation of a code as it stands among the rules of a page: examples, source, and its documentation.

    documentation: the address of the folder of the documentation; without one the file and the place in it are named.
    """
    explained = explanation(code)
    parts = []
    if explained.wrong:
        parts.append(f"<h4>Wrong</h4>{example(explained.wrong)}<h4>Right</h4>{example(explained.right)}")
    if explained.source:
        parts.append(f"<h4>Source</h4><p>{linked(explained.source)}</p>")
    address = page_address(code, documentation)
    entry = linked(address) if documentation else f"<code>{escaped(address)}</code>"
    parts.append(f"<h4>In the documentation</h4><p>{entry}</p>")
    return PageRule(code, explained.severity, explained.text, tuple(parts))


def linked(text: str) -> str:
    """Text with its addresses as links."""
    parts = re.split(r"(https?://[^\s;,]+)", text)
    return "".join(
        f'<a href="{escaped(part)}" rel="noreferrer noopener">{escaped(part)}</a>' if number % 2 else escaped(part)
        for number, part in enumerate(parts)
    )
