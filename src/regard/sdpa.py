"""torch's twin: the same signature and meaning as `torch.nn.functional.scaled_dot_product_attention`."""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import attention
from .errors import ShapeError
from .masks import causal, where


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q Kᵀ · scale + attn_mask) · V, to the letter of torch's function of this name, by regard's kernels.

    Conventions, all torch's: a bool `attn_mask` has True = attend, a floating-point one is added to the scores;
    `is_causal` is aligned to the start (query i attends to keys 0..i, also where lengths differ), `scale` is 1/√dim
    unless given, fewer key heads than query heads need `enable_gqa=True`. Where torch leaves the case open or refuses
    it: `is_causal` together with a mask means both, and a row that may attend to nothing gives 0.

    Shapes: query (..., heads, M, D), key (..., heads, N, D), value (..., heads, N, Dv).

    Raises:
        ShapeError: heads differ without `enable_gqa`, or shapes do not fit.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 3, 4)
    >>> ours = regard.scaled_dot_product_attention(q, q, q, is_causal=True)
    >>> bool(torch.allclose(ours, torch.nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True)))
    True
    """
    if not enable_gqa and query.ndim >= 4 and key.ndim >= 4 and query.shape[-3] != key.shape[-3] != 1:
        raise ShapeError(
            f"query has {query.shape[-3]} heads and key {key.shape[-3]}: pass enable_gqa=True to let groups of query "
            "heads share a key head"
        )
    mask = causal() if is_causal else None
    bias = None
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        mask = where(keep=attn_mask) if mask is None else mask & where(keep=attn_mask)
    elif attn_mask is not None:
        bias = attn_mask
    aligned_to_end = query.shape[-2] == key.shape[-2] or not is_causal
    positions = None if aligned_to_end else torch.arange(query.shape[-2], device=query.device)
    return attention(
        query, key, value, mask=mask, bias=bias, scale=scale, dropout_p=dropout_p, query_positions=positions
    )
