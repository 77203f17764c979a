"""Relative position biases: functions of head and distance alone, such as the learned tables of T5 and Shaw et al.

They are evaluated once per diagonal of a tile, M + N - 1 numbers per head, instead of once per pair.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..core.finite import waits
from ..core.grid import Grid
from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..utils.numbers import whole_number
from .base import Bias, add_gradients, any_needed, describe_tensor, is_floating, leaves, summed_to

ROWS_AT_ONCE = 128
"""The number of rows whose diagonals are summed at once: their skewed copy is as many columns wider than they are."""


class RelativeBias(Bias):
    """A bias that depends on the head and on *key position - query position* alone. Subclasses implement `values_at`.

    If the positions of a tile are consecutive, M + N - 1 numbers per head determine it, one per diagonal.
    """

    @abstractmethod
    def values_at(self, distances: Tensor) -> Tensor:
        """The bias at each distance, *key position - query position*.

        Shapes: int64 of any shape to (heads, *distances.shape), floating point.
        """

    def values(self, grid: Grid) -> Tensor:
        distances = diagonals(grid)
        if distances is None:
            return self._pair_by_pair(grid)
        line = self.values_at(distances)  # [H, M + N - 1]
        # One window of the line for each query; the window of the last query is the first one.
        return _match_head_axis(grid, line.unfold(-1, grid.key.shape[-1], 1).flip(-2))  # [H, M, N]

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Sum the gradient over each diagonal of the tile, then differentiate `values_at` at M + N - 1 distances."""
        distances = diagonals(grid)
        if distances is None:
            super().accumulate(grid, upstream, into)
        elif any_needed(into):
            per_head = summed_to(upstream, upstream.shape[-3:])  # the batch shares the bias
            self.accumulate_at(distances, diagonal_sums(per_head), into)

    def accumulate_at(self, distances: Tensor, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient of Σ upstream · values_at(distances) in each of the parameters to the tensors of `into`.

        Shapes: distances (D,), upstream (..., heads, D). A kernel may sum the `diagonal_sums` of all its tiles and call
        this once, at the end.
        """
        if any_needed(into):
            with torch.enable_grad():
                parameters = leaves(self, into)
                line = self.with_parameters(parameters).values_at(distances)
            add_gradients(line, summed_to(upstream, line.shape), parameters, into)

    def _pair_by_pair(self, grid: Grid) -> Tensor:
        """The values for positions that are not consecutive, or differ between the sequences of the batch."""
        distances = grid.key - grid.query  # [M, N] or [*batch, 1, M, N], without the 1 where there are no heads
        if distances.ndim > 2 and grid.heads:
            distances = distances.squeeze(-3)
        return _match_head_axis(grid, self.values_at(distances).movedim(0, -3))


def _match_head_axis(grid: Grid, values: Tensor) -> Tensor:
    """Values per head, (..., heads, M, N), without a head axis of size 1 if the weights have none."""
    return values.squeeze(-3) if not grid.heads and values.shape[-3] == 1 else values


def diagonals(grid: Grid) -> Tensor | None:
    """The distance of each diagonal of a tile, from the lower left corner to the upper right one.

    Shapes: (M + N - 1,), consecutive; pair (i, j) is on diagonal j - i + M - 1. None if positions are not consecutive,
    differ between the sequences of a batch, or have no values under a transform; off the CPU, if they are no ranges.

    >>> diagonals(Grid.from_lengths(2, 3))
    tensor([-2, -1,  0,  1])
    """
    query, key = grid.query, grid.key
    if under_transform() or query.ndim > 2 or key.ndim > 2 or not query.numel() or not key.numel():
        return None
    if waits(key):
        of_queries, of_keys = grid.query_range, grid.key_range
        if of_queries is None or of_keys is None or not of_queries.step == of_keys.step == 1:
            return None
        return torch.arange(of_keys[0] - of_queries[-1], of_keys[-1] - of_queries[0] + 1, device=key.device)
    query, key = query.flatten(), key.flatten()
    consecutive = (query.diff() == 1).all() & (key.diff() == 1).all()
    usable, lowest = torch.stack(
        [consecutive.long(), key[0] - query[-1]]
    ).tolist()  # one synchronisation with the device
    return torch.arange(lowest, lowest + len(query) + len(key) - 1, device=key.device) if usable else None


def diagonal_sums(upstream: Tensor) -> Tensor:
    """The sum over each diagonal of a tile: (..., M, N) to (..., M + N - 1), in float32 at least.

    Pair (i, j) is on diagonal j - i + M - 1: the gradient in the values of a tile becomes the gradient in `values_at`
    of its `diagonals`.

    >>> diagonal_sums(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    tensor([10., 21., 32.,  3.])
    """
    upstream = at_least_float32(upstream)
    rows, columns = upstream.shape[-2:]
    sums = upstream.new_zeros(*upstream.shape[:-2], max(rows + columns - 1, 0))
    for start in range(0, rows if columns else 0, ROWS_AT_ONCE):
        block = upstream[..., start : start + ROWS_AT_ONCE, :]
        first = rows - start - block.shape[-2]
        sums[..., first : first + block.shape[-2] + columns - 1] += _skewed(block).sum(-2)
    return sums


def _skewed(block: Tensor) -> Tensor:
    """(..., M, N) as (..., M, M + N - 1), padded with zeros, each row shifted one place left of the row above it.

    Rows written with a stride of M + N - 2 and read with a stride of M + N - 1 are shifted by one place each.
    """
    rows, columns = block.shape[-2:]
    if rows == 1:
        return block
    stride = rows + columns - 2
    flat = block.new_zeros(*block.shape[:-2], rows * (stride + 1))
    flat[..., rows - 1 : rows - 1 + rows * stride].unflatten(-1, (rows, stride))[..., :columns] = block
    return flat.unflatten(-1, (rows, stride + 1))


def table_of(table: object, maker: str, columns: str) -> Tensor:
    """Validate a learned table (heads, columns); `maker` and `columns` are for the message."""
    if not is_floating(table):
        has = table.dtype if isinstance(table, Tensor) else f"a {type(table).__name__}"
        raise DtypeError(f"{maker} needs a floating-point table (heads, {columns}); this is {has}")
    if table.ndim != 2 or not table.shape[0]:
        raise ShapeError(
            f"{maker} needs a table of the shape (heads, {columns}) with at least one head; this one has "
            f"{tuple(table.shape)}"
        )
    return table


def select_columns(table: Tensor, index: Tensor) -> Tensor:
    """Select columns of a table: (heads, columns) to (heads, *index.shape), in float32 at least."""
    index, table = index.to(table.device), at_least_float32(table)
    if index.ndim == 1:
        return table.index_select(-1, index)
    return table.index_select(-1, index.flatten()).reshape(table.shape[0], *index.shape)


class ColumnRule(ABC):
    """Which column of a table a distance reads. Subclasses are frozen dataclasses of numbers."""

    @abstractmethod
    def columns(self, distances: Tensor) -> Tensor:
        """The column of each distance, *key position - query position*; whole numbers of any shape."""


class TableBias(RelativeBias):
    """table[head, column of the distance], for a `table` (heads, columns) and a `rule` for the columns."""

    table: Tensor

    @property
    @abstractmethod
    def rule(self) -> ColumnRule:
        """The column of each distance."""

    def values_at(self, distances: Tensor) -> Tensor:
        return select_columns(self.table, self.rule.columns(distances))

    def accumulate_at(self, distances: Tensor, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        self.accumulate_columns(self.rule.columns(distances), upstream, into)

    def accumulate_columns(self, columns: Tensor, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """`accumulate_at` of distances with these columns, (D,): each column gets the sum of those that read it."""
        (target,) = into
        if target is not None:
            sums = summed_to(upstream, (self.table.shape[0], len(columns)))
            target.index_add_(-1, columns.to(target.device), sums.to(target.dtype))


@dataclass(frozen=True, slots=True)
class BucketRule(ColumnRule):
    """Columns as `bucket` has them."""

    starts: tuple[int, ...]
    bidirectional: bool

    def columns(self, distances: Tensor) -> Tensor:
        return bucket(distances, self.starts, bidirectional=self.bidirectional)


@dataclass(frozen=True, slots=True)
class ClipRule(ColumnRule):
    """A column for each distance from -before to after, whose ends stand for all beyond."""

    before: int
    after: int

    def columns(self, distances: Tensor) -> Tensor:
        return distances.clamp(-self.before, self.after) + self.before


@dataclass(frozen=True, eq=False, repr=False)
class Bucketed(TableBias):
    """table[head, bucket(key position - query position)]."""

    table: Tensor
    max_distance: int
    bidirectional: bool
    starts: tuple[int, ...]

    @property
    def rule(self) -> BucketRule:
        return BucketRule(self.starts, self.bidirectional)

    def __repr__(self) -> str:
        options = f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        return f"relative({describe_tensor(self.table)}, {options})"


def relative(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> RelativeBias:
    """T5's bias, table[head, bucket(key position - query position)]: a learned number per head and distance bucket.

    Buckets are narrow for short distances and wide for long ones. Of the B buckets on one side, the first ⌊B/2⌋ have
    one distance each, 0, 1, 2 and so on; the others divide the distances up to `max_distance` into equal steps of the
    logarithm, and the last one has all distances from `max_distance` on. With `bidirectional`, the first half of the
    table is for keys at and before the query, the second half for keys after it; without it, the whole table is for
    keys at and before the query, and keys after it are in bucket 0 (a decoder masks them).

    Shapes: table (heads, buckets); gradients flow into it. transformers stores (buckets, heads): pass `weight.T`.
    Units: positions. T5 does not scale scores by 1/√d: pass `scale=1.0` to the call.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, buckets).
        ConfigurationError: fewer than 2 buckets per side, an odd number for two sides, or a max_distance that does
            not exceed the distances with a bucket of their own.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1, with the rule of the code released with it. That takes
    the logarithm in float32; here bucket boundaries are computed with whole numbers, the same on every device.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.relative(torch.arange(8.0)[None], max_distance=4).values(Grid.from_lengths(1, 6))
    tensor([[[3., 3., 3., 2., 1., 0.]]])
    """
    table = table_of(table, "relative", "buckets")
    _check(table.shape[-1], max_distance, bidirectional)
    side = table.shape[-1] // 2 if bidirectional else table.shape[-1]
    starts = bucket_starts if torch.compiler.is_compiling() else _known_starts  # dynamo warns of what is memoized
    return Bucketed(table, max_distance, bidirectional, starts(side, max_distance))


def bucket(distances: Tensor, starts: tuple[int, ...], *, bidirectional: bool) -> Tensor:
    """The bucket of each distance, *key position - query position*, by the rule of `relative`.

    `starts` are the smallest distances of the buckets of one side, from `bucket_starts`.

    >>> bucket(torch.tensor([-9, -2, -1, 0, 1, 2, 9]), (1, 2, 3), bidirectional=True).tolist()
    [3, 2, 1, 0, 5, 6, 7]
    """
    away = distances.abs() if bidirectional else (-distances).clamp(min=0)
    found = torch.bucketize(away, torch.tensor(starts, device=distances.device), right=True)
    return found + (len(starts) + 1) * (distances > 0) if bidirectional else found


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket of one side except the first, which starts at 0.

    With e = ⌊buckets/2⌋ buckets of one distance each and K = buckets - e others, bucket e + k starts at the smallest n
    with K · log(n/e) / log(max_distance/e) >= k, which is n^K >= max_distance^k · e^(K-k).

    >>> bucket_starts(8, 32)
    (1, 2, 3, 4, 7, 12, 20)
    """
    exact = buckets // 2
    others = buckets - exact
    starts = list(range(1, exact))
    n = exact
    for k in range(others):
        bound = max_distance**k * exact ** (others - k)
        n = max(n, _root(bound, others))
        starts.append(n)
    return tuple(starts)


_known_starts = cache(bucket_starts)


def _root(bound: int, power: int) -> int:
    """The smallest whole number n with n^power >= bound, by bisection."""
    low, high = 0, 1 << (bound.bit_length() // power + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**power >= bound else (middle, high)
    return high


def _check(buckets: int, max_distance: int, bidirectional: bool) -> None:
    whole_number("relative's max_distance", max_distance, least=-sys.maxsize)
    sides = 2 if bidirectional else 1
    if buckets < 2 * sides or buckets % sides:
        per_side = "an even number of buckets, at least 4, half of them for each side"
        need = per_side if bidirectional else "at least 2 buckets"
        raise ConfigurationError(
            f"relative needs {need}, as the last axis of its table; with bidirectional={bidirectional} this has "
            f"{buckets}"
        )
    exact = buckets // sides // 2
    if max_distance <= exact:
        raise ConfigurationError(
            f"relative needs a max_distance above {exact}, the distances that have a bucket of their own ({buckets} "
            f"buckets, bidirectional={bidirectional}); it is {max_distance}. Pass a longer max_distance, or a table "
            "with fewer buckets"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(TableBias):
    """table[head, clip(key position - query position, -before, after) + before]."""

    table: Tensor
    before: int
    after: int

    @property
    def rule(self) -> ClipRule:
        return ClipRule(self.before, self.after)

    def __repr__(self) -> str:
        return f"clipped({describe_tensor(self.table)}, before={self.before}, after={self.after})"


def clipped(table: Tensor, *, before: int, after: int) -> RelativeBias:
    """table[head, clip(key position - query position, -before, after) + before]: a number per head and distance.

    Column 0 of the table is for keys `before` or more positions before the query, column `before` for the query's own
    position, the last column for keys `after` or more positions after it. Units: positions, both ends included.

    Shapes: table (heads, before + 1 + after); gradients flow into it.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, before + 1 + after).
        ConfigurationError: before or after is negative.

    Source: Shaw et al. 2018 (arXiv 1803.02155), section 3.2, with before = after = k. There the table has vectors,
    which are added to the keys (and others to the values), so that query · vector is added to the score; here it has
    numbers that are added to the score and do not depend on the query.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.clipped(torch.arange(4.0)[None], before=2, after=1).values(Grid.from_lengths(4, 4))
    tensor([[[2., 3., 3., 3.],
             [1., 2., 3., 3.],
             [0., 1., 2., 3.],
             [0., 0., 1., 2.]]])
    """
    before, after = (
        whole_number(f"clipped's {name}", distance, least=0)
        for name, distance in (("before", before), ("after", after))
    )
    table = table_of(table, "clipped", "before + 1 + after")
    if table.shape[-1] != before + 1 + after:
        raise ShapeError(
            f"clipped(before={before}, after={after}) needs a table with {before + 1 + after} columns, one for each "
            f"distance from {-before} to {after}; this one has the shape {tuple(table.shape)}"
        )
    return Clipped(table, before, after)
