"""The keys of a cache that a future query may attend to, by interval arithmetic; all others can be evicted.

The mask is evaluated over all future queries at once.
"""

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

MAX_POSITION = 2**40
"""The upper end of the interval of future positions; sums and products with it stay within int64."""
QUERIES_PER_TILE = 64
"""The number of rows of one tile where the number of future queries is known."""


def keys_to_retain(
    mask: Mask, key_positions: Tensor, first_query: Tensor | int, max_length: int | None = None
) -> Tensor:
    """Which keys a query at position `first_query` or later may attend to, in any batch row and head: bool, (N,).

    A key can be evicted where the mask is EMPTY for the tile of that key and all those queries. This is conservative:
    where interval arithmetic cannot decide, the key is retained. A mask made for a length, which looks positions up in
    a tensor, can be decided only with `max_length`, for queries below it.

    Shapes: key_positions (N,) or (batch, N); first_query a number or (batch,).

    >>> from regard import masks
    >>> mask = masks.causal() & (masks.window(before=2) | masks.prefix(1))
    >>> keys_to_retain(mask, torch.arange(6), first_query=6).int()
    tensor([1, 0, 0, 0, 1, 1], dtype=torch.int32)
    """
    first_query = torch.as_tensor(first_query, device=key_positions.device)
    if max_length is None:
        tiles = UnboundedQueries(Grid(first_query.unsqueeze(-1), key_positions), 1, 1)
    else:
        queries = torch.arange(int(first_query.min()), max_length, device=key_positions.device)
        tiles = BoundedQueries(Grid(queries, key_positions), QUERIES_PER_TILE, 1)
    empty = _certainly_empty(mask, tiles)  # (..., tiles of queries, N)
    return ~empty.expand(*empty.shape[:-2], *tiles.shape).reshape(-1, tiles.shape[1]).all(0)


def _certainly_empty(mask: Mask, tiles: Blocks) -> Tensor:
    """Tiles in which the mask allows no pair for certain."""
    if isinstance(mask, And):  # a tile that is empty for one operand is empty, even if the other cannot be decided
        return _certainly_empty(mask.left, tiles) | _certainly_empty(mask.right, tiles)
    try:
        return mask.evaluate(tiles).verdicts == EMPTY
    except RegardError:  # positions outside those that the mask was made for: retain all keys
        return torch.zeros(1, 1, dtype=torch.bool, device=tiles.device)


@dataclass(frozen=True, eq=False)
class BoundedQueries(Blocks):
    """Tiles of one key and up to 64 future queries; a tensor over the pairs of one call does not cover them."""

    def cut(self, pairs: Tensor) -> Any:
        raise Undecided("a tensor over pairs is of one call")


@dataclass(frozen=True, eq=False)
class UnboundedQueries(Blocks):
    """Tiles of one key and all queries from the grid's single query on: a single row of tiles.

    The query positions are one interval. A function of query positions is evaluated on `PositionsFrom`, and raises
    `Undecided` or `TypeError` where it does more than `torch.isin`.
    """

    @property
    def query(self) -> Interval:
        first = self.grid.query
        return Interval(first, torch.full_like(first, MAX_POSITION))

    def by_query(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Any:
        return function(PositionsFrom(self.grid.query))  # type: ignore[arg-type]

    def cut(self, pairs: Tensor) -> Any:
        raise Undecided("a tensor over pairs is of one call")


@dataclass(frozen=True, eq=False)
class PositionsFrom:
    """All positions from `first` on, in place of a tensor of positions: only `torch.isin(self, others)` is defined."""

    first: Tensor

    @property
    def device(self) -> torch.device:
        """Device of `first`."""
        return self.first.device

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: object, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> object:
        if function is torch.isin and not kwargs and isinstance(args[0], PositionsFrom):
            some = (args[1] >= args[0].first[..., None]).any(-1)
            return Ternary.between(torch.zeros_like(some), some)  # never FULL: there are infinitely many positions
        return NotImplemented
