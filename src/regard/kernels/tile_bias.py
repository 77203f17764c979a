"""The bias of a tile and its gradient; one number per diagonal if the bias depends on the distance alone.

Mask and bias that depend on the distance of query and key alone: one number a diagonal, not one a pair.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..biases import Bias, RelativeBias, diagonal_sums
from ..core.grid import Grid
from ..core.problem import Problem
from .batched_problem import BatchedProblem, ProblemGradients


def distances(problem: Problem) -> Tensor:
    """The distances of key and query on the diagonals, from the last query's first key to the first query's last.

    Shapes: (M + N - 1,). By default queries are at the last key positions, and the last query's first key is N - 1
    positions before it.

    Raises:
        AssertionError: positions that are not consecutive, and so have no diagonals of one distance.
    """
    if (shift := problem.shift) is None:
        raise AssertionError("diagonals of a problem whose positions are not consecutive")
    return torch.arange(1 - problem.keys + shift, problem.queries + shift, device=problem.value.device)


def bias_along(problem: Problem, bias: RelativeBias) -> Tensor:
    """The bias of a problem on each of its diagonals, (heads, M + N - 1), if it fits the problem."""
    problem.bias_values(problem.grid().tile(slice(0, 1), slice(0, 1)))  # says so if it does not
    return bias.values_at(distances(problem))


class Diagonals:
    """What is added to the scores, -inf where nothing is kept: (1 or H, M + N - 1), from the last query's first key on.

    A tile of it is a window that moves by one from row to row. Memory is read so only where rows are taken in reverse:
    then pair (i, j) of a tile is number i + j of its line.
    """

    def __init__(self, problem: Problem) -> None:
        self.queries = problem.queries
        dtype = torch.promote_types(problem.value.dtype, torch.float32)
        apart = distances(problem)
        line = torch.zeros(1, len(apart), dtype=dtype, device=apart.device)
        if isinstance(problem.bias, RelativeBias):
            line = bias_along(problem, problem.bias).to(dtype)
        if problem.mask is not None:
            grid = Grid(torch.zeros(1, dtype=torch.int64, device=apart.device), apart, heads=False)
            line = line.masked_fill(~problem.mask.evaluate(grid).view(1, -1), float("-inf"))
        self.line = line.contiguous()

    @classmethod
    def of(cls, problem: Problem) -> Diagonals | None:
        """The diagonals of a problem; None if its mask or bias depends on more than the distance."""
        some = problem.queries > 0 and problem.keys > 0
        return cls(problem) if some and cls.are_in(problem) else None

    @staticmethod
    def are_in(problem: Problem) -> bool:
        """Whether there is a mask or bias, and they depend on the distance alone."""
        mask, bias = problem.mask, problem.bias
        return (
            problem.shift is not None
            and (mask is None or mask.by_distance)
            and (bias is None or isinstance(bias, RelativeBias))
            and not (mask is None and bias is None)
        )

    def reversed_tile(self, rows: slice, columns: slice) -> Tensor:
        """The numbers of a tile whose rows come last to first: (1, 1 or H, m, n), a view."""
        heads, length = self.line.shape
        size = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        return self.line.as_strided(size, (0, length, 1, 1), columns.start + self.queries - rows.stop)


class TileBias(Protocol):
    """The bias of tiles and its backward."""

    def values(self, rows: slice, columns: slice) -> Tensor:
        """The bias of a tile, (B or 1, H or 1, m or 1, n or 1)."""
        ...

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        """Add the gradient of Σ upstream · values, but for what `finish` does."""
        ...

    def finish(self, into: ProblemGradients) -> None:
        """Finish the gradient after the last tile."""
        ...


class PairwiseTileBias:
    """Any bias, evaluated on each tile."""

    def __init__(self, batched: BatchedProblem, bias: Bias) -> None:
        self.batched, self.bias = batched, bias

    def values(self, rows: slice, columns: slice) -> Tensor:
        values = self.batched.bias(rows, columns)
        return torch.zeros((), device=self.batched.value.device) if values is None else values

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        self.bias.accumulate(self.batched.grid.tile(rows, columns), self.batched.unflatten_batch(upstream), into.bias)

    def finish(self, into: ProblemGradients) -> None:
        pass


class DiagonalTileBias:
    """A bias by distance, evaluated once on the M + N - 1 diagonals of each head."""

    def __init__(self, batched: BatchedProblem, bias: RelativeBias) -> None:
        self.queries, self.distances, self.bias = batched.shape[2], distances(batched.problem), bias
        self.line = bias_along(batched.problem, bias)  # [H, M + N - 1]
        dtype = torch.promote_types(self.line.dtype, torch.float32)
        self.gradient = torch.zeros(batched.shape[1], len(self.distances), dtype=dtype, device=batched.value.device)

    def values(self, rows: slice, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        return self.line[:, self._window(rows, columns)].unfold(-1, width, 1).flip(-2)[None]

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        self.gradient[:, self._window(rows, columns)] += diagonal_sums(upstream.sum(0))

    def finish(self, into: ProblemGradients) -> None:
        self.bias.accumulate_at(self.distances, self.gradient, into.bias)

    def _window(self, rows: slice, columns: slice) -> slice:
        """The diagonals of a tile, from its last query's first key to its first query's last."""
        start = columns.start + self.queries - rows.stop
        return slice(start, start + rows.stop - rows.start + columns.stop - columns.start - 1)


def make_tile_bias(batched: BatchedProblem) -> TileBias | None:
    """The tile bias of a problem; None without a bias."""
    problem = batched.problem
    if problem.bias is None:
        return None
    if isinstance(problem.bias, RelativeBias) and problem.shift is not None and batched.shape[2] and batched.shape[3]:
        return DiagonalTileBias(batched, problem.bias)
    return PairwiseTileBias(batched, problem.bias)
