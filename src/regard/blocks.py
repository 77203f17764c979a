"""The pairs of a grid in tiles: the questions that a `Grid` answers per pair, answered once per tile."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from .errors import ShapeError
from .intervals import Interval, Ternary
from .tiles import Grid

Known: TypeAlias = Any  # of each tile: an Interval where a grid has numbers, a Ternary where it has booleans


@dataclass(frozen=True, eq=False)
class Blocks:
    """A grid cut to tiles of `rows` × `columns` pairs, the last ones smaller; numbers become intervals, bools verdicts.

    A formula over a grid's positions, asked over its blocks, says of each tile which of its pairs can exist. It costs
    O(M + N + number of tiles): each position is looked at once, no pair is.

    >>> blocks = Blocks.of(Grid.of(4, 4), 2)
    >>> (blocks.key <= blocks.query).verdicts
    tensor([[1, 0],
            [2, 1]], dtype=torch.int8)
    """

    grid: Grid
    rows: int
    columns: int

    @classmethod
    def of(cls, grid: Grid, size: int | tuple[int, int]) -> Blocks:
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
        """Where the positions are, and so everything that is said of the tiles."""
        return self.grid.device

    @property
    def heads(self) -> bool:
        """Whether the weights have a head axis."""
        return self.grid.heads

    @property
    def query(self) -> Interval:
        """Positions of the queries of each row of tiles, as a column: (..., ⌈M/rows⌉, 1)."""
        return Interval(*self._extremes(self.grid.query))

    @property
    def key(self) -> Interval:
        """Positions of the keys of each column of tiles, as a row: (..., 1, ⌈N/columns⌉)."""
        return Interval(*self._extremes(self.grid.key))

    def by_query(self, function: Callable[[Tensor], Tensor]) -> Known:
        """What a function says of the positions of the queries, (..., M), as a column: (..., ⌈M/rows⌉, 1)."""
        return self._known(self.grid.by_query(function))

    def by_key(self, function: Callable[[Tensor], Tensor]) -> Known:
        """What a function says of the positions of the keys, (..., N), as a row: (..., 1, ⌈N/columns⌉)."""
        return self._known(self.grid.by_key(function))

    def by_head(self, heads: int) -> Tensor:
        """The numbers of the heads, as a leading axis: (heads, 1, 1)."""
        return self.grid.by_head(heads)

    def per_batch(self, pairs: Tensor) -> Tensor:
        """Give (*batch, M, N) the head axis that the weights have, where there is a batch."""
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
    """One value for each `size` along an axis counted from the end; what is left over makes one more."""
    length = values.shape[axis]
    if size == 1 or length == 1:
        return values
    whole = length - length % size
    tiles = reduce(values.narrow(axis, 0, whole).unflatten(axis, (whole // size, size)), axis)
    if whole == length:
        return tiles
    return torch.cat([tiles, reduce(values.narrow(axis, whole, length - whole), axis, keepdim=True)], axis)
