"""Attention as pure functions over dictionaries of parameters."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import dropout, layer_norm, linear, scaled_dot_product_attention

Params = Mapping[str, Tensor]


def init_attention(dim: int, seed: int = 0) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return {name: torch.randn(dim, dim, generator=g) / dim**0.5 for name in ("wq", "wk", "wv", "wo")}


def heads_of(x: Tensor, n: int) -> Tensor:
    return x.unflatten(-1, (n, -1)).transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    return x.transpose(-3, -2).flatten(-2)


def causal_keep(n: int, device=None) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool, device=device).triu(1)


def self_attention(p: Params, x: Tensor, n_heads: int) -> Tensor:
    q, k, v = (heads_of(linear(x, p[w]), n_heads) for w in ("wq", "wk", "wv"))
    y = scaled_dot_product_attention(q, k, v, attn_mask=causal_keep(x.shape[-2], x.device))
    return linear(merge_heads(y), p["wo"])


def cross_attention(p: Params, x: Tensor, memory: Tensor, n_heads: int, keep: Tensor | None = None) -> Tensor:
    q = heads_of(linear(x, p["wq"]), n_heads)
    k, v = (heads_of(linear(memory, p[w]), n_heads) for w in ("wk", "wv"))
    mask = None if keep is None else keep[:, None, :, None]
    return linear(merge_heads(scaled_dot_product_attention(q, k, v, attn_mask=mask)), p["wo"])


def manual_attention(q: Tensor, k: Tensor, v: Tensor, p_drop: float = 0.1) -> Tensor:
    w = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
    return dropout(w, p_drop) @ v


def block(p: Params, x: Tensor, n_heads: int) -> Tensor:
    return x + self_attention(p, layer_norm(x, x.shape[-1:]), n_heads)


def stack(layers: list[Params], x: Tensor, n_heads: int = 4) -> Tensor:
    for p in layers:
        x = block(p, x, n_heads)
    return x
