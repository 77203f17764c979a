"""Grouped query attention, three ways that grew over a year."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class GroupedQueryAttention(nn.Module):
    def __init__(self, dim: int = 64, n_heads: int = 8, n_kv_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv = n_heads, n_kv_heads
        self.head_dim = dim // n_heads
        self.wq = nn.Linear(dim, n_heads * self.head_dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * n_kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(n_heads * self.head_dim, dim, bias=False)

    def qkv(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k, v = self.wkv(x).view(b, t, 2, self.n_kv, self.head_dim).permute(2, 0, 3, 1, 4)
        return q, k, v

    def merge(self, y: torch.Tensor) -> torch.Tensor:
        return self.wo(y.transpose(1, 2).flatten(2))


class Expanded(GroupedQueryAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        group = self.n_heads // self.n_kv
        k = k.repeat_interleave(group, dim=1)
        v = v.repeat_interleave(group, dim=1)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Tiled(GroupedQueryAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        group = self.n_heads // self.n_kv
        k, v = torch.cat([k] * group, dim=1), torch.cat([v] * group, dim=1)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Sliced(GroupedQueryAttention):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        outs = []
        for h in range(self.n_heads):
            kv = h // (self.n_heads // self.n_kv)
            w = torch.softmax(q[:, h] @ k[:, kv].transpose(1, 2) / self.head_dim**0.5 + self.bias(x), dim=-1)
            outs.append(w @ v[:, kv])
        return self.merge(torch.stack(outs, dim=1))

    def bias(self, x: torch.Tensor) -> torch.Tensor:
        n = x.shape[1]
        return torch.full((n, n), float("-inf"), device=x.device).triu(1)


def repeat_kv(x: torch.Tensor, n_rep: int) -> torch.Tensor:
    b, h, n, d = x.shape
    return x[:, :, None].expand(b, h, n_rep, n, d).reshape(b, h * n_rep, n, d)


class MultiQuery(GroupedQueryAttention):
    def __init__(self, dim: int = 64, n_heads: int = 8) -> None:
        super().__init__(dim, n_heads, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x)
        k, v = repeat_kv(k, self.n_heads), repeat_kv(v, self.n_heads)
        return self.merge(F.scaled_dot_product_attention(q, k, v, is_causal=True))
