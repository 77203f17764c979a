"""Which keys a mask still needs: all queries that are yet to come, asked about at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...core.grid import Blocks, Grid
from ...core.intervals import EMPTY, Interval, Ternary, Undecided
from ...errors import RegardError
from ...masks import Mask
from ...masks.base import And

HORIZON = 2**40
"""No sequence is longer; and sums and products with it stay within int64."""
ROWS = 64
"""Queries of one tile, where there are only so many to come."""


def needed(mask: Mask, key_positions: Tensor, first: Tensor | int, max_length: int | None = None) -> Tensor:
    """Which keys a query at the position `first` or later may attend to: bool, (N,), of any batch and head.

    A key is not needed where the mask says EMPTY of it and of all those queries at once. That is never wrong; where
    interval arithmetic cannot tell, the key is needed. A mask made for a length, which looks positions up, can tell of
    queries below `max_length` alone.

    Shapes: key_positions (N,) or (batch, N); first is a number or (batch,).

    >>> from regard import masks
    >>> mask = masks.causal() & (masks.window(before=2) | masks.prefix(1))
    >>> needed(mask, torch.arange(6), first=6).int()
    tensor([1, 0, 0, 0, 1, 1], dtype=torch.int32)
    """
    first = torch.as_tensor(first, device=key_positions.device)
    if max_length is None:
        blocks = Endless(Grid(first.unsqueeze(-1), key_positions), 1, 1)
    else:
        queries = torch.arange(int(first.min()), max_length, device=key_positions.device)
        blocks = Coming(Grid(queries, key_positions), ROWS, 1)
    gone = _gone(mask, blocks)
    return ~gone.expand(*gone.shape[:-2], *blocks.shape).reshape(-1, blocks.shape[1]).all(0)


def _gone(mask: Mask, blocks: Blocks) -> Tensor:
    """Where the mask says for certain that no pair exists."""
    if isinstance(mask, And):  # what one operand leaves out stays out, whatever the other one can tell
        return _gone(mask.left, blocks) | _gone(mask.right, blocks)
    try:
        return mask.keep(blocks).verdicts == EMPTY
    except (Undecided, RegardError, TypeError, AttributeError):  # it has no answer: nothing is known to be gone
        return torch.zeros(1, 1, dtype=torch.bool, device=blocks.device)


@dataclass(frozen=True, eq=False)
class Coming(Blocks):
    """Single keys against some queries yet to come: a tensor over the pairs of one call knows nothing of them."""

    def cut(self, pairs: Tensor) -> Any:
        raise Undecided("a tensor over pairs is of one call")


@dataclass(frozen=True, eq=False)
class Endless(Blocks):
    """Single keys against all queries from each sequence's one query of the grid on, without end: one row of tiles.

    A function of the queries' positions is asked about the interval; one that is beyond interval arithmetic raises.
    """

    @property
    def query(self) -> Interval:
        first = self.grid.query
        return Interval(first, torch.full_like(first, HORIZON))

    def by_query(self, function: Callable[[Tensor], Tensor]) -> Any:
        return function(Ahead(self.grid.query))  # type: ignore[arg-type]

    def cut(self, pairs: Tensor) -> Any:
        raise Undecided("a tensor over pairs is of one call")


@dataclass(frozen=True, eq=False)
class Ahead:
    """All positions from `first` on, as what a function is asked about: they know which others are among them.

    Any other question has no answer here.
    """

    first: Tensor

    @property
    def device(self) -> torch.device:
        """Where `first` is."""
        return self.first.device

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if function is torch.isin and not kwargs and isinstance(args[0], Ahead):
            some = (args[1] >= args[0].first[..., None]).any(-1)
            return Ternary.between(torch.zeros_like(some), some)  # never all of them, as they have no end
        return NotImplemented
