"""One step as a table of named numbers, and a walkthrough: all steps of a computation, in their order."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import ConfigurationError, nearest
from . import table_formats
from .wording import CHANGED, STEPS, Wording, check_language

CLOSE = 1e-6
"""Relative difference above which a number counts as changed: float32 rounding is below it."""
NEUTRAL = {"mask": 1.0, "bias": 0.0}
"""Numbers of a mask and a bias that change nothing."""
SCORE_KEYS = ("capped_scores", "scaled_scores", "scores")
"""Tables of scores before mask and bias, the last step first."""


@dataclass(frozen=True, eq=False)
class StepTable:
    """One step: a table of numbers with names for its rows and columns, a title, and a formula.

    key: the name of the step, as `walkthrough["weights"]` takes it. sums: the axis whose sums are printed with the
    table: "rows" for the sum of each row at its right, "columns" for the sum of each column below. example: one number
    of the table with its arithmetic. features: whether columns are features of a vector, which text may abbreviate.
    parts: the dims of the vectors that such a vector is a concatenation of. marked: which numbers differ from those of
    another walkthrough.

    Shapes: numbers (rows, columns), float64, on the CPU; marked likewise, bool.
    """

    key: str
    title: Wording
    formula: str
    latex: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    numbers: Tensor
    sums: Literal["rows", "columns"] | None = None
    example: str = ""
    features: bool = False
    parts: tuple[int, ...] = ()
    marked: Tensor | None = None

    @property
    def totals(self) -> Tensor | None:
        """The sums of the rows or of the columns, as `sums` has it; None where nothing is summed."""
        if self.sums is None:
            return None
        return self.numbers.sum(-1 if self.sums == "rows" else 0)

    def compared(self, before: StepTable | None) -> StepTable:
        """The table with the numbers marked that differ from those of the same row and column in another one."""
        known = {} if before is None else before._by_name()
        marked = [
            [
                not math.isclose(number, known.get((row, column), math.nan), rel_tol=CLOSE, abs_tol=CLOSE)
                for column, number in zip(self.columns, numbers, strict=True)
            ]
            for row, numbers in zip(self.rows, self.numbers.tolist(), strict=True)
        ]
        return replace(self, marked=torch.tensor(marked))

    def _by_name(self) -> dict[tuple[str, str], float]:
        rows = zip(self.rows, self.numbers.tolist(), strict=True)
        return {(row, column): number for row, line in rows for column, number in zip(self.columns, line, strict=True)}

    def to_json(self) -> dict[str, Any]:
        """The table as plain values: numbers as lists of rows, "-inf" for a score of minus infinity."""
        numbers = [
            [number if math.isfinite(number) else str(number) for number in row] for row in self.numbers.tolist()
        ]
        return {
            "key": self.key,
            "title": self.title._asdict(),
            "formula": self.formula,
            "latex": self.latex,
            "rows": list(self.rows),
            "columns": list(self.columns),
            "numbers": numbers,
            "sums": self.sums,
            "example": self.example,
            "marked": None if self.marked is None else self.marked.tolist(),
        }

    def text(self, language: str = "en", digits: int = 3) -> str:
        """The table as aligned text, in "en" or "ko"; changed numbers have an asterisk.

        >>> from regard.steps import worked_example
        >>> print(worked_example("luong-dot")["weights"].text("ko"))
        2. 어텐션 가중치(어텐션 분포): 행마다 소프트맥스    a_ij = exp(e_ij) / Σ_k exp(e_ik)
               나는   학생   이다  합
          s1  0.245  0.090  0.665   1
          손으로: 2.718 / (2.718 + 1 + 7.389) = 0.245
        """
        return self._rendered(table_formats.as_text, language, digits)

    def markdown(self, language: str = "en", digits: int = 3) -> str:
        """The table in Markdown, under a heading of level 3, with its formula in LaTeX."""
        return self._rendered(table_formats.as_markdown, language, digits)

    def csv(self, language: str = "en", digits: int = 6) -> str:
        """The table as comma-separated values, all features of it, under a line with its title and formula."""
        return self._rendered(table_formats.as_csv, language, digits)

    def html(self, language: str = "en", digits: int = 3) -> str:
        """The table as a section of HTML."""
        return self._rendered(table_formats.as_html, language, digits)

    def __str__(self) -> str:
        return self.text()

    def _rendered(self, render: table_formats.Renderer, language: str, digits: int) -> str:
        check_language(language)
        return render(self, language, digits)


@dataclass(frozen=True, eq=False)
class Walkthrough:
    """The steps of a computation as a tuple of tables: `walkthrough["weights"].numbers`, `print(walkthrough)`.

    Whole numbers are printed as such, others with `digits` digits; `text`, `markdown`, `csv` and `html` take "en" or
    "ko" as language.

    note: what the tables do not say, printed below the title.
    """

    title: Wording
    tables: tuple[StepTable, ...]
    note: Wording | None = None

    def __getitem__(self, key: str) -> StepTable:
        """The table of a step.

        Raises:
            ConfigurationError: there is no such step; the message has those that there are.
        """
        found = next((table for table in self.tables if table.key == key), None)
        if found is None:
            raise ConfigurationError(f"there is no step {key!r}; {nearest(str(key), self.keys)}")
        return found

    def __iter__(self) -> Iterator[StepTable]:
        """The tables, in the order of the steps."""
        return iter(self.tables)

    @property
    def keys(self) -> tuple[str, ...]:
        """The names of the steps, in their order."""
        return tuple(table.key for table in self.tables)

    def compared(self, before: Walkthrough) -> Walkthrough:
        """The walkthrough with all numbers marked that differ from another one's, step by step."""
        return replace(self, tables=tuple(table.compared(before.counterpart(table)) for table in self.tables))

    def counterpart(self, table: StepTable) -> StepTable | None:
        """The table that another walkthrough's is compared with: that of its key, or what its step left as it was.

        Without a mask all pairs attend, without a bias 0 is added, and without both the scores stay.
        """
        found = {one.key: one for one in self.tables}
        if table.key in found:
            return found[table.key]
        if table.key in NEUTRAL:
            return replace(table, numbers=torch.full_like(table.numbers, NEUTRAL[table.key]))
        if table.key == "masked_scores":
            return next((found[key] for key in SCORE_KEYS if key in found), None)
        return None

    def text(self, language: str = "en", digits: int = 3) -> str:
        """Aligned text, a paragraph for each step; changed numbers have an asterisk."""
        changed = any(table.marked is not None for table in self.tables)
        heading = self.title.text(language) + (f"    {CHANGED.text(language)}" if changed else "")
        return self._joined(
            table_formats.as_text, "\n\n", language, digits, "\n".join([heading, *self._notes(language)])
        )

    def markdown(self, language: str = "en", digits: int = 3) -> str:
        """Markdown, a heading, formula and table for each step; changed numbers are bold."""
        heading = f"## {self.title.text(language)}"
        head = "\n\n".join([heading, *self._notes(language)])
        return self._joined(table_formats.as_markdown, "\n\n", language, digits, head)

    def csv(self, language: str = "en", digits: int = 6) -> str:
        """Comma-separated values, a block for each step, with an empty line between."""
        lines = [self.title.text(language), *self._notes(language)]
        head = "".join(map(table_formats.csv_line, lines))
        return self._joined(table_formats.as_csv, "\n", language, digits, head)

    def html(self, language: str = "en", digits: int = 3) -> str:
        """A page of HTML that needs no other file; changed numbers are marked."""
        check_language(language)
        body = "\n".join(table_formats.as_html(table, language, digits) for table in self.tables)
        notes = "".join(f"<p>{html.escape(note)}</p>\n" for note in self._notes(language))
        return table_formats.html_page(self.title.text(language), notes + body, language)

    def to_json(self) -> dict[str, Any]:
        """The walkthrough as plain values, for `json.dumps`."""
        note = {} if self.note is None else {"note": self.note._asdict()}
        return {"title": self.title._asdict(), **note, "tables": [table.to_json() for table in self.tables]}

    def __str__(self) -> str:
        return self.text()

    def _notes(self, language: str) -> list[str]:
        """The line of the note, if there is one."""
        return [] if self.note is None else [self.note.text(language)]

    def _joined(self, render: table_formats.Renderer, between: str, language: str, digits: int, title: str) -> str:
        check_language(language)
        return between.join([title, *(render(table, language, digits) for table in self.tables)])


