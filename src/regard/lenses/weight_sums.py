"""Sums of the weights over rows, over columns and over groups of both, and the lenses Entropy and Received.

Entropy sums w · log w over each row, Received sums w over each column.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.problem import Problem
from .base import Reduction, RowShard, WeightsLayout, WeightTile, select_batches
from .forms import CellReduction, ColumnSums, EntropySums, never_decrease


class RowEntropySums:
    """Σ_j w_ij · log₂ w_ij of each row: `sums` (B, H, M)."""

    needs_entropy_terms = True

    def __init__(self, layout: WeightsLayout) -> None:
        self.sums = layout.zeros(layout.queries)

    def add(self, tile: WeightTile) -> None:
        if tile.entropy_terms is not None:
            self.sums[tile.batch, :, tile.rows].add_(tile.entropy_terms.sum(-1))

    def native(self) -> EntropySums:
        return EntropySums(self.sums)


class RowWeightSums:
    """Σ_j w_ij of each row: `sums` (B, H, M)."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout) -> None:
        self.sums = layout.zeros(layout.queries)

    def add(self, tile: WeightTile) -> None:
        self.sums[tile.batch, :, tile.rows].add_(tile.weights.sum(-1))


class ColumnWeightSums:
    """Σ_i w_ij of each column: `sums` (B, H, N)."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout) -> None:
        self.sums = layout.zeros(layout.keys)

    def add(self, tile: WeightTile) -> None:
        self.sums[tile.batch, :, tile.columns].add_(tile.weights.sum(-2))

    def native(self) -> ColumnSums:
        return ColumnSums(self.sums)


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

    rows, columns: the group of each, (B or 1, M) and (B or 1, N), from 0; negative for none; on the CPU, so that no
    device is waited for. sizes: the number of groups of rows and of columns.
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

    def native(self) -> CellReduction | None:
        """Supported where all batches have the same groups, and the groups of rows never decrease."""
        if len(self.rows) != 1 or len(self.columns) != 1 or not never_decrease(self.rows[0]):
            return None
        return CellReduction(self.rows[0], self.columns[0], self.sums)

    def nan_groups(self, lse: Tensor) -> Tensor:
        """Which groups of rows contain one that attends to NaN: bool (B, H, groups, 1)."""
        layout, groups = self.layout, self.sums.shape[-2]
        rows = self.rows.to(lse.device, non_blocking=True)[:, None].expand(layout.batch, layout.heads, layout.queries)
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
            self._row_cache = key, _group_members(groups, tile.weights)
        return self._row_cache[1]

    def _column_members(self, tile: WeightTile) -> _GroupMembers:
        """Cached for the next rows of tiles, in memory linear in the keys."""
        key = (tile.batch.start, tile.batch.stop, tile.columns.start, tile.columns.stop, tile.columns.step)
        if key not in self._column_cache:
            if any(cached[:2] != key[:2] for cached in self._column_cache):
                self._column_cache.clear()
            groups = select_batches(self.columns, tile.batch)[:, tile.columns]
            self._column_cache[key] = _group_members(groups, tile.weights)
        return self._column_cache[key]


def _group_members(groups: Tensor, weights: Tensor) -> _GroupMembers:
    """The groups of a range of tokens whose group numbers, on the CPU, are (b or 1, length), for tiles of weights."""
    found, length = groups.unique(), groups.shape[-1]
    found = found[found >= 0]
    own, each = (numbers.to(weights.device, non_blocking=True) for numbers in (groups, found))
    member = (own.unsqueeze(-2) == each[:, None]).to(weights.dtype)  # [b or 1, u, length]
    member = member.squeeze(0) if len(member) == 1 else member.unsqueeze(1)
    even = bool(len(found)) and len(groups) == 1 and length % len(found) == 0
    even = even and groups[0].equal(found.repeat_interleave(length // len(found)))
    if len(found) and int(found[-1] - found[0]) + 1 == len(found):
        return _GroupMembers(slice(int(found[0]), int(found[-1]) + 1), member, even)
    return _GroupMembers(each, member, even)


@dataclass(frozen=True)
class Entropy:
    """-Σ_j w_ij · ln w_ij for each row i: (..., heads, M), in nats; 0 for a row that attends to nothing.

    Between 0, where one key has all the weight, and ln N, where all have as much; its exponential is how many keys a
    row attends to in effect. The weight of a sink is no term of the sum. Of a normalizer whose rows do not sum to 1,
    such as `normalizers.Sigmoid`, it is that of the weights divided by their sum. Dropout is not applied. No autograd.

    Source: Shannon 1948, A Mathematical Theory of Communication, section 6; for attention Clark et al. 2019
    (arXiv 1906.04341, section 3.3), who average over the rows of a corpus.

    >>> import torch, regard
    >>> spread = regard.lenses.Entropy()
    >>> regard.observe(torch.zeros(2, 4), torch.zeros(3, 4), torch.ones(3, 1), spread)[spread].exp()
    tensor([3., 3.])
    """

    def start(self, problem: Problem) -> _EntropyState:
        """The state of one run."""
        normalizer = problem.normalizer
        return _EntropyState(WeightsLayout.from_problem(problem), normalizer is None or normalizer.sums_to_one)

    def start_shard(self, problem: Problem, shard: RowShard) -> _EntropyState:
        """The state of one run over the rows of one process."""
        return self.start(problem)


class _EntropyState:
    """-Σ w · log w of each row; of rows that do not sum to 1, that of their shares."""

    def __init__(self, layout: WeightsLayout, sums_to_one: bool) -> None:
        self.layout, self.rows = layout, RowEntropySums(layout)
        self.mass = None if sums_to_one else RowWeightSums(layout)
        self.reductions: tuple[Reduction, ...] = (self.rows,) if self.mass is None else (self.rows, self.mass)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        terms = self.rows.sums
        if self.mass is not None:  # Σ w/m · log w/m = (Σ w · log w) / m - log m
            mass = torch.where(self.mass.sums > 0, self.mass.sums, 1.0)
            terms = terms / mass - mass.log2()
        # Rounding may make a weight larger than 1, and its term then negative. 0.0 - x: a sum of 0 gives 0, not -0.
        entropy = (0.0 - math.log(2) * terms).clamp_(min=0.0)
        return self.layout.to_result(entropy.masked_fill_(self.layout.nan_rows(lse), math.nan))


@dataclass(frozen=True)
class Received:
    """Σ_i w_ij for each key j, the column sums of the weights: (..., heads, N).

    All of a head sum to the number of rows that attend to something, less the weight of sinks; with M queries and N
    keys M / N is an equal share. heads are query heads, also where several share a key head. One row that attends to
    NaN makes all columns of its head NaN. Dropout is not applied. No autograd.

    Source: the "heavy hitters" of Zhang et al. 2023 (arXiv 2306.14048, section 3), here of all queries at once.

    >>> import torch, regard
    >>> received = regard.lenses.Received()
    >>> q = torch.zeros(3, 4)
    >>> regard.observe(q, q, q, received, mask=regard.masks.causal())[received]
    tensor([1.8333, 0.8333, 0.3333])
    """

    def start(self, problem: Problem) -> _ReceivedState:
        """The state of one run."""
        return _ReceivedState(WeightsLayout.from_problem(problem))

    def start_shard(self, problem: Problem, shard: RowShard) -> _ReceivedState:
        """The state of one run over the rows of one process."""
        return _ReceivedState(WeightsLayout.from_problem(problem, shard))


class _ReceivedState:
    """Σ w of each column."""

    def __init__(self, layout: WeightsLayout) -> None:
        self.layout, self.columns = layout, ColumnWeightSums(layout)
        self.reductions = (self.columns,)

    def finish(self, problem: Problem, lse: Tensor) -> Tensor:
        broken = self.layout.nan_rows(lse).any(-1, keepdim=True)  # [B, H, 1]
        return self.layout.to_result(self.layout.total(self.columns.sums.masked_fill(broken, math.nan)))
