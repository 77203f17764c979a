"""A server with a fixed number of slots: each has a row in one cache of keys and values."""

import torch
import torch.nn.functional as F
from torch import nn


class SlotCache:
    def __init__(self, slots=2, heads=2, size=96, dim=8):
        self.k = torch.zeros(slots, heads, size, dim)
        self.v = torch.zeros(slots, heads, size, dim)
        self.used = 0

    def append(self, k, v):
        n = k.size(2)
        self.k = self.k.to(k.dtype)
        self.v = self.v.to(v.dtype)
        self.k[:, :, self.used : self.used + n] = k
        self.v[:, :, self.used : self.used + n] = v
        self.used += n
        return self.k, self.v


class Projections(nn.Module):
    def __init__(self, dim=32, heads=4, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, dim)
        self.wk = nn.Linear(dim, kv_heads * self.head_dim)
        self.wv = nn.Linear(dim, kv_heads * self.head_dim)
        self.wo = nn.Linear(dim, dim)

    def project(self, x):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, n, self.kv_heads, self.head_dim).transpose(1, 2)
        return q, k, v


class SlotAttention(Projections):
    def forward(self, x, cache):
        q, k, v = self.project(x)
        start = cache.used
        keys, values = cache.append(k, v)
        b, _, n, d = q.shape
        cells = torch.arange(keys.size(2), device=x.device)
        times = start + torch.arange(n, device=x.device)
        if n > 1:
            visible = cells <= times[:, None]
            out = F.scaled_dot_product_attention(q, keys, values, attn_mask=visible, enable_gqa=True)
        else:
            out = F.scaled_dot_product_attention(q, keys, values, enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, n, -1)), cache


class Reranker(Projections):
    """Reads the answers of all slots in both directions; the text of a slot ends at `lengths`."""

    def forward(self, x, lengths):
        q, k, v = self.project(x)
        b, _, n, _ = q.shape
        positions = torch.arange(n, device=x.device)
        inside = positions < lengths.max()
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=inside[None, :], enable_gqa=True)
        return self.wo(out.transpose(1, 2).reshape(b, n, -1))


class GroupedScores(Projections):
    """Grouped heads without copies of the keys, for exports without `enable_gqa`."""

    def forward(self, x):
        q, k, v = self.project(x)
        b, h, n, d = q.shape
        q = q.view(b, h // self.kv_heads, self.kv_heads, n, d)
        scores = torch.einsum("bgknd,bkmd->bgknm", q, k) / d**0.5
        future = torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1)
        out = torch.einsum("bgknm,bkmd->bgknd", weights, v)
        return self.wo(out.reshape(b, h, n, d).transpose(1, 2).reshape(b, n, -1))
