"""Tables of steps as aligned text, Markdown, comma-separated values and HTML."""

from __future__ import annotations

import csv
import html
import io
import math
import unicodedata
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from .wording import BY_HAND, MORE, SUM

if TYPE_CHECKING:
    from .step_table import StepTable

Renderer: TypeAlias = "Callable[[StepTable, str, int], str]"
MOST_FEATURES = 8
"""Features of a vector that text, Markdown and HTML print; of a longer one the first six."""
SHOWN_FEATURES = 6
ROUNDING = 1e-5
"""Relative difference within which numbers are taken for equal, as rounding of float32 alone may be between them.

A weight is exp(score - logsumexp), both of at most 88, the largest number whose exponential float32 holds: half of the
last digit of each is 2^-18, together 8e-6.
"""
UNSEEN = 5e-4
"""The largest difference that three digits do not show: of a large number float32 has no more than these."""

STYLE = """
:root { color-scheme: light dark }
body { font: 16px/1.5 system-ui, "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif; margin: 2rem auto;
       max-width: 60rem; padding: 0 1rem }
section { margin: 1.6rem 0; overflow-x: auto }
h1 { font-size: 1.5rem } h2 { font-size: 1.1rem; margin: 0 0 .2rem }
.formula { font-family: Georgia, "Noto Serif KR", serif; font-style: italic }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; margin: .4rem 0 }
th, td { border: 1px solid #8888; padding: .25rem .6rem; text-align: right; white-space: nowrap }
th { font-weight: 600 } .sum { border-left-width: 3px; border-left-style: double }
tr.sum td, tr.sum th { border-left-width: 1px; border-left-style: solid; border-top: 3px double #8888 }
mark { background: #ffe08a; color: #000 }
@media print { body { margin: 0; max-width: none } section { break-inside: avoid } }
"""


class Cells(NamedTuple):
    """A table as it is printed: heading, rows of texts, and which of them are marked."""

    heading: list[str]
    names: list[str]
    rows: list[list[str]]
    marked: list[list[bool]]


def number_text(number: float, digits: int) -> str:
    """A number as it is printed: a whole number without a fraction, another with `digits` digits.

    Whole is what rounding alone keeps from it, whatever the digits: weights sum to 1 on every machine. But 0 is printed
    for 0 alone: a weight that is small but not masked is 0.000.

    >>> [number_text(number, 3) for number in (2.0, 0.5, -1 / 3, float("-inf"), 0.0, -1e-9)]
    ['2', '0.500', '-0.333', '-∞', '0', '0.000']
    >>> [number_text(number, 3) for number in (1 - 8e-6, 0.9999)]
    ['1', '1.000']
    """
    if math.isinf(number):
        return "∞" if number > 0 else "-∞"
    if math.isnan(number):
        return "NaN"
    if abs(number - round(number)) <= min(ROUNDING * abs(number), UNSEEN):
        return str(round(number))
    text = f"{number:.{digits}f}"
    return text.removeprefix("-") if float(text) == 0 else text


def factor_text(number: float) -> str:
    """A number as a factor of a product, in brackets where it is negative.

    >>> factor_text(-2.0), factor_text(0.5)
    ('(-2)', '0.500')
    """
    text = number_text(float(number), 3)
    return f"({text})" if text.startswith("-") else text


def text_width(text: str) -> int:
    """Columns that a text takes in a terminal: 2 for a wide character, such as Hangul, 0 for a combining one.

    >>> text_width("질의 q1")
    7
    """
    return sum(
        0 if unicodedata.combining(character) else 2 if unicodedata.east_asian_width(character) in "WF" else 1
        for character in text
    )


def as_text(table: StepTable, language: str, digits: int) -> str:
    """The table as text whose columns align, also where characters are wide."""
    cells = _cells(table, language, digits)
    texts = [
        [f"{text}{'*' if mark else ''}" for text, mark in zip(row, marks, strict=True)]
        for row, marks in zip(cells.rows, cells.marked, strict=True)
    ]
    # The asterisk has a column of its own, so that digits stay below digits.
    if any(any(marks) for marks in cells.marked):
        texts = [[text if text.endswith("*") else f"{text} " for text in row] for row in texts]
    grid = [["", *cells.heading], *([name, *row] for name, row in zip(cells.names, texts, strict=True))]
    widths = [max(map(text_width, column)) for column in zip(*grid, strict=True)]
    lines = ["  " + "  ".join([_left(row[0], widths[0]), *map(_right, row[1:], widths[1:])]).rstrip() for row in grid]
    return "\n".join([_headline(table, language), *lines, *_example(table, language)])


def as_markdown(table: StepTable, language: str, digits: int) -> str:
    """The table in Markdown, under a heading of level 3, with its formula in LaTeX."""
    cells = _cells(table, language, digits)
    lines = [f"| | {' | '.join(map(_escaped, cells.heading))} |", "| --- |" + " ---: |" * len(cells.heading)]
    for name, row, marks in zip(cells.names, cells.rows, cells.marked, strict=True):
        shown = (f"**{text}**" if mark else text for text, mark in zip(row, marks, strict=True))
        lines.append(f"| {_escaped(name)} | {' | '.join(shown)} |")
    parts = [f"### {table.title.text(language)}", f"$${table.latex}$$", "\n".join(lines), *_example(table, language)]
    return "\n\n".join(parts)


