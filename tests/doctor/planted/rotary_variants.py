"""Rotary embeddings as found in three code bases, each with its layer."""

import torch
from torch import nn
from torch.nn import functional as F


def precompute(dim, end, theta=10000.0):
    freqs = 1.0 / (theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim))
    angles = torch.outer(torch.arange(end).float(), freqs)
    return angles.cos(), angles.sin()  # (end, dim / 2)


def rotate_pairs(x):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((-odd, even), dim=-1).flatten(-2)


def rotate_half(x):
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


class InterleavedRotary(nn.Module):
    def __init__(self, dim, max_len=512):
        super().__init__()
        cos, sin = precompute(dim, max_len)
        self.register_buffer("cos", cos.repeat_interleave(2, dim=-1))
        self.register_buffer("sin", sin.repeat_interleave(2, dim=-1))

    def forward(self, x):
        n = x.shape[-2]
        return x * self.cos[:n] + rotate_half(x) * self.sin[:n]


class HalfRotary(nn.Module):
    def __init__(self, dim, max_len=512):
        super().__init__()
        cos, sin = precompute(dim, max_len)
        self.register_buffer("cos", torch.cat((cos, cos), dim=-1))
        self.register_buffer("sin", torch.cat((sin, sin), dim=-1))

    def forward(self, x):
        n = x.shape[-2]
        return x * self.cos[:n] + rotate_half(x) * self.sin[:n]


class RotaryAttention(nn.Module):
    def __init__(self, dim=64, heads=4, rotary=HalfRotary):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)
        self.rope = rotary(dim // heads)

    def split(self, x):
        b, n, _ = x.shape
        return self.qkv(x).view(b, n, 3, self.heads, -1).unbind(2)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.split(x)  # (b, n, heads, d)
        q, k = self.rope(q), self.rope(k)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class RotaryEverywhere(RotaryAttention):
    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (self.rope(t.transpose(1, 2)) for t in self.split(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, n, c))


class RotaryCached(RotaryAttention):
    def forward(self, x, cache=None):
        b, n, c = x.shape
        q, k, v = (t.transpose(1, 2) for t in self.split(x))
        if cache is not None:
            k, v = torch.cat([cache[0], k], dim=2), torch.cat([cache[1], v], dim=2)
        past = k.shape[2] - n
        keep = torch.ones(n, n + past, dtype=torch.bool, device=x.device).tril(past)
        y = F.scaled_dot_product_attention(self.rope(q), self.rope(k), v, attn_mask=keep)
        return self.proj(y.transpose(1, 2).reshape(b, n, c)), (k, v)
