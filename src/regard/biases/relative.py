"""Biases that know of a pair its head and its distance alone: one number a diagonal instead of one a pair.

Learned tables over buckets of distances, as in T5.

Learned tables over clipped distances.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.grid import Grid
from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DtypeError, ShapeError
from .base import Bias, add_gradients, any_needed, describe_tensor, is_floating, leaves, summed_to

# Rows whose diagonals are summed at once: the skewed copy of a block is this much wider than the block itself.
BLOCK = 128


class RelativeBias(Bias):
    """A bias that depends on the head and on *key position - query position* alone. Subclasses say `along`.

    Where the positions of a tile are runs (each the one before plus 1), M + N - 1 numbers a head say all of it.
    """

    @abstractmethod
    def along(self, distances: Tensor) -> Tensor:
        """The bias at each distance, *key position - query position*.

        Shapes: int64 of any shape to (heads, *distances.shape), floating point.
        """

    def values(self, grid: Grid) -> Tensor:
        distances = diagonals(grid)
        if distances is None:
            return self._pair_by_pair(grid)
        line = self.along(distances)  # [H, M + N - 1]
        # One window of the line for each query; the last query's is where the line begins.
        return _beside(grid, line.unfold(-1, grid.key.shape[-1], 1).flip(-2))  # [H, M, N]

    def accumulate(self, grid: Grid, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """The tile's diagonals are summed first, and M + N - 1 numbers a head go through `along`."""
        distances = diagonals(grid)
        if distances is None:
            super().accumulate(grid, upstream, into)
        elif any_needed(into):
            per_head = summed_to(upstream, upstream.shape[-3:])  # what the batch shares is summed at once
            self.accumulate_along(distances, diagonal_sums(per_head), into)

    def accumulate_along(self, distances: Tensor, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient of Σ upstream · along(distances) in each of the parameters to the tensors of `into`.

        Shapes: distances (D,), upstream (..., heads, D). A kernel may add up the `diagonal_sums` of all its tiles and
        come here once, at the end.
        """
        if any_needed(into):
            with torch.enable_grad():
                held = leaves(self, into)
                line = self.with_parameters(held).along(distances)
            add_gradients(line, summed_to(upstream, line.shape), held, into)

    def _pair_by_pair(self, grid: Grid) -> Tensor:
        """The values where positions are no runs, or differ between the sequences of the batch."""
        distances = grid.key - grid.query  # [M, N] or [*batch, 1, M, N], without the 1 where there are no heads
        if distances.ndim > 2 and grid.heads:
            distances = distances.squeeze(-3)
        return _beside(grid, self.along(distances).movedim(0, -3))


def _beside(grid: Grid, values: Tensor) -> Tensor:
    """Values per head, (..., heads, M, N), without the head axis where neither they nor the weights need one."""
    return values.squeeze(-3) if not grid.heads and values.shape[-3] == 1 else values


def diagonals(grid: Grid) -> Tensor | None:
    """The distances on the diagonals of a tile, from the last query's to its first key to the first's to its last.

    Shapes: (M + N - 1,), each the one before plus 1; pair (i, j) lies on diagonal j - i + M - 1. None where positions
    are no runs, differ between the sequences of a batch, or cannot be looked at because of a transform.

    >>> diagonals(Grid.of(2, 3))
    tensor([-2, -1,  0,  1])
    """
    query, key = grid.query, grid.key
    if under_transform() or query.ndim > 2 or key.ndim > 2 or not query.numel() or not key.numel():
        return None
    query, key = query.flatten(), key.flatten()
    runs = (query.diff() == 1).all() & (key.diff() == 1).all()
    is_run, lowest = torch.stack([runs.long(), key[0] - query[-1]]).tolist()  # the one wait for the device
    return torch.arange(lowest, lowest + len(query) + len(key) - 1, device=key.device) if is_run else None


def diagonal_sums(upstream: Tensor) -> Tensor:
    """The sum over each diagonal of a tile: (..., M, N) to (..., M + N - 1), in float32 at least.

    Pair (i, j) lies on diagonal j - i + M - 1: the gradient of the values on a tile becomes that of `along` on its
    `diagonals`.

    >>> diagonal_sums(torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0]]))
    tensor([10., 21., 32.,  3.])
    """
    upstream = at_least_float32(upstream)
    rows, columns = upstream.shape[-2:]
    sums = upstream.new_zeros(*upstream.shape[:-2], max(rows + columns - 1, 0))
    for start in range(0, rows if columns else 0, BLOCK):
        block = upstream[..., start : start + BLOCK, :]
        first = rows - start - block.shape[-2]
        sums[..., first : first + block.shape[-2] + columns - 1] += _skewed(block).sum(-2)
    return sums


def _skewed(block: Tensor) -> Tensor:
    """(..., M, N) as (..., M, M + N - 1), zeros around, with each row one place further left than the one above it.

    In memory, a row that is one element shorter than its successor believes is a row shifted by one.
    """
    rows, columns = block.shape[-2:]
    if rows == 1:
        return block
    stride = rows + columns - 2
    flat = block.new_zeros(*block.shape[:-2], rows * (stride + 1))
    flat[..., rows - 1 : rows - 1 + rows * stride].unflatten(-1, (rows, stride))[..., :columns] = block
    return flat.unflatten(-1, (rows, stride + 1))


def table_of(table: object, maker: str, columns: str) -> Tensor:
    """A learned table of a bias, checked: floating point, one row for each head."""
    if not is_floating(table):
        has = table.dtype if isinstance(table, Tensor) else f"a {type(table).__name__}"
        raise DtypeError(f"{maker} needs a floating-point table (heads, {columns}); this is {has}")
    if table.ndim != 2 or not table.shape[0]:
        raise ShapeError(
            f"{maker} needs a table of the shape (heads, {columns}) with at least one head; this one has "
            f"{tuple(table.shape)}"
        )
    return table


def looked_up(table: Tensor, index: Tensor) -> Tensor:
    """Columns of a table, (heads, columns) to (heads, *index.shape), in float32 at least."""
    chosen = at_least_float32(table).index_select(-1, index.flatten().to(table.device))
    return chosen.reshape(len(table), *index.shape)


@dataclass(frozen=True, eq=False, repr=False)
class Bucketed(RelativeBias):
    """table[head, bucket(key position - query position)]."""

    table: Tensor
    max_distance: int
    bidirectional: bool
    starts: tuple[int, ...]

    def along(self, distances: Tensor) -> Tensor:
        return looked_up(self.table, bucket(distances, self.starts, bidirectional=self.bidirectional))

    def __repr__(self) -> str:
        options = f"max_distance={self.max_distance}, bidirectional={self.bidirectional}"
        return f"relative({describe_tensor(self.table)}, {options})"


def relative(table: Tensor, *, max_distance: int = 128, bidirectional: bool = True) -> RelativeBias:
    """table[head, bucket(key position - query position)]: one learned number a head and bucket of distances.

    The buckets are narrow nearby and wide far away. Of the B buckets on one side the first ⌊B/2⌋ hold one distance
    each, 0, 1, 2 and so on; the others reach, in equal steps of the distance's logarithm, to `max_distance`, and the
    last holds everything from there on. `bidirectional` gives the first half of the table to the keys at and before
    the query, the second half to those after it; without it the whole table serves keys at and before the query, and
    keys after it are in bucket 0, where an encoder would see them (a decoder's mask takes them out).

    Shapes: table (heads, buckets); gradients flow into it. transformers stores (buckets, heads): give `weight.T`.
    Units: positions. T5 has no 1/√d: give `scale=1.0` to the call.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, buckets).
        ConfigurationError: fewer than 2 buckets on a side, an odd number for two sides, or a max_distance that does
            not lie beyond the buckets of one distance each.

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1, whose rule is the code released with it. That takes
    the logarithm in float32; here the buckets begin where whole-number arithmetic says, the same on every device.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.relative(torch.arange(8.0)[None], max_distance=4).values(Grid.of(1, 6))
    tensor([[[3., 3., 3., 2., 1., 0.]]])
    """
    table = table_of(table, "relative", "buckets")
    _check(table.shape[-1], max_distance, bidirectional)
    side = table.shape[-1] // 2 if bidirectional else table.shape[-1]
    return Bucketed(table, max_distance, bidirectional, bucket_starts(side, max_distance))


def bucket(distances: Tensor, starts: tuple[int, ...], *, bidirectional: bool) -> Tensor:
    """The bucket of each distance, *key position - query position*, as `relative` has it, for the starts of a side.

    >>> bucket(torch.tensor([-9, -2, -1, 0, 1, 2, 9]), (1, 2, 3), bidirectional=True).tolist()
    [3, 2, 1, 0, 5, 6, 7]
    """
    away = distances.abs() if bidirectional else (-distances).clamp(min=0)
    found = torch.bucketize(away, torch.tensor(starts, device=distances.device), right=True)
    return found + (len(starts) + 1) * (distances > 0) if bidirectional else found


def bucket_starts(buckets: int, max_distance: int) -> tuple[int, ...]:
    """The smallest distance of each bucket of one side but the first, which holds 0.

    Bucket e + k, where e = ⌊buckets/2⌋ are the buckets of one distance and K = buckets - e the others, begins at the
    smallest n with K · log(n/e) / log(max_distance/e) >= k, which is n^K >= max_distance^k · e^(K-k).

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


