"""DeltaFormer: softmax attention over values that are corrected by what was attended to before them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attention, attention_with_lse
from ..core.score_forms import at_least_float32
from ..core.torch_modes import without_autocast
from ..errors import ShapeError
from ..kernels.validation import check_same_kind, check_shapes
from ..masks import causal
from .chunks import CHUNK
from .linear_arguments import LARGEST_BETA
from .token_numbers import check_token_numbers


def delta_former(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    beta: Tensor | None = None,
    removal: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """o_i = Σ_{j <= i} softmax(q_i · k_j / √D) u_j, with u_i = v_i - β_i Σ_{j < i} softmax(r_i · k_j / √D) u_j.

    The delta rule with the kernel of softmax in place of a dot product of features. The u are a triangular system,
    (I + β W) u = v, which is solved by halves: attention of the second half's rows to the first half's u is what their
    values lack, down to blocks whose weights are all in memory. Time grows with the pairs, memory with N (of the
    gradient, N log N).

    Shapes:
        query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv); the output is
        (..., heads, N, Dv).

    Args:
        query: (..., heads, N, D).
        key: (..., key heads, N, D).
        value: (..., key heads, N, Dv).
        beta: β in 0..2, (..., heads, N); None for 1.
        removal: r, (..., heads, N, D), what reads the values that a token removes; None for the query, as in
            flash-linear-attention.
        scale: of both scores, 1/√D by default.

    Raises:
        ShapeError: not as many queries as keys, a removal of another shape than the query, a beta for other tokens.
        ConfigurationError: beta out of 0..2.
        RegardError: as of `regard.attention`.

    Source: Xu et al. 2025, DeltaFormer (arXiv 2505.19488).

    >>> import torch, regard
    >>> q, v = torch.zeros(3, 1), torch.tensor([[4.0], [8.0], [6.0]])    # u = 4, 4, 2
    >>> regard.linear.delta_former(q, q, v).mT
    tensor([[4.0000, 4.0000, 3.3333]])
    """
    query, key, value = check_same_kind(query, key, value)
    check_shapes(query, key, value)
    reader = query if removal is None else removal
    if query.shape[-2] != key.shape[-2] or reader.shape != query.shape:
        raise ShapeError(
            f"query has the shape {tuple(query.shape)}, key {tuple(key.shape)} and removal {tuple(reader.shape)}: "
            "DeltaFormer needs as many queries as keys, and a removal of the query's shape"
        )
    beta = query.new_ones(query.shape[:-1]) if beta is None else beta
    beta = check_token_numbers("beta", beta, query, most=LARGEST_BETA)
    factor = max(query.shape[-1], 1) ** -0.5 if scale is None else scale
    if query.ndim > 3 and key.shape[-3]:
        key, value = (each.repeat_interleave(query.shape[-3] // key.shape[-3], -3) for each in (key, value))
    rows, keys, values, beta = (at_least_float32(each) for each in (reader * factor, key, value, beta.unsqueeze(-1)))
    with without_autocast(query.device.type):
        corrected = _corrected(rows, keys, values, beta, _totals(rows, keys)) if rows.numel() else values
    return attention(query, key, corrected.to(value.dtype), mask=causal(), scale=factor)


def _totals(rows: Tensor, keys: Tensor) -> Tensor:
    """The logarithms log Σ_{j < i} e^{r_i · k_j} of each row, (..., N, 1); 0 for the first, which has no keys."""
    _, lse = attention_with_lse(rows[..., 1:, :], keys[..., :-1, :], keys[..., :-1, :1], mask=causal(), scale=1.0)
    return torch.cat([torch.zeros_like(rows[..., :1, :1]), lse.unsqueeze(-1)], -2)


def _corrected(rows: Tensor, keys: Tensor, values: Tensor, beta: Tensor, totals: Tensor) -> Tensor:
    """The u of positions whose values lack what was attended to before the first of them; all (..., n, ·)."""
    length = rows.shape[-2]
    if length <= CHUNK:
        weights = (rows @ keys.mT - totals).tril(-1).exp().tril(-1)
        return torch.linalg.solve_triangular(beta * weights, values, upper=False, unitriangular=True)
    half = -(-length // (2 * CHUNK)) * CHUNK
    first, second = zip(
        *(each.split([half, length - half], -2) for each in (rows, keys, values, beta, totals)), strict=True
    )
    corrected = _corrected(*first)
    rows, keys, values, beta, totals = second
    read, lse = attention_with_lse(rows, first[1], corrected, scale=1.0)
    values = values - beta * (lse.unsqueeze(-1) - totals).exp() * read
    return torch.cat([corrected, _corrected(rows, keys, values, beta, totals)], -2)
