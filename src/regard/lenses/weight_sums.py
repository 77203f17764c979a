"""Reductions that several lenses share: sums over rows, over columns, and over groups of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import native
from .base import WeightsLayout, WeightTile, select_batches


class RowEntropySums:
    """Σ_j w_ij · log₂ w_ij of each row: `sums` (B, H, M)."""

    needs_entropy_terms = True

    def __init__(self, layout: WeightsLayout) -> None:
        self.sums = layout.zeros(layout.queries)

    def add(self, tile: WeightTile) -> None:
        if tile.entropy_terms is not None:
            self.sums[tile.batch, :, tile.rows].add_(tile.entropy_terms.sum(-1))

    def native(self) -> native.RowEntropySums:
        return native.RowEntropySums(self.sums)


class ColumnSums:
    """Σ_i w_ij of each column: `sums` (B, H, N)."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout) -> None:
        self.sums = layout.zeros(layout.keys)

    def add(self, tile: WeightTile) -> None:
        self.sums[tile.batch, :, tile.columns].add_(tile.weights.sum(-2))

    def native(self) -> native.ColumnWeightSums:
        return native.ColumnWeightSums(self.sums)


@dataclass(frozen=True, eq=False, slots=True)
class _GroupMembers:
    """The groups of a range of tokens, a slice or (u,), and their membership matrix: (u, length) or (b, 1, u, length).

    groups is a slice where the numbers are consecutive, which is usual and much the fastest to index. even: the groups
    follow one another and have one size, so that sums need no matrix product.
    """

    groups: Tensor | slice
    member: Tensor
    even: bool


class GroupSums:
    """Σ w over the rows of group u and the columns of group v, for all u and v: `sums` (B, H, *sizes).

    rows, columns: the group of each, (B or 1, M) and (B or 1, N), from 0; negative for none. sizes: the number of
    groups of rows and of columns.
    """

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout, rows: Tensor, columns: Tensor, sizes: tuple[int, int]) -> None:
        self.layout, self.rows, self.columns = layout, rows, columns
        self.sums = layout.zeros(*sizes)
        self._column_cache: dict[tuple, _GroupMembers] = {}
        self._row_cache: tuple[tuple, _GroupMembers] | None = None

    def add(self, tile: WeightTile) -> None:
        # Rows first: a matrix product with few rows is faster than one with few columns.
        rows, columns = self._row_members(tile), self._column_members(tile)
        products = self._row_sums(tile, rows) @ columns.member.mT  # [b, H, u, v]
        sums, row_groups = self.sums[tile.batch], rows.groups
        if isinstance(row_groups, Tensor) and isinstance(columns.groups, Tensor):
            row_groups = row_groups[:, None]
        if isinstance(row_groups, slice) and isinstance(columns.groups, slice):
            sums[:, :, row_groups, columns.groups].add_(products)
        else:
            sums[:, :, row_groups, columns.groups] += products

    def native(self) -> native.CellReduction | None:
        """Supported where all batches have the same groups, and the groups of rows never decrease."""
        if len(self.rows) != 1 or len(self.columns) != 1 or not native.never_decrease(self.rows[0]):
            return None
        return native.CellReduction(self.rows[0], self.columns[0], self.sums)

    def nan_groups(self, lse: Tensor) -> Tensor:
        """Which groups of rows contain one that attends to NaN: bool (B, H, groups, 1)."""
        layout, groups = self.layout, self.sums.shape[-2]
        rows = self.rows[:, None].expand(layout.batch, layout.heads, layout.queries)
        found = torch.zeros(layout.batch, layout.heads, groups + 1, dtype=torch.bool, device=rows.device)
        # Group number `groups` collects the other rows, and is dropped.
        rows = torch.where((rows >= 0) & layout.nan_rows(lse), rows, groups)
        return found.scatter_(-1, rows, torch.ones_like(rows, dtype=torch.bool))[..., :-1, None]

    def _row_sums(self, tile: WeightTile, rows: _GroupMembers) -> Tensor:
        """The weights of a tile, summed over the rows of each group: (b, H, u, n)."""
        if rows.even:
            return tile.weights.unflatten(-2, (len(rows.member), -1)).sum(-2)
        return rows.member @ tile.weights

    def _row_members(self, tile: WeightTile) -> _GroupMembers:
        """Cached for the tiles of one row of tiles, which follow one another."""
        key = (tile.batch.start, tile.batch.stop, tile.rows.start, tile.rows.stop)
        if self._row_cache is None or self._row_cache[0] != key:
            groups = select_batches(self.rows, tile.batch)[:, tile.rows]
            self._row_cache = key, _group_members(groups, tile.weights.dtype)
        return self._row_cache[1]

    def _column_members(self, tile: WeightTile) -> _GroupMembers:
        """Cached for the next rows of tiles, in memory linear in the keys."""
        key = (tile.batch.start, tile.batch.stop, tile.columns.start, tile.columns.stop)
        if key not in self._column_cache:
            if any(cached[:2] != key[:2] for cached in self._column_cache):
                self._column_cache.clear()
            groups = select_batches(self.columns, tile.batch)[:, tile.columns]
            self._column_cache[key] = _group_members(groups, tile.weights.dtype)
        return self._column_cache[key]


def _group_members(groups: Tensor, dtype: torch.dtype) -> _GroupMembers:
    """The groups of a range of tokens whose group numbers are (b or 1, length)."""
    found, length = groups.unique(), groups.shape[-1]
    found = found[found >= 0]
    member = (groups.unsqueeze(-2) == found[:, None]).to(dtype)  # [b or 1, u, length]
    member = member.squeeze(0) if len(member) == 1 else member.unsqueeze(1)
    even = bool(len(found)) and len(groups) == 1 and length % len(found) == 0
    even = even and groups[0].equal(found.repeat_interleave(length // len(found)))
    if len(found) and int(found[-1] - found[0]) + 1 == len(found):
        return _GroupMembers(slice(int(found[0]), int(found[-1]) + 1), member, even)
    return _GroupMembers(found, member, even)
