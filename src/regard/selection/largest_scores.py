"""The largest scores of each row, a few rows at a time: no tensor over all rows and candidates."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..core.grid import WHOLE
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..utils.numbers import whole_number
from ..utils.other_types import needs_tensor

SCORES_AT_ONCE = 2**22
"""The most scores of rows and candidates that are in memory at once."""


def largest_scores(score: Callable[[slice], Tensor], rows: int, candidates: int, count: int, at_once: int) -> Tensor:
    """The numbers of the `count` candidates of the largest scores of each row, -1 for those whose score is -infinity.

    Shapes: score gives (..., m, candidates) for a slice of m rows; the result is (..., rows, at most count). at_once:
    how many scores stand in memory for a row and a candidate. No gradient passes through.
    """
    if torch.compiler.is_exporting():  # all rows at once, as many as there may be
        with torch.no_grad():
            return _largest(score(WHOLE), torch.sym_min(count, candidates))  # type: ignore[arg-type]  # a symbol
    height = max(SCORES_AT_ONCE // max(at_once * candidates, 1), 1)
    found = []
    with torch.no_grad():
        if rows <= height:
            return _largest(score(WHOLE), min(count, candidates))
        for start in range(0, rows, height):
            found.append(_largest(score(slice(start, min(start + height, rows))), min(count, candidates)))
    return torch.cat(found, -2)


def _largest(scores: Tensor, count: int) -> Tensor:
    """The numbers of the largest scores of each row, -1 for those of -infinity."""
    best = scores.topk(count, -1)
    return best.indices.masked_fill_(best.values.isneginf(), -1)


def checked_number(function: str, name: str, value: object) -> int:
    """A whole number of at least 1.

    Raises:
        ConfigurationError: it is not that.
    """
    return whole_number(f"{function}'s {name}", value, least=1, error=ConfigurationError)


def check_tensors(**tensors: object) -> None:
    """Check that arguments are tensors.

    Raises:
        DtypeError: one is not.
    """
    for name, tensor in tensors.items():
        if refused := needs_tensor(name, tensor):
            raise DtypeError(refused)


def check_fits(function: str, query: Tensor, key: Tensor) -> None:
    """Check query (..., heads, M, D) and key (..., key heads, N, D): equal dims, groups of heads, no more queries.

    Raises:
        ShapeError, DtypeError: they do not fit, or are no tensors.
    """
    check_tensors(query=query, key=key)
    fits = query.ndim == key.ndim >= 4 and query.shape[-1] == key.shape[-1] and query.shape[-2] <= key.shape[-2]
    if not fits or query.shape[-3] % max(key.shape[-3], 1):
        raise ShapeError(
            f"{function} has query {tuple(query.shape)} and key {tuple(key.shape)}; it needs (..., heads, M, D) and "
            "(..., key heads, N, D), where key heads divide heads and M is at most N"
        )
