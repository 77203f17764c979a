"""A block of the Transformer's encoder with one head (Vaswani et al. 2017): norm(x + f(x)), twice."""

import math

from torch import Tensor


def norm(rows: Tensor) -> Tensor:
    """Each row less its mean, over √(variance + 1e-5); the variance is the mean of the squared differences."""
    centred = rows - rows.mean(dim=-1, keepdim=True)  # hole: the rows less their means, (..., N, dim)
    variance = centred.square().mean(dim=-1, keepdim=True)  # hole: the variance of each row, (..., N, 1)
    return centred / (variance + 1e-5).sqrt()  # hole: the rows of mean 0 and variance 1, (..., N, dim)


def attend(x: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor) -> Tensor:
    """Self-attention with its projections: softmax(x W_q (x W_k)ᵀ / √d) x W_v W_o.

    Shapes: x (..., N, dim), query and key (dim, d), value (dim, v), output (v, dim); returns (..., N, dim).
    """
    scores = (x @ query) @ (x @ key).mT / math.sqrt(query.shape[-1])  # hole: the scaled scores, (..., N, N)
    return scores.softmax(dim=-1) @ (x @ value) @ output  # hole: contexts times W_o, (..., N, dim)


def encoder_block(
    x: Tensor, query: Tensor, key: Tensor, value: Tensor, output: Tensor, up: Tensor, down: Tensor
) -> Tensor:
    """norm(x + f(x)), first with f the attention, then with f the feed-forward network, max(0, x W_1) W_2.

    Shapes: as those of `attend`; up W_1 (dim, hidden), down W_2 (hidden, dim).
    """
    x = norm(x + attend(x, query, key, value, output))  # hole: after the attention, (..., N, dim)
    hidden = (x @ up).relu()  # hole: the hidden features, at least 0, (..., N, hidden)
    return norm(x + hidden @ down)  # hole: after the feed-forward network, (..., N, dim)
