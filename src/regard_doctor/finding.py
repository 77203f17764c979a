"""Findings of the doctor: what is wrong, where, and how bad."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Severity(enum.Enum):
    """How bad a finding is: `ERROR` wrong results, `WARNING` slow or fragile, `HINT` better written otherwise."""

    ERROR = "error"
    WARNING = "warning"
    HINT = "hint"

    @property
    def rank(self) -> int:
        """0 for errors, higher for what matters less."""
        return list(Severity).index(self)


@dataclass(frozen=True, slots=True, order=True)
class CodeFinding:
    """One finding; lines and columns count from 1, columns in characters, the end is exclusive.

    cell: of a notebook, the number of the cell that the lines are counted in, from 1; None in other files.
    """

    path: str
    line: int
    column: int
    code: str
    message: str
    severity: Severity
    end_line: int
    end_column: int
    fixable: bool = False
    cell: int | None = None

    def __str__(self) -> str:
        cell = "" if self.cell is None else f"cell {self.cell}:"
        return f"{self.path}:{cell}{self.line}:{self.column}: {self.code} {self.message}"
