"""Sheets of attention to be done by hand: small whole numbers, blank tables, and the answers on a second page."""

from __future__ import annotations

import csv
import html
import io
import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ..errors import ConfigurationError
from ..utils.atomic_files import atomic_write
from ..utils.numbers import whole_number
from .exercise import LARGEST_SCORE, Exercise, make_exercise
from .step_table import StepTable
from .table_formats import cells_of, html_page
from .wording import Wording, check_language

TOPICS = ("luong-dot", "scaled-dot-product", "causal-mask")
"""Of a sheet whose topics are not named."""
MOST_STUDENTS = 1000
DIGITS = 3

TITLE = Wording("Attention by hand", "손으로 계산하는 어텐션")
ANSWERS = Wording("Answers", "정답")
STUDENT = Wording("student {}", "학생 {}")
INSTRUCTION = Wording(
    "Fill in the tables, three digits after the point. Each row of weights sums to 1; the context is the sum of the "
    "values times their weights.",
    "표의 빈칸을 소수점 아래 셋째 자리까지 채우십시오. 가중치는 행마다 합이 1이고, 문맥 벡터는 값에 가중치를 곱해 더한 "
    "것입니다.",
)
NAME = Wording("Name: ____________________", "이름: ____________________")

STYLE = """
@page { size: A4; margin: 10mm 12mm }
:root { color-scheme: light }
body { font: 10pt/1.3 system-ui, "Noto Sans KR", "Apple SD Gothic Neo", "Malgun Gothic", sans-serif; color: #000;
       background: #fff; margin: 0 auto; max-width: 186mm; padding: 4mm }
h1 { font-size: 16pt; margin: 0 } h2 { font-size: 11.5pt; margin: 3mm 0 1mm } p { margin: 1mm 0 }
.sheet + .sheet { break-before: page }
.answers { break-before: page; border-top: 1px dashed #888; margin-top: 10mm; padding-top: 4mm }
.exercise { break-inside: avoid } .tables { display: flex; flex-wrap: wrap; gap: 2mm 3mm; align-items: flex-start }
figure { margin: 0; max-width: 100%; overflow-x: auto } figcaption { font-size: 8.5pt } .formula { font-style: italic }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { border: 1px solid #777; padding: .3mm 1.5mm; text-align: right; height: 5mm; min-width: 4mm;
         white-space: nowrap }
th { font-weight: 600; background: #eee } td.blank { min-width: 7mm; height: 6.5mm }
@media print { body { padding: 0; max-width: none } .answers { border: 0; margin: 0; padding: 0 } }
"""


class SheetRow(NamedTuple):
    """A row of a sheet in CSV: its cells, and of numbers the exercise, counted from 0, with table and row."""

    cells: list[str]
    exercise: int = -1
    table: StepTable | None = None
    row: int = 0

    @property
    def asked(self) -> bool:
        """Whether its numbers are to be written."""
        return self.table is not None and not any(self.cells[1:])


