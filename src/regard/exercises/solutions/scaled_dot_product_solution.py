"""Scaled dot-product attention (Vaswani et al. 2017): softmax(Q Kᵀ / √d) V."""

import math

from torch import Tensor


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context of each query.

    Shapes: query (..., M, d), key (..., N, d), value (..., N, Dv); returns (..., M, Dv).
    """
    scores = query @ key.mT / math.sqrt(query.shape[-1])  # hole: the scaled scores of all pairs, (..., M, N)
    weights = scores.softmax(dim=-1)  # hole: the weights, of which each row sums to 1
    return weights @ value  # hole: the sum of the values times their weights, (..., M, Dv)
