"""Tables of an exercise as numbers: what formulas of steps read, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

from torch import Tensor

from .exercise import step_of
from .step_table import StepTable, Walkthrough

MIXED = {"key": "mixed_key", "value": "mixed_value", "weights": "shares"}
"""What attention reads in place of keys, values and weights, where keys are mixed."""


@dataclass(frozen=True, eq=False)
class WrittenTables:
    """Numbers by the key of their table, seen from one table: `tables["scores"]` is of the same head or hop.

    steps: the walkthrough of the exercise, for the names of rows and columns. at: the table that is computed.

    Shapes: those of the tables of steps, float64.
    """

    steps: Walkthrough
    numbers: Mapping[str, Tensor]
    at: StepTable

    @classmethod
    def of(cls, steps: Walkthrough) -> WrittenTables:
        """The numbers of the walkthrough itself, seen from its last table."""
        return cls(steps, {table.key: table.numbers for table in steps.tables}, steps.tables[-1])

    def seen_from(self, table: StepTable) -> WrittenTables:
        """The same numbers for the formula of another table."""
        return replace(self, at=table)

    def written(self, numbers: Tensor) -> WrittenTables:
        """With these numbers in the table that is computed."""
        return replace(self, numbers={**self.numbers, self.at.key: numbers})

    def __getitem__(self, step: str) -> Tensor:
        own = f"{step_of(self.at.key)[0]}{step}"
        return self.numbers[own if own in self.numbers else step]

    def __contains__(self, step: str) -> bool:
        return f"{step_of(self.at.key)[0]}{step}" in self.numbers or step in self.numbers

    def attended(self, step: str) -> Tensor:
        """Keys, values or weights: the rows of this hop, or what they are mixed to."""
        if "mixing_matrix" in self.numbers and not self.at.key.startswith("exact."):
            return self.numbers[MIXED.get(step, step)]
        return self[step]

    def of_rows(self, step: str, names: tuple[str, ...]) -> Tensor:
        """The rows of a table that have these names, such as those of one hop of a ring."""
        table = self.attended(step)
        if not self.at.key.startswith("hop"):
            return table
        rows = self.steps[step].rows
        return table[[rows.index(name) for name in names]]

    @property
    def index(self) -> int:
        """The number at the end of the key of the table: 2 for "state.2"."""
        return int(self.at.key.split(".")[-1])

    @property
    def head(self) -> int:
        """The number of the head, from 0."""
        first = self.at.key.split(".")[0]
        return int(first.removeprefix("head")) - 1 if first.startswith("head") else 0

    @property
    def heads(self) -> int:
        """How many heads there are."""
        return max(1, len({key.split(".")[0] for key in self.steps.keys if key.startswith("head")}))

    def last_scores(self, *, masked: bool = True) -> Tensor:
        """The scores that the exponentials are of; without `masked` those before mask and bias."""
        steps = ("masked_scores", "scaled_scores", "scores") if masked else ("scaled_scores", "scores")
        return self[next(step for step in steps if step in self)]


Formula: TypeAlias = Callable[[WrittenTables], Tensor]
"""What computes a table from those before it."""