@dataclass(frozen=True, eq=False)
class Worksheet:
    """Exercises whose later tables are left blank, for a class or for one student of it; `save` writes HTML or CSV."""

    seed: int
    exercises: tuple[Exercise, ...]
    student: int | None = None

    def title(self, language: str) -> str:
        """Title, seed and student."""
        of = "" if self.student is None else f", {STUDENT.text(language).format(self.student)}"
        return f"{TITLE.text(language)} ({self.seed}{of})"

    def html(self, language: str = "en") -> str:
        """A page of HTML for printing on A4: the exercises, and from a new page the answers."""
        check_language(language)
        return html_page(self.title(language), self.questions(language) + self.answers(language), language, STYLE)

    def questions(self, language: str) -> str:
        """The blank exercises as HTML."""
        whole = " · ".join(f"e^{power} = {math.exp(power):.3f}" for power in range(int(LARGEST_SCORE) + 1))
        powers = f"{whole} · √e = {math.exp(0.5):.3f}"
        head = f"<p>{NAME.text(language)}</p><p>{html.escape(INSTRUCTION.text(language))}</p><p>{powers}</p>"
        return "\n".join([head, *self._sections(language, blank=True)])

    def answers(self, language: str) -> str:
        """The exercises with all numbers, as HTML."""
        sections = "\n".join(self._sections(language, blank=False))
        return f'<div class="answers"><h1>{ANSWERS.text(language)}</h1>{sections}</div>'

    def rows(self, language: str = "en", *, blank: bool = True) -> Iterator[SheetRow]:
        """The rows of the sheet in CSV: what it is a sheet of, then a block for each table."""
        student = "" if self.student is None else f"student={self.student}"
        topics = " ".join(exercise.topic for exercise in self.exercises)
        yield SheetRow([TITLE.text(language), f"seed={self.seed}", student, f"topics={topics}", f"lang={language}"])
        for number, exercise in enumerate(self.exercises):
            yield SheetRow([f"{number + 1}. {exercise.steps.title.text(language)}"])
            if exercise.steps.note is not None:
                yield SheetRow([exercise.steps.note.text(language)])
            for table in (*exercise.given, *exercise.asked):
                heading, *lines = _cells(table, language, blank and table in exercise.asked)
                yield SheetRow([table.title.text(language), table.formula])
                yield SheetRow(list(heading))
                for at, cells in enumerate(lines):
                    yield SheetRow(list(cells), number, table, at)

    def csv(self, language: str = "en") -> str:
        """Comma-separated values: a block for each table, blank where it is asked; after all of them the answers."""
        return f"{self.blank_csv(language)}{csv_text([[ANSWERS.text(language)]])}{self.csv_of_answers(language)}"

    def blank_csv(self, language: str = "en") -> str:
        """The part of `csv` that is filled in."""
        check_language(language)
        return csv_text(row.cells for row in self.rows(language))

    def csv_of_answers(self, language: str = "en") -> str:
        """The part of `csv` with all numbers."""
        return csv_text(row.cells for row in self.rows(language, blank=False))

    def save(self, path: str | Path, language: str = "en") -> None:
        """Write the sheet: FILE.html or FILE.csv.

        Raises:
            ConfigurationError: another ending.
            CheckpointError: the file cannot be written.
        """
        write_sheet(Path(path), self.html(language) if check_ending(path) == ".html" else self.csv(language))

    def _sections(self, language: str, *, blank: bool) -> list[str]:
        sections = []
        for number, exercise in enumerate(self.exercises, start=1):
            hint = "" if exercise.steps.note is None else f"<p>{html.escape(exercise.steps.note.text(language))}</p>"
            tables = (
                _figure(table, language, blank and table in exercise.asked)
                for table in (*exercise.given, *exercise.asked)
            )
            sections.append(
                f'<section class="exercise"><h2>{number}. {html.escape(exercise.steps.title.text(language))}</h2>{hint}'
                f'<div class="tables">{"".join(tables)}</div></section>'
            )
        return sections


@dataclass(frozen=True, eq=False)
class ClassSheets:
    """A sheet for each student of a class, each with numbers of its own, and one file of answers."""

    sheets: tuple[Worksheet, ...]

    def save(self, path: str | Path, language: str = "en") -> list[Path]:
        """Write FILE.html, to be printed, with a page for each student, or FILE-1.csv, FILE-2.csv, ... to be filled in.

        The answers of all are in FILE-answers.html or FILE-answers.csv, which is the last of the paths returned.

        Raises:
            ConfigurationError, CheckpointError: as `Worksheet.save`.
        """
        check_language(language)
        path = Path(path)
        answers = path.with_name(f"{path.stem}-answers{path.suffix}")
        if check_ending(path) == ".html":
            write_sheet(path, self._page(language, [sheet.questions(language) for sheet in self.sheets]))
            write_sheet(answers, self._page(language, [sheet.answers(language) for sheet in self.sheets]))
            return [path, answers]
        digits = len(str(len(self.sheets)))
        paths = [path.with_name(f"{path.stem}-{sheet.student:0{digits}}.csv") for sheet in self.sheets]
        for one, sheet in zip(paths, self.sheets, strict=True):
            write_sheet(one, sheet.blank_csv(language))
        write_sheet(answers, "".join(sheet.csv_of_answers(language) for sheet in self.sheets))
        return [*paths, answers]

    def _page(self, language: str, parts: Sequence[str]) -> str:
        body = "\n".join(
            f'<div class="sheet"><h1>{sheet.title(language)}</h1>{part}</div>'
            for sheet, part in zip(self.sheets, parts, strict=True)
        )
        return html_page(TITLE.text(language), body, language, STYLE)


