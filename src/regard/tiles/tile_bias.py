"""The bias of a tile, and its gradient: pair by pair, one number for each diagonal, or rows of a call's own tensors."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..biases import Bias, RelativeBias, diagonal_sums
from ..biases.base import Sum, add_gradients
from ..biases.distance_tables import CallBias
from ..biases.row_bias import RowBias
from ..core.batched_problem import BatchedProblem, ProblemGradients
from ..core.finite import waits
from ..core.grid import WHOLE, Grid
from ..core.score_forms import at_least_float32
from ..core.torch_modes import under_transform
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
        self.batched = replace(batched, problem=replace(batched.problem, bias=bias))
        self.bias = bias

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


class CallTileBias:
    """A bias from tensors of one call, of which a part of the batches has its own rows alone."""

    def __init__(self, batched: BatchedProblem, bias: CallBias) -> None:
        batched.problem.bias_values(batched.grid.tile(slice(0, 1), slice(0, 1)))  # says what does not fit
        self.batched, self.grid = batched, _merged_grid(batched)
        self.bias = bias.with_parameters([batched.as_4d(tensor.detach()) for tensor in bias.parameters()])
        self.gradients: list[Tensor] = []

    def values(self, rows: slice, columns: slice) -> Tensor:
        return self.bias.values(self.grid.tile(rows, columns))

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        if not self.gradients:
            self.gradients = [torch.zeros_like(at_least_float32(tensor)) for tensor in self.bias.parameters()]
        self.bias.accumulate(self.grid.tile(rows, columns), upstream, self.gradients)

    def finish(self, into: ProblemGradients) -> None:
        for target, gradient in zip(into.bias, self.gradients, strict=bool(self.gradients)):
            add_in_own_axes(self.batched, gradient, target)


class RowTileBias:
    """A bias whose rows are computed as a whole, each block of them once; its gradient likewise, by autograd."""

    def __init__(self, batched: BatchedProblem, bias: RowBias) -> None:
        self.batched, self.grid = batched, _merged_grid(batched)
        self.masked = replace(batched, problem=replace(batched.problem, mask=bias.mask))
        tensors = [batched.as_4d(tensor.detach()) for tensor in bias.parameters()]
        self.bias, self.gradients = bias.with_parameters(tensors), [torch.zeros_like(tensor) for tensor in tensors]
        self.row: tuple[slice, Tensor] | None = None
        self.upstream: tuple[slice, Tensor] | None = None

    def values(self, rows: slice, columns: slice) -> Tensor:
        if self.row is None or self.row[0] != rows:
            found = self._of_rows(self.bias, rows)
            self.row = rows, pad(found, (0, self.batched.shape[3] - found.shape[-1]))
        return self.row[1][..., columns]

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        if self.upstream is None or self.upstream[0] != rows:
            self._differentiate()
            self.upstream = rows, upstream.new_zeros(*upstream.shape[:-1], self.batched.shape[3])
        self.upstream[1][..., columns] += upstream

    def finish(self, into: ProblemGradients) -> None:
        self._differentiate()
        for target, gradient in zip(into.bias, self.gradients, strict=True):
            add_in_own_axes(self.batched, gradient, target)

    def _differentiate(self) -> None:
        """Add the gradients of the block of rows that is complete."""
        if self.upstream is None:
            return
        (rows, upstream), self.upstream = self.upstream, None
        with torch.enable_grad():
            leaves = [tensor.detach().requires_grad_() for tensor in self.bias.parameters()]
            values = self._of_rows(self.bias.with_parameters(leaves), rows)
        upstream = upstream[..., : values.shape[-1]].sum_to_size(values.shape)
        add_gradients(values, upstream, leaves, self.gradients)

    def _of_rows(self, bias: RowBias, rows: slice) -> Tensor:
        """The numbers of some rows over all keys that any of them attends to."""
        keep = self.masked.keep(rows)
        if keep is None or under_transform() or waits(keep):
            return bias.of_rows(self.grid.tile(rows, WHOLE), keep)
        some = keep.flatten(0, -2).any(0).nonzero()
        end = int(some[-1]) + 1 if len(some) else 1
        return bias.of_rows(self.grid.tile(rows, slice(0, end)), keep[..., :end])


class SumTileBias:
    """The sum of two, each by its own tiles."""

    def __init__(self, batched: BatchedProblem, bias: Sum) -> None:
        self.parts = [(_tile_bias(batched, part), len(part.parameters())) for part in (bias.left, bias.right)]

    def values(self, rows: slice, columns: slice) -> Tensor:
        left, right = (part.values(rows, columns) for part, _ in self.parts)
        return left + right

    def add_gradient(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        for part, own in self._with_gradients(into):
            part.add_gradient(rows, columns, upstream, own)

    def finish(self, into: ProblemGradients) -> None:
        for part, own in self._with_gradients(into):
            part.finish(own)

    def _with_gradients(self, into: ProblemGradients) -> list[tuple[TileBias, ProblemGradients]]:
        """Each part, and the gradients of its own parameters."""
        found, first = [], 0
        for part, count in self.parts:
            if count:
                found.append((part, replace(into, bias=into.bias[first : first + count])))
            first += count
        return found


def make_tile_bias(batched: BatchedProblem) -> TileBias | None:
    """The tile bias of a problem; None without a bias."""
    return None if batched.problem.bias is None else _tile_bias(batched, batched.problem.bias)


def _tile_bias(batched: BatchedProblem, bias: Bias) -> TileBias:
    problem = batched.problem
    if isinstance(bias, RelativeBias) and problem.shift is not None and batched.shape[2] and batched.shape[3]:
        return DiagonalTileBias(batched, bias)
    if isinstance(bias, RowBias):
        return RowTileBias(batched, bias)
    if isinstance(bias, CallBias):
        return CallTileBias(batched, bias)
    if isinstance(bias, Sum) and _has_call_bias(bias):
        return SumTileBias(batched, bias)
    return PairwiseTileBias(batched, bias)


def add_in_own_axes(batched: BatchedProblem, gradient: Tensor, target: Tensor) -> None:
    """Add the gradient of `batched.as_4d(tensor)`, of all batches, to that of the tensor, in its own axes."""
    found = batched.split_batch(gradient) if gradient.shape[0] == batched.shape[0] else gradient.squeeze(0)
    found = found if batched.problem.heads else found.squeeze(-3)
    target += found.sum_to_size(target.shape) if found.ndim >= target.ndim else found


def _has_call_bias(bias: Bias) -> bool:
    if isinstance(bias, Sum):
        return _has_call_bias(bias.left) or _has_call_bias(bias.right)
    return isinstance(bias, CallBias)


def _merged_grid(batched: BatchedProblem) -> Grid:
    """The grid of a batched problem with its batches merged into one axis, of those that it has."""
    grid, whole = batched.grid, batched.problem.batch

    def merged(positions: Tensor) -> Tensor:
        if positions.ndim == 1:
            return positions
        return positions.expand(*whole, -1).reshape(whole.numel(), -1)[batched.batch]

    return replace(
        grid,
        query_positions=merged(grid.query_positions),
        key_positions=merged(grid.key_positions),
        heads=True,
    )
