"""Biases that know of a pair its head and its distance alone: one number a diagonal instead of one a pair."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DtypeError, ShapeError
from ..pairs import at_least_float32
from ..tiles import Grid
from ..transforms import transformed
from .base import Bias, is_floating, leaves, push, summed_to, wanted

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
        elif wanted(into):
            per_head = summed_to(upstream, upstream.shape[-3:])  # what the batch shares is summed at once
            self.accumulate_along(distances, diagonal_sums(per_head), into)

    def accumulate_along(self, distances: Tensor, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
        """Add the gradient of Σ upstream · along(distances) in each of the parameters to the tensors of `into`.

        Shapes: distances (D,), upstream (..., heads, D). A kernel may add up the `diagonal_sums` of all its tiles and
        come here once, at the end.
        """
        if wanted(into):
            with torch.enable_grad():
                held = leaves(self, into)
                line = self.with_parameters(held).along(distances)
            push(line, summed_to(upstream, line.shape), held, into)

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
    if transformed() or query.ndim > 2 or key.ndim > 2 or not query.numel() or not key.numel():
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
