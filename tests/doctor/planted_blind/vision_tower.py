"""Attention over patches of pictures, by someone who reads papers."""

import torch
from einops import rearrange, reduce
from torch import Tensor, einsum, nn


def exists(value):
    return value is not None


class PatchAttention(nn.Module):
    def __init__(self, dim, *, heads=8, dropout=0.0):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(dim)
        self.scale = (dim // heads) ** -0.5
        self.dropout = dropout
        self.to_qkv = nn.Linear(dim, dim * 3, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = rearrange(self.to_qkv(self.norm(x)), "b n (three h d) -> three b h n d", three=3, h=self.heads)
        q = q * self.scale
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))


class TalkingPool(nn.Module):
    """Learned queries read the patches."""

    def __init__(self, dim, queries=16, heads=4, p=0.1):
        super().__init__()
        self.queries = nn.Parameter(torch.randn(queries, dim) * 0.02)
        self.heads, self.p = heads, p
        self.to_q, self.to_k, self.to_v = (nn.Linear(dim, dim, bias=False) for _ in range(3))
        self.scale = (dim // heads) ** -0.5

    def forward(self, patches, valid):
        b, n, dim = patches.shape
        q = self.to_q(self.queries).expand(b, -1, -1)
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in (q, self.to_k(patches), self.to_v(patches)))
        sim = einsum("b h i d, b h j d -> b h i j", q, k) * self.scale
        attn = sim.softmax(dim=-1)
        attn = attn * rearrange(valid, "b j -> b 1 1 j")
        attn = torch.nn.functional.dropout(attn, self.p)
        out = einsum("b h i j, b h j d -> b h i d", attn, v)
        return rearrange(out, "b h n d -> b n (h d)")


class WindowTower(nn.Module):
    """Attention of every patch to those of its window."""

    def __init__(self, dim, heads, window_size=7):
        super().__init__()
        self.window_size = window_size
        self.heads = heads
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = torch.softmax(q @ k.transpose(-2, -1) / self.head_dim**0.5, dim=-1)
        x = (weights @ v).reshape(b, n, c)
        return self.proj(x)


def pooled(x: Tensor) -> Tensor:
    return reduce(x, "b n d -> b d", "mean")
