"""Masks and biases that depend on the distance of query and key alone: one number for each diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from ..biases import RelativeBias
from ..biases.relative import Clipped, ColumnRule, TableBias, select_columns
from ..core.grid import Grid
from ..core.problem import Problem

MAX_LINES = 256
"""The number of lines of columns that are kept: rules times lengths."""


def distances(problem: Problem) -> Tensor:
    """The distances of key and query on the diagonals, from the last query's first key to the first query's last.

    Shapes: (M + N - 1,). By default queries are at the last key positions, and the last query's first key is N - 1
    positions before it.

    Raises:
        AssertionError: positions that are not equally spaced, and so have no diagonals of one distance.
    """
    return _as_tensor(distance_range(problem), problem.value.device)


def distance_range(problem: Problem) -> range:
    """`distances` as a range."""
    if (shift := problem.shift) is None:
        raise AssertionError("diagonals of a problem whose positions are not equally spaced")
    step = problem.step
    return range((1 - problem.keys + shift) * step, (problem.queries + shift) * step, step)


def _as_tensor(distances: range, device: torch.device) -> Tensor:
    return torch.arange(distances.start, distances.stop, distances.step, device=device)


@lru_cache(MAX_LINES)
def _columns_along(rule: ColumnRule, distances: range, device: torch.device) -> Tensor:
    """The columns of a table that are read at some distances, (D,): the same for all numbers of the table."""
    with torch.inference_mode(False):
        return rule.columns(_as_tensor(distances, device))


def bias_along(problem: Problem, bias: RelativeBias) -> Tensor:
    """The bias of a problem on each of its diagonals, (1 or heads, M + N - 1), if it fits the problem."""
    heads, device = problem.weights_shape[-3] if problem.heads else 1, problem.value.device
    line = line_along(distance_range(problem), bias, heads, device)
    if line is not None:
        return line
    problem.bias_values(problem.grid().tile(slice(0, 1), slice(0, 1)))  # says what does not fit
    return bias.values_at(distances(problem))


def line_along(distances: range, bias: RelativeBias, heads: int, device: torch.device) -> Tensor | None:
    """The bias at some distances for so many heads, (1 or heads, D); None where it fails or does not fit."""
    try:
        if isinstance(bias, TableBias):
            line = select_columns(bias.table, _columns_along(bias.rule, distances, device))
        else:
            line = bias.values_at(_as_tensor(distances, device))
        size = len(distances)
        fits = line.is_floating_point() and line.device == device and line.shape in ((1, size), (heads, size))
    except Exception:  # a bias may be the user's, and raise anything
        return None
    return line if fits else None


def table_of_line(distances: range, line: Tensor) -> TableBias:
    """The bias that has these numbers, (heads, D), at consecutive distances."""
    return Clipped(line, before=-distances.start, after=distances.stop - 1)


def add_gradient_along(problem: Problem, bias: RelativeBias, upstream: Tensor, into: Sequence[Tensor | None]) -> None:
    """`RelativeBias.accumulate_at` of the distances of a problem, upstream (heads, M + N - 1)."""
    if isinstance(bias, TableBias):
        columns = _columns_along(bias.rule, distance_range(problem), problem.value.device)
        bias.accumulate_columns(columns, upstream, into)
    else:
        bias.accumulate_at(distances(problem), upstream, into)


class Diagonals:
    """Mask and bias of each diagonal, -inf where masked: (1 or H, M + N - 1), from the last query's first key on.

    A tile of it is a window that moves by one from row to row. Memory is read so only where rows are taken in reverse:
    then pair (i, j) of a tile is number i + j of its line.
    """

    def __init__(self, problem: Problem) -> None:
        self.queries = problem.queries
        dtype = torch.promote_types(problem.value.dtype, torch.float32)
        distance = distances(problem)
        line = torch.zeros(1, len(distance), dtype=dtype, device=distance.device)
        if isinstance(problem.bias, RelativeBias):
            line = bias_along(problem, problem.bias).to(dtype)
        if problem.mask is not None:
            grid = Grid(torch.zeros(1, dtype=torch.int64, device=distance.device), distance, heads=False)
            line = line.masked_fill(~problem.mask.evaluate(grid).view(1, -1), float("-inf"))
        self.line = line.contiguous()

    @classmethod
    def from_problem(cls, problem: Problem) -> Diagonals | None:
        """The diagonals of a problem; None if its mask or bias depends on more than the distance."""
        some = problem.queries > 0 and problem.keys > 0
        return cls(problem) if some and cls.suffice_for(problem) else None

    @staticmethod
    def suffice_for(problem: Problem) -> bool:
        """Whether a problem has a mask or a bias, and neither depends on more than the distance."""
        mask, bias = problem.mask, problem.bias
        return (
            problem.shift is not None
            and (mask is None or mask.by_distance)
            and (bias is None or isinstance(bias, RelativeBias))
            and not (mask is None and bias is None)
        )

    def reversed_tile(self, rows: slice, columns: slice) -> Tensor:
        """The additive mask of a tile with its rows in reverse order: (1, 1 or H, m, n), a view."""
        heads, length = self.line.shape
        size = (1, heads, rows.stop - rows.start, columns.stop - columns.start)
        return self.line.as_strided(size, (0, length, 1, 1), columns.start + self.queries - rows.stop)
