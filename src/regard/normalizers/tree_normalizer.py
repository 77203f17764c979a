"""What normalizers over trees of the tokens have in common: one query for each key, and all rows together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..errors import ShapeError
from ..utils.numbers import truth_value


@dataclass(frozen=True)
class TreeNormalizer(Normalizer):
    """Weights that are probabilities of parents, of all tokens together. Subclasses implement `normalize`.

    Args:
        single_root: whether only trees with one root count.
    """

    single_root: bool = False

    refuses: ClassVar[Mapping[str, str]] = {"sinks": "each token has a parent or is a root, and nothing is divided"}

    def __post_init__(self) -> None:
        truth_value("single_root", self.single_root)

    @property
    def rows_before(self) -> None:
        """All rows: each weight depends on all scores."""
        return

    def affected(self, rows: Tensor) -> Tensor:
        """All rows of a head with a marked one."""
        return rows.any(-2, keepdim=True).expand_as(rows)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        if problem.queries != problem.keys:
            raise ShapeError(
                f"there are {problem.queries} queries and {problem.keys} keys: dependency trees need the queries of "
                "all tokens, in the order of their keys; attend to a whole sequence at once"
            )
        return Normalizer.for_problem(self, problem)
