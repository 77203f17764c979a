"""HeadTerms α_ij · v_j of what heads compute: which of them an intervention replaces."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import Any

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from ..masks.base import Kept, Mask, Pairs


@dataclass(frozen=True)
class HeadTerms:
    """The terms α_ij · v_j whose sum over the keys j is what a head gives query i; None stands for all.

    | to choose | give |
    | --- | --- |
    | a head | `HeadTerms("layers.3", heads=[1])` |
    | a layer | `HeadTerms("layers.3")` |
    | a token, as far as it is attended to | `HeadTerms(keys=[7])` |
    | what a token reads | `HeadTerms(queries=[9])` |
    | a link, in one head | `HeadTerms("layers.3", heads=[1], queries=[9], keys=[7])` |
    | a link, in all heads | `HeadTerms(queries=[9], keys=[7])` |

    Args:
        module: the name of an attention module, or of one that it is a part of; None for all attention of the model.
        heads: numbers of query heads, from 0.
        queries: positions of tokens that attend, from 0; in decoding step by step those of the whole text.
        keys: positions of tokens that are attended to, counted likewise.

    Raises:
        ConfigurationError: heads, queries or keys that are no whole numbers of at least 0, or none of them.

    >>> HeadTerms("layers.3", heads=[1], keys=range(2)).keys
    (0, 1)
    """

    module: str | None = None
    heads: Iterable[int] | None = None
    queries: Iterable[int] | None = None
    keys: Iterable[int] | None = None

    def __post_init__(self) -> None:
        if self.module is not None and not isinstance(self.module, str):
            raise ConfigurationError(f"HeadTerms needs the name of a module, or None for all; it is {self.module!r}")
        for name in ("heads", "queries", "keys"):
            object.__setattr__(self, name, _whole_numbers(name, getattr(self, name)))

    def covers(self, module: str) -> bool:
        """Whether an attention module of that name is one of these, or a part of it."""
        return self.module in (None, "", module) or module.startswith(f"{self.module}.")


def _whole_numbers(name: str, chosen: Any) -> tuple[int, ...] | None:
    if chosen is None:
        return None
    numbers = tuple(chosen) if isinstance(chosen, Iterable) and not isinstance(chosen, str) else ()
    if not numbers or any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in numbers):
        raise ConfigurationError(
            f"HeadTerms needs {name} as a list of whole numbers of at least 0, such as [0], or None for all; it is "
            f"{chosen!r}"
        )
    return tuple(dict.fromkeys(numbers))


@dataclass(frozen=True, eq=False)
class ChosenTerms:
    """The terms that one call has of some `HeadTerms`: rows (..., M), columns (..., N) and heads (H,), each bool.

    columns: None where all keys of the rows are meant, so that the whole sum is.
    """

    rows: Tensor
    columns: Tensor | None
    heads: Tensor

    @classmethod
    def of_call(cls, terms: HeadTerms, problem: Problem, rows: Tensor, module: str) -> ChosenTerms:
        """Which terms of a call are meant; rows: the positions of its queries, (..., M).

        Raises:
            ConfigurationError: a head that the call does not have.
        """
        count = problem.weights_shape[-3] if problem.heads else 1
        chosen = torch.zeros(count, dtype=torch.bool, device=rows.device)
        for head in range(count) if terms.heads is None else terms.heads:
            if head >= count:
                raise ConfigurationError(f"{module!r} has the heads 0 to {count - 1}; it was asked for {head}")
            chosen[head] = True
        keys = problem.grid().key_positions
        columns = None if terms.keys is None else _among(keys, terms.keys)
        return cls(
            torch.ones_like(rows, dtype=torch.bool) if terms.queries is None else _among(rows, terms.queries),
            columns,
            chosen,
        )

    @property
    def is_empty(self) -> bool:
        """Whether the call has none of the terms."""
        return not bool(self.rows.any() and (self.columns is None or self.columns.any()))

    def by_row(self, *, heads: bool) -> Tensor:
        """Which rows of the output have one, to broadcast with it: (..., H, M, 1), or (..., M, 1) without heads."""
        rows = self.rows[..., None]
        return rows.unsqueeze(-3) & self.heads[:, None, None] if heads else rows

    def of_key(self, column: int, *, heads: bool) -> Tensor:
        """Which rows have a term with the key of a column, as `by_row`."""
        if self.columns is None:
            return self.by_row(heads=heads)
        key = self.columns[..., column, None, None]
        return self.by_row(heads=heads) & (key.unsqueeze(-3) if heads else key)


@dataclass(frozen=True, eq=False, repr=False)
class WithoutTerms(Mask):
    """All pairs but those of some terms."""

    terms: tuple[ChosenTerms, ...]

    @property
    def by_position(self) -> bool:
        return False

    def keep(self, grid: Pairs) -> Kept:
        return reduce(and_, (self._without(each, grid) for each in self.terms))

    def _without(self, chosen: ChosenTerms, grid: Pairs) -> Kept:
        pairs = grid.cut(grid.per_batch(chosen.rows.unsqueeze(-1)))
        if chosen.columns is not None:
            pairs = pairs & grid.cut(grid.per_batch(chosen.columns.unsqueeze(-2)))
        return ~(pairs & chosen.heads[:, None, None]) if grid.heads else ~pairs

    def __repr__(self) -> str:
        return f"without {len(self.terms)} groups of terms"


def _among(positions: Tensor, wanted: Iterable[int]) -> Tensor:
    return torch.isin(positions.long(), torch.tensor(list(wanted), device=positions.device))
