"""Attention in blocks: each block of queries reads its own block of keys and the one before."""

import torch
import torch.nn.functional as F
from torch import nn


def look_back(blocks, pad=0.0):
    """(b, h, blocks, w, d) -> (b, h, blocks, 2 w, d)."""
    before = F.pad(blocks, (0, 0, 0, 0, 1, 0), value=pad)[:, :, :-1]
    return torch.cat([before, blocks], dim=3)


class LocalAttention(nn.Module):
    def __init__(self, dim=32, heads=4, window=8):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def split(self, x):
        b, n, _ = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return (t.view(b, self.heads, n // self.window, self.window, -1) for t in (q, k, v))

    def forward(self, x):
        b, n, c = x.shape
        w = self.window
        q, k, v = self.split(x)
        k, v = look_back(k), look_back(v)
        dots = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        i, j = torch.arange(w)[:, None] + w, torch.arange(2 * w)[None, :]
        dots = dots.masked_fill(j > i, float("-inf"))
        return self.out((dots.softmax(dim=-1) @ v).view(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, c))


class RolledAttention(LocalAttention):
    """The same, with the block before taken by a roll."""

    def forward(self, x):
        b, n, c = x.shape
        w = self.window
        q, k, v = self.split(x)
        k = torch.cat([k.roll(1, dims=2), k], dim=3)
        v = torch.cat([v.roll(1, dims=2), v], dim=3)
        dots = torch.einsum("bhwid,bhwjd->bhwij", q, k) * q.size(-1) ** -0.5
        i, j = torch.arange(w)[:, None] + w, torch.arange(2 * w)[None, :]
        dots = dots.masked_fill(j > i, float("-inf"))
        y = torch.einsum("bhwij,bhwjd->bhwid", dots.softmax(-1), v)
        return self.out(y.reshape(b, self.heads, n, -1).transpose(1, 2).reshape(b, n, c))


class BandedAttention(nn.Module):
    """A query reads itself and the `sliding_window - 1` tokens before it."""

    def __init__(self, dim=32, heads=4, sliding_window=8):
        super().__init__()
        self.heads, self.sliding_window = heads, sliding_window
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        at = torch.arange(x.size(1), device=x.device)
        distance = at[:, None] - at[None, :]
        band = (distance >= 0) & (distance <= self.sliding_window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=band)
        return self.out(y.transpose(1, 2).flatten(2))
