"""Attention under a causal mask: the last query is at the last key, and no query attends to a later key."""

import math

import torch
from torch import Tensor


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The context of each query, of which query i is at position i + N - M.

    Shapes: query (..., M, d), key (..., N, d), value (..., N, Dv), M at most N; returns (..., M, Dv).
    """
    scores = query @ key.mT / math.sqrt(query.shape[-1])
    queries, keys = scores.shape[-2:]
    keep = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)  # hole: which keys a query sees, (M, N)
    scores = scores.masked_fill(~keep, -math.inf)  # hole: the scores with the mask
    return scores.softmax(dim=-1) @ value
