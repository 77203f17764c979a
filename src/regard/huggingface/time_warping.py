"""Monotonic alignment of tokens with frames: weights standardized and smoothed over time, and dynamic time warping."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from ..errors import ConfigurationError

Floats = NDArray[np.floating]


def alignment_scores(weights: Tensor, median_width: int) -> Tensor:
    """How well each token fits each frame, (tokens, frames), from the weights of some heads (heads, tokens, frames).

    Each frame of a head is standardized over the tokens, so that a frame which all tokens attend to says nothing; then
    smoothed over time by a median, and averaged over the heads. A frame with equal weights of all tokens has score 0.
    """
    std, mean = torch.std_mean(weights, dim=-2, correction=0, keepdim=True)
    standard = torch.where(std > 0, (weights - mean) / std, 0.0)
    return median_filter(standard, median_width).mean(0)


def median_filter(values: Tensor, width: int) -> Tensor:
    """The median of `width` neighbours along the last axis, an odd number, mirrored at its ends.

    An axis of at most width // 2 entries cannot be mirrored and is returned as it is.

    Raises:
        ConfigurationError: another width.

    >>> median_filter(torch.tensor([[0.0, 9.0, 1.0, 2.0]]), 3)
    tensor([[9., 1., 2., 1.]])
    """
    if width < 1 or width % 2 == 0:
        raise ConfigurationError(
            f"median_filter_width is {width}; it needs to be an odd number of at least 1, such as 7"
        )
    side = width // 2
    if values.shape[-1] <= side or not values.numel():
        return values
    return pad(values, (side, side), mode="reflect").unfold(-1, width, 1).median(-1).values


def warping_path(cost: Floats) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Rows and columns of the cheapest path through a matrix, from its first entry to its last, each step by one.

    D(i, j) = cost(i, j) + min(D(i-1, j-1), D(i-1, j), D(i, j-1)), one antidiagonal at a time. Of equal sums the step
    along the row is taken. Sums are rounded to float32, as in Whisper's published code, so that paths equal its own.

    Source: Sakoe and Chiba 1978, Dynamic programming algorithm optimization for spoken word recognition, without slope
    constraints or weights.

    >>> rows, columns = warping_path(np.array([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))
    >>> rows.tolist(), columns.tolist()
    ([0, 1, 1], [0, 1, 2])
    """
    steps = _cheapest_steps(cost)
    row, column = cost.shape[0] - 1, cost.shape[1] - 1
    path = [(row, column)]
    while row or column:
        step = steps[row, column] if row and column else (ALONG if column else DOWN)
        row, column = row - (step != ALONG), column - (step != DOWN)
        path.append((row, column))
    rows, columns = np.array(path[::-1]).T
    return rows, columns


DIAGONAL, DOWN, ALONG = 0, 1, 2
"""Steps into an entry: from the row and column before, from the row before, from the column before."""


def _cheapest_steps(cost: Floats) -> NDArray[np.int8]:
    """The step into each entry on the cheapest path from the first one; the first row and column are not read."""
    rows, columns = cost.shape
    steps = np.full((rows, columns), ALONG, dtype=np.int8)
    before, last = np.full((2, rows + 1), np.inf, dtype=np.float32)  # sums of two antidiagonals, by row + 1
    before[0] = 0  # the only way to the first entry
    for diagonal in range(rows + columns - 1):
        first, end = max(diagonal - columns + 1, 0), min(diagonal + 1, rows)
        here = np.arange(first, end)
        across, above, left = before[here], last[here], last[here + 1]
        step = np.where(
            (across < above) & (across < left), DIAGONAL, np.where((above < across) & (above < left), DOWN, ALONG)
        )
        steps[here, diagonal - here] = step
        sums = np.full(rows + 1, np.inf, dtype=np.float32)
        sums[here + 1] = cost[here, diagonal - here] + np.choose(step, (across, above, left))
        before, last = last, sums
    return steps
