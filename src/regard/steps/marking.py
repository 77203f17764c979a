"""Marks of an exercise, cell by cell, and of its first wrong step the likely mistake."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise

import torch
from torch import Tensor

from ..errors import ConfigurationError
from .exercise import Exercise
from .step_formulas import FORMULAS, Formula, formula_name
from .step_mistakes import MISTAKES, Mistake
from .step_table import StepTable
from .wording import Wording
from .written_tables import WrittenTables

CLOSE = 0.005
"""Half of the second digit after the point: a sheet asks for three, and a sum of rounded numbers may lose the last."""


class Mark(Enum):
    """What a cell is: right, wrong, blank, or not the answer but what follows from a wrong number above it."""

    RIGHT = "✓"
    FOLLOWS = "→"
    WRONG = "✗"
    BLANK = "…"


@dataclass(frozen=True, eq=False)
class MarkedTable:
    """One table of a sheet: the numbers written, NaN where blank, and the mark of each.

    Shapes: written as the numbers of the table; marks as rows of its rows.
    """

    table: StepTable
    written: Tensor
    marks: tuple[tuple[Mark, ...], ...]

    def count(self, mark: Mark) -> int:
        """How many cells have this mark."""
        return sum(row.count(mark) for row in self.marks)

    def first(self, mark: Mark) -> tuple[int, int] | None:
        """Row and column of the first cell with this mark."""
        at = ((row, column) for row, marks in enumerate(self.marks) for column, one in enumerate(marks) if one is mark)
        return next(at, None)


@dataclass(frozen=True, eq=False)
class MarkedExercise:
    """The tables of an exercise with their marks, the first that has a wrong cell, and the mistakes that explain it."""

    exercise: Exercise
    tables: tuple[MarkedTable, ...]
    mistakes: tuple[Wording, ...]

    @property
    def first_wrong(self) -> MarkedTable | None:
        """The first table with a wrong cell."""
        return next((table for table in self.tables if table.count(Mark.WRONG)), None)

    def count(self, mark: Mark) -> int:
        """How many cells of all tables have this mark."""
        return sum(table.count(mark) for table in self.tables)


def mark_exercise(exercise: Exercise, written: Mapping[str, Tensor]) -> MarkedExercise:
    """Compare the numbers on a sheet with the exercise's, and with what follows from the numbers above them.

    A cell is right within 0.005. A cell that is not, but is what its formula makes of the student's own numbers,
    follows from them: only the first mistake is one. The wrong formulas of `MISTAKES` are run on the student's numbers,
    and that which gives what stands in the first wrong table is the likely mistake.

    Shapes: `written` has for the key of each asked table its numbers, (rows, columns), NaN where a cell is blank.

    >>> from regard.steps.exercise import make_exercise
    >>> exercise = make_exercise("scaled-dot-product", "7")
    >>> written = {table.key: table.numbers for table in exercise.asked}
    >>> mark_exercise(exercise, written).count(Mark.WRONG)
    0
    >>> written["scaled_scores"] = written["scores"]
    >>> [mistake.en for mistake in mark_exercise(exercise, written).mistakes]
    ['the scores were not scaled by 1/√d']
    """
    own = WrittenTables.of(exercise.steps)
    tables: list[MarkedTable] = []
    for table in exercise.asked:
        numbers = written[table.key]
        own = own.seen_from(table)
        follows = _computed(FORMULAS.get(formula_name(table)), own)
        untouched = all(one.count(Mark.WRONG) + one.count(Mark.FOLLOWS) == 0 for one in tables)
        tables.append(MarkedTable(table, numbers, _marks(numbers, table.numbers, follows, untouched)))
        own = own.written(torch.where(numbers.isnan(), table.numbers if follows is None else follows, numbers))
    marked = MarkedExercise(exercise, tuple(tables), ())
    wrong = marked.first_wrong
    return marked if wrong is None else MarkedExercise(exercise, marked.tables, _likely(marked, wrong, own))


def close(left: Tensor, right: Tensor) -> Tensor:
    """Where numbers are the same within `CLOSE`; infinities where both are."""
    return (left == right) | ((left - right).abs() <= CLOSE)


def _marks(written: Tensor, answers: Tensor, follows: Tensor | None, untouched: bool) -> tuple[tuple[Mark, ...], ...]:
    """The mark of each cell; numbers that follow from right ones are right, as rounding alone is between them."""
    right = close(written, answers)
    derived = torch.zeros_like(right) if follows is None else close(written, follows)
    right = right | derived if untouched else right
    choice = torch.where(written.isnan(), 3, torch.where(right, 0, torch.where(derived, 1, 2)))
    marks = (Mark.RIGHT, Mark.FOLLOWS, Mark.WRONG, Mark.BLANK)
    return tuple(tuple(marks[one] for one in row) for row in choice.tolist())


def _likely(marked: MarkedExercise, wrong: MarkedTable, own: WrittenTables) -> tuple[Wording, ...]:
    """The mistakes that give all wrong numbers of the table and most of the others: several, where they do the same."""
    cells = torch.tensor([[mark is Mark.WRONG for mark in row] for row in wrong.marks])
    found: dict[Wording, int] = {}
    for mistake, numbers in _wrong_paths(marked, wrong, own):
        same = close(numbers, wrong.written)
        if bool(same[cells].all()):
            found.setdefault(mistake.said, int(same.sum()))
    return tuple(said for said, matched in found.items() if matched == max(found.values()))


def _wrong_paths(marked: MarkedExercise, wrong: MarkedTable, own: WrittenTables) -> Iterator[tuple[Mistake, Tensor]]:
    """What each mistake makes of the wrong table: made in it, or in a table before that has a blank cell."""
    tables = marked.tables[: marked.tables.index(wrong) + 1]
    for at in reversed(range(len(tables))):
        if tables[at] is not wrong and not tables[at].count(Mark.BLANK):
            continue
        for mistake in MISTAKES.get(formula_name(tables[at].table), []):
            numbers = _followed(mistake.formula, tables[at:], own)
            if numbers is not None:
                yield mistake, numbers


def _followed(formula: Formula, tables: Sequence[MarkedTable], own: WrittenTables) -> Tensor | None:
    """What the last of the tables becomes by a formula for the first, and by their own for the others."""
    first, *others = tables
    own = own.seen_from(first.table)
    numbers = _computed(formula, own)
    for before, after in pairwise([first, *others]):
        if numbers is None:
            return None
        own = own.written(torch.where(before.written.isnan(), numbers, before.written)).seen_from(after.table)
        numbers = _computed(FORMULAS.get(formula_name(after.table)), own)
    return numbers


def _computed(formula: Formula | None, tables: WrittenTables) -> Tensor | None:
    """What a formula makes of tables; None where it needs a table or a shape that they do not have."""
    if formula is None:
        return None
    try:
        numbers = formula(tables)
    except (KeyError, IndexError, RuntimeError, ConfigurationError):
        return None
    return numbers if numbers.shape == tables.at.numbers.shape and not bool(numbers.isnan().any()) else None
