"""Attention of a decoder that keeps what it has read."""

import torch
import torch.nn as nn
import torch.nn.functional as F


class KeepingAttention(nn.Module):
    def __init__(self, dim, n_heads):
        super().__init__()
        self.n_heads = n_heads
        self.q, self.kv, self.o = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim), nn.Linear(dim, dim)
        self.kept = None

    def reset(self):
        self.kept = None

    def forward(self, x):
        q = self.q(x).unflatten(-1, (self.n_heads, -1)).transpose(1, 2)
        k, v = (t.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))
        if self.kept is not None:
            k = torch.cat((self.kept[0], k), dim=2)
            v = torch.cat((self.kept[1], v), dim=2)
        self.kept = (k, v)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(out.transpose(1, 2).flatten(-2))