def _root(bound: int, power: int) -> int:
    """The smallest whole number whose power is not below a bound, by halving."""
    low, high = 0, 1 << (bound.bit_length() // power + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if middle**power >= bound else (middle, high)
    return high


def _check(buckets: int, max_distance: int, bidirectional: bool) -> None:
    sides = 2 if bidirectional else 1
    if buckets < 2 * sides or buckets % sides:
        need = (
            "an even number of buckets, at least 4, half of them for each side"
            if bidirectional
            else ("at least 2 buckets")
        )
        raise ConfigurationError(
            f"relative needs {need}, as the last axis of its table; with bidirectional={bidirectional} this has "
            f"{buckets}"
        )
    exact = buckets // sides // 2
    if max_distance <= exact:
        raise ConfigurationError(
            f"relative needs a max_distance above {exact}, the distances that have a bucket of their own ({buckets} "
            f"buckets, bidirectional={bidirectional}); it is {max_distance}. Give a longer max_distance, or a table "
            "with fewer buckets"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Clipped(RelativeBias):
    """table[head, clip(key position - query position, -before, after) + before]."""

    table: Tensor
    before: int
    after: int

    def along(self, distances: Tensor) -> Tensor:
        return looked_up(self.table, distances.clamp(-self.before, self.after) + self.before)

    def __repr__(self) -> str:
        return f"clipped({describe_tensor(self.table)}, before={self.before}, after={self.after})"


def clipped(table: Tensor, *, before: int, after: int) -> RelativeBias:
    """table[head, clip(key position - query position, -before, after) + before]: a learned number a head and distance.

    Column 0 of the table serves keys `before` and more positions before the query, column `before` the query's own
    position, the last one keys `after` and more positions after it. Units: positions, both ends included.

    Shapes: table (heads, before + 1 + after); gradients flow into it.

    Raises:
        DtypeError: the table is not floating point.
        ShapeError: the table is not (heads, before + 1 + after).
        ConfigurationError: before or after is negative.

    Source: Shaw et al. 2018 (arXiv 1803.02155), section 3.2, with before = after = k. There the table holds vectors,
    which are added to the keys (and others to the values), so that the score gets query · vector; here it holds
    numbers that are added to the score and do not ask the query.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.clipped(torch.arange(4.0)[None], before=2, after=1).values(Grid.of(4, 4))
    tensor([[[2., 3., 3., 3.],
             [1., 2., 3., 3.],
             [0., 1., 2., 3.],
             [0., 0., 1., 2.]]])
    """
    if before < 0 or after < 0:
        raise ConfigurationError(f"clipped needs distances of at least 0; before is {before} and after is {after}")
    table = table_of(table, "clipped", "before + 1 + after")
    if table.shape[-1] != before + 1 + after:
        raise ShapeError(
            f"clipped(before={before}, after={after}) needs a table with {before + 1 + after} columns, one for each "
            f"distance from {-before} to {after}; this one has the shape {tuple(table.shape)}"
        )
    return Clipped(table, before, after)
