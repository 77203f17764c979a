"""Tables of steps that an example prints become tables of HTML, in a Korean page with Korean titles.

As text they would stand right only in a font whose Hangul takes two columns. The example keeps its code and whatever
else it prints; the pages in both languages are the same to those who run them.
"""

import doctest
import html
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from regard.steps import EXAMPLES
from regard.steps.wording import BY_HAND, STEPS, SUM, Wording

BLOCK = re.compile(r"^```python\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
GAP = re.compile(r"\s{2,}")
PREFIXES = [Wording("Head {}: ", "헤드 {}: "), Wording("Exact: ", "정확한 어텐션: ")]
TITLES = {
    *(said.title for said in STEPS.values()),
    Wording("Sums of {} and each key", "{}: 각 키와의 합"),
    Wording("Matrix of the score: {}", "점수 함수의 행렬: {}"),
    Wording("Hop 0, own keys: {}", "0단계, 자기 키: {}"),
    Wording("Hop 1, keys of process 0: {}", "1단계, 프로세스 0의 키: {}"),
    *(example.title for example in EXAMPLES.values()),
}


class PrintedTable(NamedTuple):
    """A table as `print` writes it: title, formula, column names, rows of a name and numbers, and the line by hand."""

    title: str
    formula: str
    columns: list[str]
    rows: list[list[str]]
    example: str


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Replace the tables that the examples of a page print."""
    language = "ko" if page.file.src_uri.endswith(".ko.md") else "en"
    return BLOCK.sub(lambda match: _shown(match.group(1), language), markdown)


def _shown(code: str, language: str) -> str:
    """A block of examples, cut behind each that prints tables, which follow as HTML."""
    parts, lines = [], []
    for piece in doctest.DocTestParser().parse(code):
        if not isinstance(piece, doctest.Example):
            lines += [piece] if piece.strip() else []
            continue
        lines.append(_source(piece.source))
        tables = printed_tables(piece.want)
        if not tables:
            lines.append(piece.want)
            continue
        parts += [_fenced(lines), *(table_html(table, language) for table in tables)]
        lines = []
    if not parts:
        return f"```python\n{code}```"
    return "\n\n".join([*parts, *([_fenced(lines)] if any(line.strip() for line in lines) else [])])


def _source(code: str) -> str:
    """The source of an example with its prompts."""
    first, *others = code.rstrip("\n").split("\n")
    return "".join(f"{line}\n" for line in [f">>> {first}", *(f"... {line}".rstrip() for line in others)])


def _fenced(lines: Sequence[str]) -> str:
    return f"```python\n{''.join(lines).strip(chr(10))}\n```"


def printed_tables(text: str) -> list[PrintedTable]:
    """The tables that a text consists of; none where something else is in it."""
    tables: list[PrintedTable] = []
    lines = text.rstrip("\n").split("\n")
    at = 0
    while at < len(lines):
        title, formula = (*lines[at].split("    ", 1), "")[:2]
        body = []
        while at + 1 < len(lines) and lines[at + 1].startswith("  "):
            at += 1
            body.append(lines[at])
        at += 1
        if not formula or lines[at - 1 - len(body)].startswith(" ") or len(body) < 2:
            return []
        hand = body.pop().strip() if body[-1].strip().startswith(f"{BY_HAND.en}:") else ""
        heading, *rows = [GAP.split(line.strip()) for line in body]
        if not rows or any(len(row) != len(heading) + 1 for row in rows):
            return []
        tables.append(PrintedTable(title, formula, heading, rows, hand))
    return tables


def table_html(table: PrintedTable, language: str) -> str:
    """A printed table as HTML."""
    say = _korean if language == "ko" else str
    cells = "".join(f'<th scope="col">{html.escape(say(name))}</th>' for name in table.columns)
    rows = "".join(
        f'<tr><th scope="row">{html.escape(say(name))}</th>{"".join(map(_cell, numbers))}</tr>'
        for name, *numbers in table.rows
    )
    example = table.example.replace(f"{BY_HAND.en}:", f"{BY_HAND.text(language)}:", 1)
    hand = f'<p class="by-hand">{html.escape(example)}</p>' if example else ""
    caption = f'{html.escape(say(table.title))} <span class="step-formula">{html.escape(table.formula)}</span>'
    head = f"<caption>{caption}</caption><thead><tr><td></td>{cells}</tr></thead>"
    return (
        f'<div class="step-table" tabindex="0"><table class="numbers">{head}<tbody>{rows}</tbody></table>{hand}</div>'
    )


def _cell(text: str) -> str:
    changed = text.endswith("*")
    return f"<td><mark>{html.escape(text[:-1])}</mark></td>" if changed else f"<td>{html.escape(text)}</td>"


def _korean(text: str) -> str:
    """A title, or the name of a sum, in Korean; another text as it is."""
    if text == SUM.en:
        return SUM.ko
    number = re.match(r"\d+\. ", text)
    if number:
        return number.group() + _korean(text[number.end() :])
    for said in (*PREFIXES, *TITLES):
        pattern = re.escape(said.en).replace(r"\{\}", "(.+?)")
        whole = said not in PREFIXES
        if found := re.match(f"{pattern}$" if whole else pattern, text):
            filled = said.ko.format(*(_korean(group) for group in found.groups()))
            return filled if whole else filled + _korean(text[found.end() :])
    return text
