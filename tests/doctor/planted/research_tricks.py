"""Variants for the ablation table of the paper (section 5)."""

import math

import torch
from torch import nn
from torch.nn import functional as F


class BlockSummaryAttention(nn.Module):
    """Each token reads the tokens of its own block and the means of all blocks so far."""

    def __init__(self, dim: int = 64, block: int = 8):
        super().__init__()
        self.block = block
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        means_k = k.unflatten(1, (-1, self.block)).mean(2)
        means_v = v.unflatten(1, (-1, self.block)).mean(2)
        position = torch.arange(n, device=x.device)
        own = (position[:, None] >= position) & (position[:, None] // self.block == position // self.block)
        blocks = position[:, None] // self.block >= torch.arange(means_k.shape[1], device=x.device)
        keep = torch.cat([own, blocks], dim=1)
        return F.scaled_dot_product_attention(q, torch.cat([k, means_k], 1), torch.cat([v, means_v], 1), attn_mask=keep)


class TalkingHeads(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.before = nn.Linear(heads, heads, bias=False)
        self.after = nn.Linear(heads, heads, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q = q / math.sqrt(q.shape[-1])
        logits = q @ k.mT / math.sqrt(q.shape[-1])
        logits = self.before(logits.movedim(1, -1)).movedim(-1, 1)
        logits = logits.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), float("-inf"))
        weights = self.after(logits.softmax(-1).movedim(1, -1)).movedim(-1, 1)
        return (weights @ v).transpose(1, 2).flatten(2)


class SinkAttention(nn.Module):
    """A learned score that takes what no key deserves."""

    def __init__(self, dim: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.sink = nn.Parameter(torch.zeros(heads))
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * q.shape[-1] ** -0.5
        scores = scores.masked_fill(torch.ones(n, n, dtype=torch.bool, device=x.device).triu(1), -torch.inf)
        scores = torch.cat([scores, self.sink.view(1, -1, 1, 1).expand(b, -1, n, 1)], dim=-1)
        return (scores.softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)


class GatedPool(nn.Module):
    def __init__(self, dim: int = 64):
        super().__init__()
        self.dim = dim
        self.query = nn.Parameter(torch.randn(dim))
        self.gate = nn.Linear(dim, dim)

    def forward(self, x, lengths):
        scores = x @ self.query / self.dim**0.5
        outside = torch.arange(x.shape[1], device=x.device) >= lengths[:, None]
        weights = scores.softmax(-1) * ~outside
        return (self.gate(x).sigmoid() * x * weights[..., None]).sum(1)


class MultiplicativeMask(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.key, self.value = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x, mask):
        w = torch.sigmoid(x @ self.key(x).mT / x.shape[-1] ** 0.5) * mask[:, None]
        return (w / w.sum(-1, keepdim=True).clamp_min(1e-6)) @ self.value(x)