def make_worksheet(seed: int = 1, topics: Sequence[str] = TOPICS, *, student: int | None = None) -> Worksheet:
    """Exercises of a seed, by default Luong's dot products, scaled dot products, and a causal mask.

    Args:
        seed: each seed is another sheet.
        topics: names of worked examples, such as those that `EXAMPLES` has.
        student: whose sheet it is, of a class that has the same seed.

    Raises:
        ConfigurationError: a topic that there is not, with the nearest names, one that is named twice, or none.

    >>> from regard.steps import make_worksheet
    >>> sheet = make_worksheet(7, ["multi-head"])
    >>> sheet.exercises[0].steps.title.en
    'Multi-head attention with two heads'
    """
    if isinstance(topics, str):
        raise ConfigurationError(f"topics is the text {topics!r}; it needs a list of topics, such as [{topics!r}]")
    if not topics:
        raise ConfigurationError("topics is empty; a sheet needs one at least, such as 'scaled-dot-product'")
    twice = [topic for topic in topics if list(topics).count(topic) > 1]
    if twice:
        raise ConfigurationError(f"the topic {twice[0]!r} is named twice; a sheet has each topic once: leave one out")
    of = f"{seed}" if student is None else f"{seed}, student {student}"
    return Worksheet(seed, tuple(make_exercise(topic, of) for topic in topics), student)


def make_class_sheets(seed: int, students: int, topics: Sequence[str] = TOPICS) -> ClassSheets:
    """The sheets of students 1, 2, ... of a class, each with other numbers.

    Raises:
        ConfigurationError: as `make_worksheet`, or a number of students that is not from 1 to 1000.
    """
    if not 1 <= whole_number("students", students, least=-sys.maxsize) <= MOST_STUDENTS:
        raise ConfigurationError(f"students is {students}; a class has 1 to {MOST_STUDENTS}")
    return ClassSheets(tuple(make_worksheet(seed, topics, student=one) for one in range(1, students + 1)))


def check_ending(path: str | Path) -> str:
    """The ending of a sheet, which is .html or .csv.

    Raises:
        ConfigurationError: another ending.
    """
    path = Path(path)
    if path.suffix not in (".html", ".csv"):
        raise ConfigurationError(f"a sheet is written as .html or .csv; {path.name} ends in {path.suffix!r}")
    return path.suffix


def write_sheet(path: Path, text: str) -> None:
    """Write a page or comma-separated values, which spreadsheets read as UTF-8 by its byte order mark."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8-sig" if path.suffix == ".csv" else "utf-8")


def csv_text(rows: Iterable[Sequence[str]]) -> str:
    """Rows as comma-separated values."""
    file = io.StringIO()
    csv.writer(file, lineterminator="\n").writerows(rows)
    return file.getvalue()


def _cells(table: StepTable, language: str, blank: bool) -> Sequence[Sequence[str]]:
    """Heading and rows of a table, without sums, and without its numbers where they are asked."""
    heading, *rows = cells_of(replace(table, sums=None), language, DIGITS)
    if blank:
        rows = [[row[0], *[""] * (len(row) - 1)] for row in rows]
    return [heading, *rows]


def _figure(table: StepTable, language: str, blank: bool) -> str:
    heading, *rows = _cells(table, language, blank)
    tag = "td class=blank" if blank else "td"
    head = "".join(f"<th>{html.escape(text)}</th>" for text in heading[1:])
    lines = (
        f"<tr><th>{html.escape(row[0])}</th>{''.join(f'<{tag}>{html.escape(text)}</td>' for text in row[1:])}</tr>"
        for row in rows
    )
    caption = f'{html.escape(table.title.text(language))}<br><span class="formula">{html.escape(table.formula)}</span>'
    return f"<figure><figcaption>{caption}</figcaption><table><tr><td></td>{head}</tr>{''.join(lines)}</table></figure>"
