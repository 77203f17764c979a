"""Align queries to keys: by the largest weight of each row, and by dynamic time warping."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import RowShard, WeightsLayout, check_memory
from .weights import Weights


class AlignmentResult(NamedTuple):
    """columns (..., heads, M): the key with the largest weight; path (..., heads, M + N - 1, 2): rows and columns."""

    columns: Tensor
    path: Tensor


@dataclass(frozen=True)
class Alignment:
    """The largest weight of each row and the dynamic-time-warping path: `AlignmentResult(columns, path)`.

    columns: argmax_j w_ij, int64; -1 for a row that attends to nothing or to NaN. path: `warping_path` of each head's
    weights. Dropout is not applied. Memory: all M × N weights, and one byte for each of M × (M + N) steps; for
    longer texts TopK(1) returns the columns, in O(M).

    Raises:
        ConfigurationError: when it starts, if all this takes more memory than the device has.

    >>> import torch, regard
    >>> alignment = regard.lenses.Alignment()
    >>> q = torch.eye(3)
    >>> result = regard.observe(q, q[[0, 0, 1, 2]], torch.zeros(4, 1), alignment, scale=9.0)[alignment]
    >>> result.columns
    tensor([0, 2, 3])
    >>> result.path.mT
    tensor([[ 0,  0,  1,  2, -1, -1],
            [ 0,  1,  2,  3, -1, -1]])
    """

    def start(self, problem: Problem) -> _AlignmentState:
        """The state of one run."""
        queries, keys = problem.weights_shape[-2:]
        steps = problem.weights_shape[:-2].numel() * queries * (queries + keys)
        check_memory(
            "Alignment of {} pairs",
            problem,
            (queries, keys),
            itemsize=WeightsLayout.from_problem(problem).result_itemsize,
            extra=steps,
        )
        return _AlignmentState()

    def start_shard(self, problem: Problem, shard: RowShard) -> NoReturn:
        """Refuse: the path runs through the weights of all rows.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(
            "Alignment follows a path through the weights of all rows one after another, and each process has those of "
            "its own rows alone: take TopK(1), whose columns are those of Alignment, or observe in one process"
        )


class _AlignmentState:
    """Computes all weights in `finish`, and aligns them."""

    reductions = ()

    def finish(self, problem: Problem, lse: Tensor) -> AlignmentResult:
        with torch.no_grad():
            weights = Weights().compute(problem, lse)
            return AlignmentResult(_largest_columns(weights), warping_path(weights))


def _largest_columns(weights: Tensor) -> Tensor:
    """The column of the largest weight of each row; -1 where the row has only zeros, or NaN."""
    if not weights.shape[-1]:
        return torch.full(weights.shape[:-1], -1, device=weights.device)
    largest = weights.max(-1)
    return largest.indices.masked_fill((largest.values == 0) | largest.values.isnan(), -1)


def warping_path(weights: Tensor) -> Tensor:
    """The path from (0, 0) to (M - 1, N - 1) with the least Σ (1 - w), in steps of (1, 1), (1, 0) and (0, 1).

    Among equal paths the diagonal step is taken first, then the step down. To align several heads together, pass the
    mean of their weights.

    Shapes: weights (..., M, N), NaN counting as 0; the path is (..., M + N - 1, 2), rows and columns, int64, padded
    with -1 after its end.

    Source: Sakoe and Chiba 1978 (dynamic time warping); on attention, with cost -w, Radford et al. 2022
    (arXiv 2212.04356) for the times of words, after filtering and normalising each head, which is left to the
    caller. With the cost 1 - w a path does not make detours through small weights.

    >>> import torch
    >>> warping_path(torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 1.0]])).mT
    tensor([[ 0,  0,  1, -1],
            [ 0,  1,  2, -1]])
    """
    *leading, queries, keys = weights.shape
    longest = max(queries + keys - 1, 0) if queries and keys else 0
    if not longest or 0 in leading:
        return torch.full((*leading, longest, 2), -1, device=weights.device)
    steps = _steps(weights.detach().reshape(-1, queries, keys))
    path = torch.full((steps.shape[1], longest, 2), -1, device=weights.device)
    row = torch.full((steps.shape[1],), queries - 1, device=weights.device)
    column, every = torch.full_like(row, keys - 1), torch.arange(len(row), device=row.device)
    for place in range(longest):
        path[:, place, 0], path[:, place, 1] = row, column
        step = steps[(row + column).clamp(min=0), every, row.clamp(min=0)]
        ended = (row <= 0) & (column <= 0)
        row, column = row - (step != _RIGHT).long(), column - (step != _DOWN).long()
        row, column = row.masked_fill(ended, -1), column.masked_fill(ended, -1)
    # The paths were followed from their ends: reverse them, and move the padding to the end.
    lengths = (path[..., 0] >= 0).sum(-1, keepdim=True)
    order = torch.arange(longest, device=path.device)
    reversed_path = path.gather(1, (lengths - 1 - order).clamp(min=0)[..., None].expand_as(path))
    return reversed_path.masked_fill((order >= lengths)[..., None], -1).view(*leading, longest, 2)


_DIAGONAL, _DOWN, _RIGHT = 0, 1, 2


def _steps(weights: Tensor) -> Tensor:
    """The last step of the best path to each pair: int8, (M + N - 1, paths, M), the pair (i, j) at [i + j, :, i].

    One antidiagonal at a time: its sums follow from those of the two before it.
    """
    paths, queries, keys = weights.shape
    steps = weights.new_zeros(queries + keys - 1, paths, queries, dtype=torch.int8)
    exact = torch.float32 if weights.device.type == "mps" else torch.float64
    before = weights.new_full((paths, queries + 1), float("inf"), dtype=exact)  # the sum at [:, i + 1]
    last = before.clone()
    for diagonal in range(queries + keys - 1):
        rows = torch.arange(max(0, diagonal - keys + 1), min(queries - 1, diagonal) + 1, device=weights.device)
        candidates = torch.stack([before[:, rows], last[:, rows], last[:, rows + 1]])  # diagonal, down, right
        least, step = candidates.min(0)
        if diagonal == 0:
            least = torch.zeros_like(least)
        steps[diagonal][:, rows] = step.to(torch.int8)
        sums = torch.full_like(last, float("inf"))
        sums[:, rows + 1] = least + 1.0 - weights[:, rows, diagonal - rows].nan_to_num(nan=0.0)
        before, last = last, sums
    return steps
