"""Additive scores (Bahdanau et al. 2015): e_ij = v · tanh(q_i + k_j), of projected queries and keys."""

from torch import Tensor


def additive_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """The score of each pair.

    Shapes: query (..., M, h), key (..., N, h), weight v (h,); returns (..., M, N).
    """
    sums = query.unsqueeze(-2) + key.unsqueeze(-3)  # hole: q_i + k_j of all pairs, (..., M, N, h)
    return sums.tanh() @ weight  # hole: v · tanh of each sum, (..., M, N)