def make_table(
    key: str,
    numbers: Tensor,
    rows: Sequence[str],
    columns: Sequence[str] | None = None,
    *,
    wording: str | None = None,
    fill: str | None = None,
    **options: Any,
) -> StepTable:
    """A table of the step `key` with the title and formula of `STEPS[wording]`; without columns they are features.

    fill: replaces {} in title and formula.
    """
    said = STEPS[wording or key]
    title, formula, latex = said.title, said.formula, said.latex
    if fill is not None:
        title = Wording(*(text.replace("{}", fill) for text in title))
        formula, latex = (text.replace("{}", fill) for text in (formula, latex))
    numbers = numbers.detach().double().cpu()
    numbers = numbers.unsqueeze(0) if numbers.ndim == 1 else numbers
    names = tuple(str(at) for at in range(1, numbers.shape[-1] + 1)) if columns is None else tuple(columns)
    return StepTable(key, title, formula, latex, tuple(rows), names, numbers, features=columns is None, **options)


def relabelled(table: StepTable, prefix: str, label: Mapping[str, str]) -> StepTable:
    """The table under a key with a prefix, and with a label in front of its titles by language."""
    title = Wording(f"{label['en']}: {table.title.en}", f"{label['ko']}: {table.title.text('ko')}")
    return replace(table, key=f"{prefix}{table.key}", title=title)


def exact_table(table: StepTable) -> StepTable:
    """A table of softmax attention beside its approximation, with a title that says so."""
    title = Wording(f"Exact: {table.title.en}", f"정확한 어텐션: {table.title.text('ko')}")
    return replace(table, key=f"exact.{table.key}", title=title)


def numbered(tables: Sequence[StepTable], keys: Sequence[str]) -> tuple[StepTable, ...]:
    """The tables with the numbers of a textbook's steps in front of their titles: keys are its steps in their order."""
    numbers = {key: number for number, key in enumerate(keys, start=1)}
    return tuple(
        replace(table, title=Wording(*(f"{numbers[table.key]}. {text}" for text in table.title)))
        if table.key in numbers
        else table
        for table in tables
    )
