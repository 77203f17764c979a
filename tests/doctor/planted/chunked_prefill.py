"""Prefill in chunks against preallocated memory for keys and values."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class StaticCache(nn.Module):
    def __init__(self, batch: int, heads: int, length: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.zeros(batch, heads, length, dim))
        self.register_buffer("v", torch.zeros(batch, heads, length, dim))
        self.filled = 0

    def update(self, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.filled + k.shape[2]
        self.k[:, :, self.filled : end] = k
        self.v[:, :, self.filled : end] = v
        self.filled = end
        return self.k, self.v


class Attention(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)

    def forward(self, x: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.wqkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        start = cache.filled
        k, v = cache.update(k, v)
        rows = torch.arange(start, start + n, device=x.device)[:, None]
        mask = torch.arange(k.shape[2], device=x.device)[None] <= rows
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, n, c))


class AttentionWithoutMask(Attention):
    def forward(self, x: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.wqkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = cache.update(k, v)
        if n == 1:
            y = F.scaled_dot_product_attention(q, k, v)
        else:
            y = F.scaled_dot_product_attention(q, k[:, :, : cache.filled], v[:, :, : cache.filled], is_causal=n == cache.filled)
        return self.wo(y.transpose(1, 2).reshape(b, n, c))


class SpeculativeAttention(Attention):
    """Verifies several draft tokens at once."""

    def forward(self, x: torch.Tensor, cache: StaticCache) -> torch.Tensor:
        b, n, c = x.shape
        q, k, v = self.wqkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        k, v = cache.update(k, v)
        k, v = k[:, :, : cache.filled], v[:, :, : cache.filled]
        mask = torch.tril(torch.ones(n, k.shape[2], dtype=torch.bool, device=x.device))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.wo(y.transpose(1, 2).reshape(b, n, c))


def prefill(layer: Attention, x: torch.Tensor, cache: StaticCache, chunk: int) -> torch.Tensor:
    return torch.cat([layer(part, cache) for part in x.split(chunk, dim=1)], dim=1)
