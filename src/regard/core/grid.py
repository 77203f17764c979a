"""Rectangles of query-key pairs, on which masks and biases are evaluated as a whole or one tile at a time.

The pairs of a grid in tiles: the questions that a `Grid` answers per pair, answered once per tile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..errors import ShapeError
from .intervals import EMPTY as EMPTY
from .intervals import FULL as FULL
from .intervals import PARTIAL as PARTIAL
from .intervals import Interval, Ternary
from .symbolic_positions import Positions, positions_tensor

WHOLE = slice(None)


@dataclass(frozen=True, eq=False)
class Grid:
    """The pairs of `rows` × `columns`, and the positions of their queries and keys.

    Shapes: positions are (M,) or (*batch, M) and (N,) or (*batch, N), of the whole problem; `rows` and `columns`
    choose a tile of it. Where `heads` is true, the weights have a head axis in front of (M, N), and positions per
    batch get one too. ranges: the positions of queries and of keys where these are equally spaced, for what has to know
    them without reading a tensor.
    """

    query_positions: Tensor
    key_positions: Tensor
    heads: bool = True
    rows: slice = field(default_factory=lambda: WHOLE)
    columns: slice = field(default_factory=lambda: WHOLE)
    ranges: tuple[range | None, range | None] = (None, None)

    @classmethod
    def from_lengths(
        cls,
        queries: int,
        keys: int,
        *,
        query_positions: Positions | None = None,
        key_positions: Positions | None = None,
        heads: bool = True,
        device: torch.device | None = None,
    ) -> Grid:
        """The whole grid; without positions the keys are at 0..N-1, and the queries at the last M key positions.

        Raises:
            ShapeError: queries without positions that are more than the keys, which have positions.
        """
        if query_positions is None and key_positions is not None:
            if queries > keys:
                raise ShapeError(
                    f"{queries} queries cannot sit where the last of the {keys} keys sit: with key_positions, give "
                    "query_positions too"
                )
            last = slice(keys - queries, None)
            if isinstance(key_positions, range):
                query_positions = key_positions[last]
            else:
                query_positions = positions_tensor(key_positions, device)[..., last]
        if key_positions is None:
            key_positions = from_zero(keys, device)
        if query_positions is None:
            if torch.compiler.is_compiling():  # as `from_zero`
                query_positions = torch.arange(keys - queries, keys, device=device)
            else:
                query_positions = range(keys - queries, keys)
        ranges = (each if isinstance(each, range) else None for each in (query_positions, key_positions))
        query_range, key_range = ranges
        queries_at, keys_at = positions_tensor(query_positions, device), positions_tensor(key_positions, device)
        return cls(queries_at, keys_at, heads, ranges=(query_range, key_range))

    def tile(self, rows: slice, columns: slice) -> Grid:
        """The same pairs, cut to one tile."""
        return replace(self, rows=rows, columns=columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(M, N) of the tile."""
        queries, keys = self.query_positions.shape[-1], self.key_positions.shape[-1]
        return _length(queries, self.rows), _length(keys, self.columns)

    @property
    def device(self) -> torch.device:
        """The device of the positions."""
        return self.key_positions.device

    @property
    def query_range(self) -> range | None:
        """Positions of the tile's queries, where they are known as a range."""
        return None if self.ranges[0] is None else self.ranges[0][self.rows]

    @property
    def key_range(self) -> range | None:
        """Positions of the tile's keys, where they are known as a range."""
        return None if self.ranges[1] is None else self.ranges[1][self.columns]

    @property
    def query(self) -> Tensor:
        """Positions of the tile's queries, as a column: (..., M, 1)."""
        return self.by_query(lambda positions: positions)

    @property
    def key(self) -> Tensor:
        """Positions of the tile's keys, as a row: (..., 1, N)."""
        return self.by_key(lambda positions: positions)

    def by_query(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Tensor:
        """A function of the query positions, (..., M), as a column: (..., M, 1).

        It gets them as int64: smaller whole numbers would wrap round where they are subtracted. per_head: the results
        have an axis of heads, (..., heads, M).
        """
        column = function(self.query_positions[..., self.rows].long()).unsqueeze(-1)
        return column if per_head else self.per_batch(column)

    def by_key(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Tensor:
        """A function of the key positions, (..., N), as a row: (..., 1, N); per_head as in `by_query`."""
        row = function(self.key_positions[..., self.columns].long()).unsqueeze(-2)
        return row if per_head else self.per_batch(row)

    def by_head(self, heads: int) -> Tensor:
        """Head indices, (heads, 1, 1)."""
        return torch.arange(heads, device=self.device)[:, None, None]

    def per_batch(self, pairs: Tensor) -> Tensor:
        """Insert into (*batch, M, N) the head axis of the weights, if the problem has a batch."""
        return pairs.unsqueeze(-3) if self.heads and pairs.ndim > 2 else pairs

    def by_pair(self, function: Callable[[Grid], Tensor]) -> Tensor:
        """A function of the pairs of the tile, (..., M, N), that positions alone do not decide."""
        return function(self)

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


def _length(length: int, part: slice) -> int:
    """The length of a part of so many; of all of them as it is, as it may vary under torch.compile."""
    return length if part == WHOLE else len(range(length)[part])


def from_zero(length: int, device: torch.device | None) -> Tensor | range:
    """The positions 0..length-1: a range, or a tensor under torch.compile, which compiles anew for each other range."""
    return torch.arange(length, device=device) if torch.compiler.is_compiling() else range(length)


class HasShape(Protocol):
    """Protocol of values with a shape: tensors, intervals and ternaries."""

    @property
    def shape(self) -> torch.Size:
        """The sizes of its axes."""
        ...


def broadcast_together(left: HasShape, right: HasShape) -> bool:
    """Whether two tensors over pairs broadcast.

    >>> broadcast_together(torch.zeros(2, 1, 3), torch.zeros(5, 3))
    True
    """
    return all(a == b or 1 in (a, b) for a, b in zip(reversed(left.shape), reversed(right.shape), strict=False))


# Of each tile, an Interval where a grid has numbers and a Ternary where it has booleans: which of the two depends on a
# dtype, and types of tensors have none. A mask's formula ends in a comparison, whose type is known: `masks.base.Kept`.
Known: TypeAlias = Any


@dataclass(frozen=True, eq=False)
class Blocks:
    """A grid cut to tiles of `rows` × `columns` pairs, the last ones smaller; numbers become intervals, bools verdicts.

    A formula over a grid's positions, asked over its blocks, says of each tile which of its pairs can exist. It costs
    O(M + N + number of tiles): each position is looked at once, no pair is.

    >>> blocks = Blocks.from_grid(Grid.from_lengths(4, 4), 2)
    >>> (blocks.key <= blocks.query).verdicts
    tensor([[1, 0],
            [2, 1]], dtype=torch.int8)
    """

    grid: Grid
    rows: int
    columns: int

    @classmethod
    def from_grid(cls, grid: Grid, size: int | tuple[int, int]) -> Blocks:
        """The blocks of a grid; `size` is their rows and columns, or one number for both.

        Raises:
            ShapeError: a size that is no whole number of at least 1.
        """
        rows, columns = size if isinstance(size, tuple) and len(size) == 2 else (size, size)
        for length in (rows, columns):
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise ShapeError(
                    f"size is {size!r}; tiles need a whole number of rows and columns, at least 1: 128 or (64, 256)"
                )
        return cls(grid, rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        """How many rows and columns of tiles there are: (⌈M/rows⌉, ⌈N/columns⌉)."""
        queries, keys = self.grid.shape
        return -(-queries // self.rows), -(-keys // self.columns)

    @property
    def areas(self) -> Tensor:
        """How many pairs each tile has: (⌈M/rows⌉, ⌈N/columns⌉)."""
        (queries, keys), (down, across) = self.grid.shape, self.shape
        heights = (queries - torch.arange(down, device=self.device) * self.rows).clamp(max=self.rows)
        widths = (keys - torch.arange(across, device=self.device) * self.columns).clamp(max=self.columns)
        return heights[:, None] * widths

    def tile(self, row: int, column: int) -> Grid:
        """The pairs of one tile."""
        queries, keys = self.grid.shape
        above, left = self.grid.rows.start or 0, self.grid.columns.start or 0
        rows = slice(above + row * self.rows, above + min((row + 1) * self.rows, queries))
        columns = slice(left + column * self.columns, left + min((column + 1) * self.columns, keys))
        return self.grid.tile(rows, columns)

    @property
    def device(self) -> torch.device:
        """The device of the positions."""
        return self.grid.device

    @property
    def heads(self) -> bool:
        """Whether the weights have a head axis."""
        return self.grid.heads

    @cached_property
    def query(self) -> Interval:
        """Positions of the queries of each row of tiles, as a column: (..., ⌈M/rows⌉, 1)."""
        return Interval(*self._extremes(self.grid.query))

    @cached_property
    def key(self) -> Interval:
        """Positions of the keys of each column of tiles, as a row: (..., 1, ⌈N/columns⌉)."""
        return Interval(*self._extremes(self.grid.key))

    def by_query(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Known:
        """A function of the query positions, (..., M), as a column: (..., ⌈M/rows⌉, 1)."""
        return self._known(self.grid.by_query(function, per_head=per_head))

    def by_key(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Known:
        """A function of the key positions, (..., N), as a row: (..., 1, ⌈N/columns⌉)."""
        return self._known(self.grid.by_key(function, per_head=per_head))

    def by_head(self, heads: int) -> Tensor:
        """Head indices, (heads, 1, 1)."""
        return self.grid.by_head(heads)

    def per_batch(self, pairs: Tensor) -> Tensor:
        """Insert into (*batch, M, N) the head axis of the weights, if the problem has a batch."""
        return self.grid.per_batch(pairs)

    def cut(self, pairs: Tensor) -> Known:
        """The tiles of a tensor over all pairs, (..., M|1, N|1); axes of size 1 stay, they broadcast. O(its size)."""
        return self._known(self.grid.cut(pairs))

    def _known(self, pairs: Tensor) -> Known:
        low, high = self._extremes(pairs)
        return Ternary.between(low, high) if pairs.dtype == torch.bool else Interval(low, high)

    def _extremes(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        """The least and the greatest in each tile; False is less than True."""
        low = high = pairs
        for axis, size in ((-1, self.columns), (-2, self.rows)):
            low = _by_tile(torch.amin, low, axis, size)
            high = _by_tile(torch.amax, high, axis, size)
        return low, high


def _by_tile(reduce: Callable[..., Tensor], values: Tensor, axis: int, size: int) -> Tensor:
    """Reduce each block of `size` along an axis; the last block may be smaller."""
    length = values.shape[axis]
    if size == 1 or length == 1:
        return values
    whole = length - length % size
    tiles = reduce(values.narrow(axis, 0, whole).unflatten(axis, (whole // size, size)), axis)
    if whole == length:
        return tiles
    return torch.cat([tiles, reduce(values.narrow(axis, whole, length - whole), axis, keepdim=True)], axis)
