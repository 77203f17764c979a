"""Rectangles of query-key pairs: what a mask or a bias is asked about, whole or one tile at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from .errors import ShapeError

WHOLE = slice(None)

# What a mask says of a tile: no pair exists, every pair does, or neither is certain. PARTIAL promises nothing.
EMPTY, PARTIAL, FULL = 0, 1, 2


@dataclass(frozen=True, eq=False)
class Grid:
    """The pairs of `rows` × `columns`, and the positions at which their queries and keys sit.

    Shapes: positions are (M,) or (*batch, M) and (N,) or (*batch, N), of the whole problem; `rows` and `columns`
    choose a tile of it. Where `heads` is true, the weights have a head axis in front of (M, N), and positions per
    batch get one too.
    """

    query_positions: Tensor
    key_positions: Tensor
    heads: bool = True
    rows: slice = field(default_factory=lambda: WHOLE)
    columns: slice = field(default_factory=lambda: WHOLE)

    @classmethod
    def of(
        cls,
        queries: int,
        keys: int,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        heads: bool = True,
        device: torch.device | None = None,
    ) -> Grid:
        """The whole grid; unless told otherwise keys sit at 0..N-1 and queries where the last M keys sit.

        Raises:
            ShapeError: queries without positions that are more than the keys, which have positions.
        """
        if query_positions is None and key_positions is not None:
            if queries > keys:
                raise ShapeError(
                    f"{queries} queries cannot sit where the last of the {keys} keys sit: with key_positions, give "
                    "query_positions too"
                )
            query_positions = key_positions[..., keys - queries :]
        if key_positions is None:
            key_positions = torch.arange(keys, device=device)
        if query_positions is None:
            query_positions = torch.arange(keys - queries, keys, device=device)
        return cls(query_positions, key_positions, heads)

    def tile(self, rows: slice, columns: slice) -> Grid:
        """The same pairs, cut to one tile."""
        return replace(self, rows=rows, columns=columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N) of the tile."""
        queries, keys = self.query_positions.shape[-1], self.key_positions.shape[-1]
        return len(range(queries)[self.rows]), len(range(keys)[self.columns])

    @property
    def device(self) -> torch.device:
        """Where the positions are, and so everything that is said of the pairs."""
        return self.key_positions.device

    @property
    def query(self) -> Tensor:
        """Positions of the tile's queries, as a column: (..., M, 1)."""
        return self.by_query(lambda positions: positions)

    @property
    def key(self) -> Tensor:
        """Positions of the tile's keys, as a row: (..., 1, N)."""
        return self.by_key(lambda positions: positions)

    def by_query(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function says of the positions of the queries, (..., M), as a column: (..., M, 1).

        It gets them as int64: smaller whole numbers would wrap round where they are subtracted.
        """
        return self.per_batch(function(self.query_positions[..., self.rows].long()).unsqueeze(-1))

    def by_key(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function says of the positions of the keys, (..., N), as a row: (..., 1, N)."""
        return self.per_batch(function(self.key_positions[..., self.columns].long()).unsqueeze(-2))

    def by_head(self, heads: int) -> Tensor:
        """The numbers of the heads, as a leading axis: (heads, 1, 1)."""
        return torch.arange(heads, device=self.device)[:, None, None]

    def per_batch(self, pairs: Tensor) -> Tensor:
        """Give (*batch, M, N) the head axis that the weights have, where there is a batch."""
        return pairs.unsqueeze(-3) if self.heads and pairs.ndim > 2 else pairs

    def cut(self, pairs: Tensor) -> Tensor:
        """The tile's part of a tensor over all pairs, (..., M|1, N|1); axes of size 1 stay, they broadcast."""
        queries, keys = self.query_positions.shape[-1], self.key_positions.shape[-1]
        if pairs.shape[-2] not in (1, queries) or pairs.shape[-1] not in (1, keys):
            raise ShapeError(
                f"a tensor over pairs has the shape {tuple(pairs.shape)}, but there are {queries} queries and {keys} "
                f"keys: its last two axes need the sizes {queries} or 1, and {keys} or 1"
            )
        if pairs.shape[-2] != 1:
            pairs = pairs[..., self.rows, :]
        if pairs.shape[-1] != 1:
            pairs = pairs[..., self.columns]
        return pairs


class HasShape(Protocol):
    """A tensor, or what is known of one."""

    @property
    def shape(self) -> torch.Size:
        """The sizes of its axes."""
        ...


def broadcast_together(left: HasShape, right: HasShape) -> bool:
    """Whether two tensors over pairs can be joined element by element.

    >>> broadcast_together(torch.zeros(2, 1, 3), torch.zeros(5, 3))
    True
    """
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(left.shape), reversed(right.shape), strict=False))
