"""Sums over rows and over columns of the weights.

Sums of weights over groups of rows and columns: what pooled maps and the mass between segments are made of.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from .base import Frame, Tile, of_batch


class RowTerms:
    """Σ_j w_ij · log₂ w_ij of each row: `sums` (B, H, M)."""

    terms = True

    def __init__(self, frame: Frame) -> None:
        self.sums = frame.zeros(frame.queries)

    def add(self, tile: Tile) -> None:
        if tile.terms is not None:
            self.sums[tile.batch, :, tile.rows].add_(tile.terms.sum(-1))

    def native(self) -> native.RowTerms:
        return native.RowTerms(self.sums)


class ColumnSums:
    """Σ_i w_ij of each column: `sums` (B, H, N)."""

    terms = False

    def __init__(self, frame: Frame) -> None:
        self.sums = frame.zeros(frame.keys)

    def add(self, tile: Tile) -> None:
        self.sums[tile.batch, :, tile.columns].add_(tile.weights.sum(-2))

    def native(self) -> native.ColumnSums:
        return native.ColumnSums(self.sums)


@dataclass(frozen=True, eq=False, slots=True)
class _Members:
    """The groups in a stretch, a slice or (u,), and a 1 where a token is in one: (u, length) or (b, 1, u, length).

    A slice is what most stretches have, and much the fastest to add to. even: the groups come one after another, all
    of one size: their sums then need no product.
    """

    groups: Tensor | slice
    member: Tensor
    even: bool


class GroupSums:
    """Σ w over the rows of a group and the columns of a group, for each two groups.

    rows, columns: the group of each, (B or 1, M) and (B or 1, N), from 0; below 0 it is in none. sizes: how many groups
    of rows and of columns there are.
    """

    terms = False

    def __init__(self, frame: Frame, rows: Tensor, columns: Tensor, sizes: tuple[int, int]) -> None:
        self.frame, self.rows, self.columns = frame, rows, columns
        self.sums = frame.zeros(*sizes)
        self._known: dict[tuple, _Members] = {}
        self._of_rows: tuple[tuple, _Members] | None = None

    def add(self, tile: Tile) -> None:
        # Rows first: a product with so few rows as groups is a fast one, with so few columns a slow one.
        rows, columns = self._row_members(tile), self._column_members(tile)
        together = self._summed(tile, rows) @ columns.member.mT  # [b, H, u, v]
        sums, above = self.sums[tile.batch], rows.groups
        if isinstance(above, Tensor) and isinstance(columns.groups, Tensor):
            above = above[:, None]
        if isinstance(above, slice) and isinstance(columns.groups, slice):
            sums[:, :, above, columns.groups].add_(together)
        else:
            sums[:, :, above, columns.groups] += together

    def native(self) -> native.Cells | None:
        """Where all batches have the same groups, and those of rows come one after another."""
        if len(self.rows) != 1 or len(self.columns) != 1 or not native.grow(self.rows[0]):
            return None
        return native.Cells(self.rows[0], self.columns[0], self.sums)

    def broken(self, lse: Tensor) -> Tensor:
        """Which groups of rows have one that attends to NaN: (B, H, groups, 1)."""
        frame, groups = self.frame, self.sums.shape[-2]
        rows = self.rows[:, None].expand(frame.batch, frame.heads, frame.queries)
        found = torch.zeros(frame.batch, frame.heads, groups + 1, dtype=torch.bool, device=rows.device)
        rows = torch.where((rows >= 0) & frame.broken(lse), rows, groups)  # the last is dropped
        return found.scatter_(-1, rows, torch.ones_like(rows, dtype=torch.bool))[..., :-1, None]

    def _summed(self, tile: Tile, rows: _Members) -> Tensor:
        """The weights of a tile, summed over the rows of each group: (b, H, u, n)."""
        if rows.even:
            return tile.weights.unflatten(-2, (len(rows.member), -1)).sum(-2)
        return rows.member @ tile.weights

    def _row_members(self, tile: Tile) -> _Members:
        """The same for all tiles of a row of tiles, which come one after another."""
        key = (tile.batch.start, tile.batch.stop, tile.rows.start, tile.rows.stop)
        if self._of_rows is None or self._of_rows[0] != key:
            self._of_rows = key, _members(of_batch(self.rows, tile.batch)[:, tile.rows], tile.weights.dtype)
        return self._of_rows[1]

    def _column_members(self, tile: Tile) -> _Members:
        """Kept for the rows of tiles to come, in memory linear in the keys."""
        key = (tile.batch.start, tile.batch.stop, tile.columns.start, tile.columns.stop)
        if key not in self._known:
            if any(known[:2] != key[:2] for known in self._known):
                self._known.clear()
            groups = of_batch(self.columns, tile.batch)[:, tile.columns]
            self._known[key] = _members(groups, tile.weights.dtype)
        return self._known[key]


def _members(groups: Tensor, dtype: torch.dtype) -> _Members:
    """The members of a stretch whose groups are (b or 1, length)."""
    found, length = groups.unique(), groups.shape[-1]
    found = found[found >= 0]
    member = (groups.unsqueeze(-2) == found[:, None]).to(dtype)  # [b or 1, u, length]
    member = member.squeeze(0) if len(member) == 1 else member.unsqueeze(1)
    even = bool(len(found)) and len(groups) == 1 and length % len(found) == 0
    even = even and groups[0].equal(found.repeat_interleave(length // len(found)))
    if len(found) and int(found[-1] - found[0]) + 1 == len(found):
        return _Members(slice(int(found[0]), int(found[-1]) + 1), member, even)
    return _Members(found, member, even)
