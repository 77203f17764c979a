"""Rotary positions with a table that is computed once for each length."""

import torch
from torch import nn


class Rotary(nn.Module):
    def __init__(self, dim, base=10000.0):
        super().__init__()
        self.register_buffer("inv_freq", base ** (-torch.arange(0, dim, 2).float() / dim))
        self.tables = {}

    def angles(self, length, offset):
        key = length
        if key not in self.tables:
            positions = torch.arange(offset, offset + length).float()
            angle = torch.outer(positions, self.inv_freq)
            self.tables[key] = (angle.cos().repeat(1, 2), angle.sin().repeat(1, 2))
        return self.tables[key]

    def forward(self, x, offset=0):
        """x (batch, heads, length, dim), whose first position is offset."""
        cos, sin = self.angles(x.size(-2), offset)
        left, right = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-right, left), dim=-1) * sin


def attend(q, k, v, past, rotary):
    offset = past[0].size(-2) if past is not None else 0
    q, k = rotary(q, offset), rotary(k, offset)
    if past is not None:
        k, v = torch.cat((past[0], k), dim=-2), torch.cat((past[1], v), dim=-2)
    mask = torch.ones(q.size(-2), k.size(-2), dtype=torch.bool).tril(k.size(-2) - q.size(-2))
    return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask), (k, v)
