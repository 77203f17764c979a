"""Multi-head attention without its projections: split into heads, attend in each, join."""

import math

from torch import Tensor


def split(rows: Tensor, heads: int) -> Tensor:
    """Rows (..., length, heads · dim) as heads (..., heads, length, dim): a head has neighbouring features."""
    return rows.unflatten(-1, (heads, -1)).transpose(-3, -2)  # hole: (..., heads, length, dim)


def join(rows: Tensor) -> Tensor:
    """The heads (..., heads, length, dim) beside each other, (..., length, heads · dim)."""
    return rows.transpose(-3, -2).flatten(-2)  # hole: (..., length, heads · dim)


def multi_head(query: Tensor, key: Tensor, value: Tensor, heads: int) -> Tensor:
    """Attention of each head, joined.

    Shapes: query (..., M, heads · d), key (..., N, heads · d), value (..., N, heads · Dv); returns
    (..., M, heads · Dv).
    """
    query, key, value = split(query, heads), split(key, heads), split(value, heads)
    scores = query @ key.mT / math.sqrt(query.shape[-1])  # hole: scaled by 1/√d of a head, (..., heads, M, N)
    return join(scores.softmax(dim=-1) @ value)