def as_csv(table: StepTable, language: str, digits: int) -> str:
    """The table as comma-separated values, all features of it, under a line with its title and formula."""
    cells = _cells(table, language, digits, whole=True)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([table.title.text(language), table.formula])
    writer.writerow(["", *cells.heading])
    writer.writerows([name, *row] for name, row in zip(cells.names, cells.rows, strict=True))
    return file.getvalue()


def csv_line(text: str) -> str:
    r"""A line of comma-separated values with one text, such as a title.

    >>> csv_line("b = -1, φ(x) = x")
    '"b = -1, φ(x) = x"\n'
    """
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerow([text])
    return file.getvalue()


def as_html(table: StepTable, language: str, digits: int) -> str:
    """The table as a section of HTML."""
    cells = _cells(table, language, digits)
    sums = len(cells.heading) - 1 if table.sums == "rows" else -1
    head = "".join(f'<th scope="col">{html.escape(text)}</th>' for text in cells.heading)
    rows = []
    for number, (name, row, marks) in enumerate(zip(cells.names, cells.rows, cells.marked, strict=True)):
        tag = '<tr class="sum">' if table.sums == "columns" and number == len(cells.rows) - 1 else "<tr>"
        texts = (f"<mark>{text}</mark>" if mark else html.escape(text) for text, mark in zip(row, marks, strict=True))
        tds = "".join(f"<td{' class=sum' if at == sums else ''}>{text}</td>" for at, text in enumerate(texts))
        rows.append(f'{tag}<th scope="row">{html.escape(name)}</th>{tds}</tr>')
    example = "".join(f"<p>{html.escape(line)}</p>" for line in _example(table, language))
    return (
        f'<section id="{html.escape(table.key)}" tabindex="0"><h2>{html.escape(table.title.text(language))}</h2>'
        f'<p class="formula">{html.escape(table.formula)}</p>'
        f"<table><thead><tr><td></td>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>{example}</section>"
    )


def html_page(title: str, body: str, language: str, style: str = STYLE) -> str:
    """A page of HTML with a heading, in a language, that needs no other file."""
    title = html.escape(title)
    return (
        f'<!doctype html>\n<html lang="{language}">\n<head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>{title}</title>'
        f"<style>{style}</style></head>\n<body><main><h1>{title}</h1>\n{body}\n</main></body>\n</html>\n"
    )


def _headline(table: StepTable, language: str) -> str:
    return f"{table.title.text(language)}    {table.formula}"


def _example(table: StepTable, language: str) -> list[str]:
    return [f"  {BY_HAND.text(language)}: {table.example}"] if table.example else []


def shown_columns(table: StepTable) -> list[int | None]:
    """The columns of a table that are printed, and None where the features of a long vector are left out.

    Of a vector that is a concatenation, the first features of each part.
    """
    count = len(table.columns)
    if not table.features or count <= MOST_FEATURES:
        return list(range(count))
    parts = table.parts or (count,)
    each = max(1, SHOWN_FEATURES // len(parts))
    shown: list[int | None] = []
    start = 0
    for part in parts:
        shown += range(start, start + min(each, part))
        shown += [None] if part > each else []
        start += part
    return shown


def left_out_counts(table: StepTable, shown: Sequence[int | None]) -> list[int]:
    """How many columns each None of `shown_columns` stands for."""
    bounds = [-1, *shown, len(table.columns)]
    return [
        after - before - 1
        for before, gap, after in zip(bounds, bounds[1:], bounds[2:], strict=False)
        if gap is None and before is not None and after is not None
    ]


def _cells(table: StepTable, language: str, digits: int, *, whole: bool = False) -> Cells:
    """The texts of a table, with its sums; a long vector of features is cut unless `whole`."""
    shown: Sequence[int | None] = range(len(table.columns)) if whole else shown_columns(table)
    counts = left_out_counts(table, shown)
    gaps = iter([MORE.text(language).format(count) if len(counts) <= 2 else "…" for count in counts])
    heading = [next(gaps) if column is None else table.columns[column] for column in shown]
    numbers = table.numbers.tolist()
    marked = [[False] * len(row) for row in numbers] if table.marked is None else table.marked.tolist()
    names, totals = list(table.rows), table.totals
    if table.sums == "columns" and totals is not None:
        names.append(SUM.text(language))
        numbers.append(totals.tolist())
        marked.append([any(column) for column in zip(*marked, strict=True)])
    rows = [["" if column is None else number_text(row[column], digits) for column in shown] for row in numbers]
    marks = [[column is not None and row[column] for column in shown] for row in marked]
    if table.sums == "rows" and totals is not None:
        heading.append(SUM.text(language))
        rows = [[*row, number_text(total, digits)] for row, total in zip(rows, totals.tolist(), strict=True)]
        marks = [[*row, False] for row in marks]
    return Cells(heading, names, rows, marks)


def _left(text: str, width: int) -> str:
    return text + " " * (width - text_width(text))


def _right(text: str, width: int) -> str:
    return " " * (width - text_width(text)) + text


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def cells_of(table: StepTable, language: str, digits: int) -> Sequence[Sequence[str]]:
    """Heading and rows of a table as texts, names included."""
    cells = _cells(table, language, digits)
    return [["", *cells.heading], *([name, *row] for name, row in zip(cells.names, cells.rows, strict=True))]
