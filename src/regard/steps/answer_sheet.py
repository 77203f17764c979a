"""Reading a sheet that a student filled in, as comma-separated values, and marking it."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..utils.other_types import path_of
from .marking import Mark, MarkedExercise, mark_exercise
from .wording import check_language
from .worksheet import ANSWERS, SheetRow, Worksheet, make_worksheet

NEEDED = "the first row of a sheet that `regard steps --sheet FILE.csv` wrote"


@dataclass(frozen=True, eq=False)
class MarkedSheet:
    """The exercises of a sheet with their marks, the file that they were written in, and its language."""

    path: Path
    sheet: Worksheet
    language: str
    exercises: tuple[MarkedExercise, ...]

    def count(self, mark: Mark) -> int:
        """How many cells of the sheet have this mark."""
        return sum(exercise.count(mark) for exercise in self.exercises)

    @property
    def cells(self) -> int:
        """How many cells are asked."""
        return sum(map(self.count, Mark))


def mark_sheet(path: str | Path) -> MarkedSheet:
    """Read the sheet in a file and mark each of its cells.

    The file says itself which seed, student and topics it has. Numbers may be written as 0.5, 1/2, 0,5 and -∞ or -inf;
    a cell may be blank. Rows behind the word for answers are not read.

    Raises:
        ConfigurationError: no sheet, one whose rows or given numbers are not those of its seed, cells that are missing
            or too many, or a cell that is no number; the message has file, line and cell.
    """
    path = path_of("path", path)
    lines = _lines(path)
    sheet, language = _header(path, lines[0][1] if lines else [])
    written: list[dict[str, Tensor]] = [
        {table.key: torch.full_like(table.numbers, math.nan) for table in exercise.asked}
        for exercise in sheet.exercises
    ]
    expected = [row for row in sheet.rows(language) if any(row.cells)][1:]
    for at, row in enumerate(expected, start=1):
        number, cells = lines[at] if at < len(lines) else (lines[-1][0] + 1, [])
        where = f"{path}, line {number}"
        _check_row(where, cells, row, sheet)
        if row.asked and row.table is not None:
            numbers = [_number(where, cell, row, column) for column, cell in enumerate(cells[1:])]
            written[row.exercise][row.table.key][row.row] = torch.tensor(numbers, dtype=torch.float64)
    if len(lines) > len(expected) + 1:
        number, cells = lines[len(expected) + 1]
        raise ConfigurationError(f"{path}, line {number}: {cells} stands behind the last table: remove it")
    marked = tuple(mark_exercise(one, of) for one, of in zip(sheet.exercises, written, strict=True))
    return MarkedSheet(path, sheet, language, marked)


def sheets_in(paths: Sequence[str | Path]) -> Iterator[Path]:
    """The files among paths, and of a folder all its .csv files but those of answers, by their names.

    Raises:
        ConfigurationError: a path that is not there, or a folder without such files.
    """
    for path in map(Path, paths):
        if not path.is_dir():
            yield path
            continue
        found = sorted(one for one in path.glob("*.csv") if not one.stem.endswith("-answers"))
        if not found:
            raise ConfigurationError(f"the folder {path} has no .csv file; it needs sheets that were filled in")
        yield from found


def _lines(path: Path) -> list[tuple[int, list[str]]]:
    """The rows of a file that are not empty, with their numbers, without blanks behind; none behind the answers."""
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigurationError(f"{path} is not UTF-8: save it from the spreadsheet as 'CSV UTF-8'") from None
    first = text.partition("\n")[0]
    reader = csv.reader(text.splitlines(), delimiter=";" if ";" in first and "," not in first else ",")
    rows = [(number, [cell.strip() for cell in row]) for number, row in enumerate(reader, start=1)]
    ends = [at for at, (_, row) in enumerate(rows) if row and row[0] in ANSWERS and not any(row[1:])]
    return [(number, row) for number, row in rows[: ends[0] if ends else None] if any(row)]


def _header(path: Path, cells: Sequence[str]) -> tuple[Worksheet, str]:
    """The sheet that the first row names, and its language."""
    said = dict(cell.split("=", 1) for cell in cells if "=" in cell)
    if not {"seed", "topics", "lang"} <= said.keys():
        raise ConfigurationError(f"{path} begins with {','.join(cells)!r}; it needs {NEEDED}")
    for name in ("seed", "student"):
        if name in said and not said[name].isdecimal():
            raise ConfigurationError(f"{path}: {name}={said[name]} is no whole number: write it as the sheet had it")
    check_language(said["lang"])
    student = int(said["student"]) if "student" in said else None
    return make_worksheet(int(said["seed"]), said["topics"].split(), student=student), said["lang"]


def _check_row(where: str, cells: list[str], row: SheetRow, sheet: Worksheet) -> None:
    """Raise an error where a row of the file is not the one that the sheet has there; cut blanks behind it."""
    while len(cells) > len(row.cells) and not cells[-1]:
        cells.pop()
    name = row.cells[0] or ", ".join(row.cells[1:])
    of = "" if row.table is None else f" of {row.table.title.en!r}"
    same = cells[:1] == row.cells[:1] if row.table is not None else cells == row.cells
    if not same:
        raise ConfigurationError(
            f"{where}: {', '.join(cells) or 'nothing'} stands where the sheet has the row {name!r}{of}: rows were "
            "removed, added or moved; take the sheet anew"
        )
    if row.table is None:
        return
    if len(cells) != len(row.cells):
        what = "are missing" if len(cells) < len(row.cells) else "are too many"
        raise ConfigurationError(
            f"{where}: row {name!r}{of} has {len(cells) - 1} cells, and needs {len(row.cells) - 1}, one for each of "
            f"{', '.join(row.table.columns)}: cells {what}"
        )
    if not row.asked and [_parsed(cell) for cell in cells[1:]] != [_parsed(cell) for cell in row.cells[1:]]:
        of_student = "" if sheet.student is None else f", student {sheet.student}"
        raise ConfigurationError(
            f"{where}: row {name!r}{of} is {', '.join(cells[1:])}, and in the sheet of seed {sheet.seed}{of_student} "
            f"it is {', '.join(row.cells[1:])}: this is the sheet of another seed, or what is given was changed"
        )


def _number(where: str, cell: str, row: SheetRow, column: int) -> float:
    """The number of a cell, NaN of a blank one."""
    number = _parsed(cell) if cell else math.nan
    if number is None and row.table is not None:
        raise ConfigurationError(
            f"{where}: row {row.cells[0]!r}, column {row.table.columns[column]!r} of {row.table.title.en!r} has "
            f"{cell!r}; it needs a number, such as 0.5, 1/2 or -∞, or nothing"
        )
    return number if number is not None else math.nan


def _parsed(cell: str) -> float | None:
    """The number that a text says; None of another text."""
    text = cell.replace("\N{MINUS SIGN}", "-").replace("∞", "inf").replace(" ", "")
    if "." not in text:
        text = text.replace(",", ".")
    try:
        number = float(Fraction(text)) if "/" in text else float(text)
    except (ValueError, ZeroDivisionError):
        return None
    return None if math.isnan(number) else number
