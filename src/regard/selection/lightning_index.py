"""The lightning indexer of DeepSeek Sparse Attention: a small attention that finds the keys of the large one."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..errors import ShapeError
from .largest_scores import checked_number, largest_scores


def lightning_indices(query: Tensor, key: Tensor, weights: Tensor, *, count: int) -> Tensor:
    """The `count` keys of the largest I(t, s) = Σ_h w_th · relu(q_th · k_s) of each query t, among s <= t.

    For `masks.chosen(found.unsqueeze(-3))`, which all heads of the attention share. Queries are at the last positions
    of the keys. A scale, as of transformers' models, goes into the weights.

    Shapes: the indexer's query (..., index heads, M, D), key (..., N, D), weights (..., M, index heads); the result is
    (..., M, at most count), whole numbers, -1 where there are fewer keys so far. No gradient passes through it: the
    indexer learns from a loss of its own.

    Raises:
        ShapeError: the tensors do not fit.
        ConfigurationError: count is no whole number of at least 1.

    Source: DeepSeek-V3.2-Exp (2025), Eq. 1 and 2.

    >>> import torch, regard
    >>> query, key = torch.ones(1, 1, 3, 2), torch.tensor([[[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]])
    >>> regard.selection.lightning_indices(query, key, torch.ones(1, 3, 1), count=2)
    tensor([[[ 0, -1],
             [ 1,  0],
             [ 1,  2]]])
    """
    count = checked_number("lightning_indices", "count", count)
    heads, queries, dim = query.shape[-3:] if query.ndim > 2 else (0, 0, 0)
    keys = key.shape[-2] if key.ndim > 1 else 0
    if query.ndim < 3 or key.shape[-1] != dim or weights.shape[-2:] != (queries, heads) or queries > keys:
        raise ShapeError(
            f"lightning_indices has query {tuple(query.shape)}, key {tuple(key.shape)} and weights "
            f"{tuple(weights.shape)}; it needs (..., index heads, M, D), (..., N, D) and (..., M, index heads), where "
            "M is at most N"
        )
    wide = at_least_float32(key)

    def score(rows: slice) -> Tensor:
        products = (at_least_float32(query[..., rows, :]) @ wide.unsqueeze(-3).mT).relu_()  # [..., index heads, m, N]
        scores = torch.einsum("...hmn,...mh->...mn", products, weights[..., rows, :].to(products.dtype))
        last = torch.arange(queries, device=key.device)[rows].unsqueeze(-1) + keys - queries
        return scores.masked_fill(torch.arange(keys, device=key.device) > last, float("-inf"))

    return largest_scores(score, queries, keys, count, query.shape[:-2].numel())
