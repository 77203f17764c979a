"""The bias of a tile, and its gradient: pair by pair, or one number for each diagonal."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..biases import Bias, RelativeBias, diagonal_sums
from ..core.batched_problem import BatchedProblem, ProblemGradients
from .diagonals import bias_along, distances


class TileBias(Protocol):
    """Protocol of the bias of tiles, and of its gradient."""

    def values(self, rows: slice, columns: slice) -> Tensor:
        """The bias of a tile, (B or 1, H or 1, m or 1, n or 1)."""
        ...

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        """Add the gradient of Σ upstream · values; `finish` completes it."""
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
