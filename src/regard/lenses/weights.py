"""The weights themselves, or a rectangle of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..problem import Problem
from ..tiles import WHOLE


class Lens(Protocol):
    """A reduction over the weights of a problem, exact, from its scores and the log-sum-exp of its rows."""

    def look(self, problem: Problem, lse: Tensor) -> Tensor:
        """What this lens shows."""
        ...


@dataclass(frozen=True)
class Weights:
    """exp(scores - lse) on rows × columns: softmax weights, (..., heads, rows, columns), before any dropout.

    Each row is normed over all its keys, also where only some columns are shown; a row with nothing to attend to
    shows zeros.

    Raises:
        ConfigurationError: rows or columns that are not a slice.
    """

    rows: slice = field(default_factory=lambda: WHOLE)
    columns: slice = field(default_factory=lambda: WHOLE)

    def __post_init__(self) -> None:
        for name, choice in (("rows", self.rows), ("columns", self.columns)):
            if not isinstance(choice, slice):
                raise ConfigurationError(f"Weights needs {name} as a slice, such as slice(0, 5); it is {choice!r}")

    def look(self, problem: Problem, lse: Tensor) -> Tensor:
        """The weights of the rectangle."""
        with torch.autocast(problem.value.device.type, enabled=False):
            scores = problem.scores(self.rows, self.columns)
            lse = lse[..., self.rows, None]
            return (scores - lse.masked_fill(lse == float("-inf"), 0.0)).exp_()

    def __hash__(self) -> int:
        # Slices have no hash before Python 3.12.
        return hash((repr(self.rows), repr(self.columns)))
