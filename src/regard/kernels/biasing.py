"""The bias of a problem tile by tile, and its gradient: by diagonals where it knows of a pair its distance alone."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..biases import Bias, RelativeBias, diagonal_sums
from .diagonals import bias_along, distances
from .flat import Flat, Gradients


class Biasing(Protocol):
    """What is added to the scores of tiles, and where their gradient goes."""

    def values(self, rows: slice, columns: slice) -> Tensor:
        """The bias of a tile, (B or 1, H or 1, m or 1, n or 1)."""
        ...

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        """Add the gradient of Σ upstream · values, but for what `finish` does."""
        ...

    def finish(self, into: Gradients) -> None:
        """What is done once, after the last tile."""
        ...


class PairBiasing:
    """Any bias: asked for its numbers on each tile."""

    def __init__(self, flat: Flat, bias: Bias) -> None:
        self.flat, self.bias = flat, bias

    def values(self, rows: slice, columns: slice) -> Tensor:
        values = self.flat.bias(rows, columns)
        return torch.zeros((), device=self.flat.value.device) if values is None else values

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        self.bias.accumulate(self.flat.grid.tile(rows, columns), self.flat.unfold(upstream), into.bias)

    def finish(self, into: Gradients) -> None:
        pass


class DiagonalBiasing:
    """One number a diagonal: M + N - 1 of them a head are asked for, once, and get their gradient once."""

    def __init__(self, flat: Flat, bias: RelativeBias) -> None:
        self.queries, self.distances, self.bias = flat.shape[2], distances(flat.problem), bias
        self.line = bias_along(flat.problem, bias)  # [H, M + N - 1]
        dtype = torch.promote_types(self.line.dtype, torch.float32)
        self.gradient = torch.zeros(flat.shape[1], len(self.distances), dtype=dtype, device=flat.value.device)

    def values(self, rows: slice, columns: slice) -> Tensor:
        width = columns.stop - columns.start
        return self.line[:, self._window(rows, columns)].unfold(-1, width, 1).flip(-2)[None]

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        self.gradient[:, self._window(rows, columns)] += diagonal_sums(upstream.sum(0))

    def finish(self, into: Gradients) -> None:
        self.bias.accumulate_along(self.distances, self.gradient, into.bias)

    def _window(self, rows: slice, columns: slice) -> slice:
        """The diagonals of a tile, from its last query's first key to its first query's last."""
        start = columns.start + self.queries - rows.stop
        return slice(start, start + rows.stop - rows.start + columns.stop - columns.start - 1)


def biasing(flat: Flat) -> Biasing | None:
    """The way to bias the tiles of a problem; None where it has no bias."""
    problem = flat.problem
    if problem.bias is None:
        return None
    in_place = problem.query_positions is None and problem.key_positions is None
    if isinstance(problem.bias, RelativeBias) and in_place and flat.shape[2] and flat.shape[3]:
        return DiagonalBiasing(flat, problem.bias)
    return PairBiasing(flat, problem.bias)
