"""Attention for export: static shapes, no control flow."""

from typing import Optional

import torch
from torch import Tensor, nn


@torch.no_grad()
def causal_bias(n: int, dtype: torch.dtype = torch.float32) -> Tensor:
    bias = torch.zeros(n, n, dtype=dtype)
    return bias.masked_fill_(torch.ones(n, n, dtype=torch.bool).triu(1), float("-inf"))


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Optional[Tensor] = None) -> Tensor:
    scores = torch.baddbmm(torch.zeros(1, 1, 1, dtype=q.dtype), q, k.transpose(1, 2), alpha=q.size(-1) ** -0.5)
    if bias is not None:
        scores = scores + bias
    return torch.bmm(torch.softmax(scores, dim=2), v)


def attend_unscaled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    scores = torch.baddbmm(bias.expand(q.size(0), -1, -1), q, k.transpose(1, 2))
    return torch.bmm(torch.softmax(scores, dim=2), v)


class FixedAttention(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def fold(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        return x.view(b, n, self.heads, c // self.heads).transpose(1, 2).reshape(b * self.heads, n, c // self.heads)

    def unfold(self, x: Tensor) -> Tensor:
        bh, n, d = x.shape
        return x.view(bh // self.heads, self.heads, n, d).transpose(1, 2).reshape(bh // self.heads, n, -1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        n = x.shape[1]
        return self.out(self.unfold(attend(self.fold(q), self.fold(k), self.fold(v), causal_bias(n))))


class PaddedAttention(FixedAttention):
    def forward(self, x: Tensor, padding: Optional[Tensor] = None) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (self.fold(t) for t in self.qkv(x).chunk(3, dim=-1))
        bias = causal_bias(n)
        if padding is not None:
            hidden = padding.repeat(self.heads, 1)[:, None]
            bias = torch.where(hidden, float("-inf"), bias)
        return self.out(self.unfold(attend(q, k, v, bias)))


class UnfoldedTwice(FixedAttention):
    def unfold(self, x: Tensor) -> Tensor:
        bh, n, d = x.shape
        return x.view(bh // self.heads, n, -1)


class DenseMaskAttention(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        n = x.shape[1]
        everything = torch.zeros(n, n, dtype=x.dtype, device=x.device)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=everything)
        return y.transpose(1, 2).flatten(2)
