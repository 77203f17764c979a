"""Marked sheets as text, comma-separated values and plain values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from .answer_sheet import MarkedSheet
from .marking import Mark, MarkedExercise, MarkedTable
from .table_formats import number_text, text_width
from .wording import Wording
from .worksheet import DIGITS, csv_text

SUMMARY = Wording(
    "{} of {} right, {} follow from an earlier number, {} wrong, {} blank",
    "{1}칸 가운데 맞음 {0}, 앞의 수에서 이어짐 {2}, 틀림 {3}, 빈칸 {4}",
)
FIRST_WRONG = Wording(
    'First wrong step: "{}"; {}, {} is {}, and should be {}.',
    '처음 틀린 단계: "{}". {}, {} 칸이 {}인데 {}이어야 합니다.',
)
LIKELY = Wording("Likely: {}.", "짐작되는 실수: {}.")
OR = Wording(", or: ", ", 또는: ")
UNKNOWN = Wording(
    "None of the known mistakes gives these numbers: look at the arithmetic.",
    "알려진 실수로는 이 수들이 나오지 않습니다. 계산을 다시 살펴보십시오.",
)
LEGEND = Wording(
    "✓ right, → follows from an earlier number of the sheet, ✗ wrong (answer in brackets), … blank",
    "✓ 맞음, → 앞에 쓴 수에서 이어진 값, ✗ 틀림(괄호 안은 정답), … 빈칸",
)
COLUMNS = ("file", "seed", "student", "topic", "table", "row", "column", "written", "answer", "mark")


def marks_text(sheets: Sequence[MarkedSheet], language: str) -> str:
    """For each sheet a summary, the tables with marks, and for each exercise the first wrong step."""
    parts = [f"{LEGEND.text(language)}\n"]
    for sheet in sheets:
        parts.append(f"{sheet.path}: {sheet.sheet.title(language)}: {_summary(sheet, language)}")
        for number, exercise in enumerate(sheet.exercises, start=1):
            parts += _exercise_lines(number, exercise, language)
        parts.append("")
    return "\n".join(parts).rstrip("\n")


def marks_csv(sheets: Sequence[MarkedSheet]) -> str:
    """A row for each cell of all sheets."""
    return csv_text([COLUMNS, *([*map(str, row)] for sheet in sheets for row in _cell_rows(sheet))]).rstrip("\n")


def marks_json(sheets: Sequence[MarkedSheet]) -> list[dict[str, Any]]:
    """For each sheet its counts, and for each exercise the first wrong step with the likely mistakes."""
    return [
        {
            "file": str(sheet.path),
            "seed": sheet.sheet.seed,
            "student": sheet.sheet.student,
            "cells": sheet.cells,
            **{mark.name.lower(): sheet.count(mark) for mark in Mark},
            "exercises": [
                {
                    "topic": exercise.exercise.topic,
                    **{mark.name.lower(): exercise.count(mark) for mark in Mark},
                    "first_wrong": None if exercise.first_wrong is None else exercise.first_wrong.table.key,
                    "mistakes": [mistake._asdict() for mistake in exercise.mistakes],
                }
                for exercise in sheet.exercises
            ],
        }
        for sheet in sheets
    ]


def _summary(sheet: MarkedSheet, language: str) -> str:
    counts = [sheet.count(mark) for mark in (Mark.RIGHT, Mark.FOLLOWS, Mark.WRONG, Mark.BLANK)]
    return SUMMARY.text(language).format(counts[0], sheet.cells, *counts[1:])


def _exercise_lines(number: int, exercise: MarkedExercise, language: str) -> Iterator[str]:
    yield f"{number}. {exercise.exercise.steps.title.text(language)}"
    for marked in exercise.tables:
        yield from _table_lines(marked, language)
    wrong = exercise.first_wrong
    if wrong is None:
        return
    row, column = wrong.first(Mark.WRONG) or (0, 0)
    table = wrong.table
    numbers = (number_text(float(of[row, column]), DIGITS) for of in (wrong.written, table.numbers))
    title = table.title.text(language)
    yield "   " + FIRST_WRONG.text(language).format(title, table.rows[row], table.columns[column], *numbers)
    said = OR.text(language).join(mistake.text(language) for mistake in exercise.mistakes)
    yield "   " + (LIKELY.text(language).format(said) if said else UNKNOWN.text(language))


def _table_lines(marked: MarkedTable, language: str) -> Iterator[str]:
    """The title of a table that is all right or blank; of another one all cells with their marks."""
    title = marked.table.title.text(language)
    if marked.count(Mark.RIGHT) == marked.table.numbers.numel():
        yield f"   {Mark.RIGHT.value} {title}"
        return
    worst = next(mark for mark in (Mark.WRONG, Mark.FOLLOWS, Mark.BLANK) if marked.count(mark))
    yield f"   {worst.value} {title}"
    if marked.count(Mark.BLANK) == marked.table.numbers.numel():
        return
    cells = [
        [_cell(marked, row, column) for column in range(len(marked.table.columns))]
        for row in range(len(marked.table.rows))
    ]
    grid = [["", *marked.table.columns], *([name, *row] for name, row in zip(marked.table.rows, cells, strict=True))]
    widths = [max(map(text_width, column)) for column in zip(*grid, strict=True)]
    for row in grid:
        yield ("     " + "  ".join(_padded(text, width) for text, width in zip(row, widths, strict=True))).rstrip()


def _cell(marked: MarkedTable, row: int, column: int) -> str:
    mark = marked.marks[row][column]
    if mark is Mark.BLANK:
        return mark.value
    text = f"{number_text(float(marked.written[row, column]), DIGITS)} {mark.value}"
    answer = number_text(float(marked.table.numbers[row, column]), DIGITS)
    return f"{text} ({answer})" if mark is Mark.WRONG else text


def _padded(text: str, width: int) -> str:
    return text + " " * (width - text_width(text))


def _cell_rows(sheet: MarkedSheet) -> Iterator[tuple[object, ...]]:
    student = "" if sheet.sheet.student is None else sheet.sheet.student
    for exercise in sheet.exercises:
        for marked in exercise.tables:
            table = marked.table
            for row, name in enumerate(table.rows):
                for column, other in enumerate(table.columns):
                    written, answer = float(marked.written[row, column]), float(table.numbers[row, column])
                    text = "" if math.isnan(written) else f"{written:.6g}"
                    mark = marked.marks[row][column].name.lower()
                    of = sheet.path, sheet.sheet.seed, student, exercise.exercise.topic, table.key
                    yield (*of, name, other, text, f"{answer:.6g}", mark)
