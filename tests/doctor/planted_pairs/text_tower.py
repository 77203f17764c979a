"""The text half of a contrastive model."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class TextTowerAttention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.head_width = width // heads
        self.in_proj = nn.Linear(width, 3 * width)
        self.out_proj = nn.Linear(width, width)
        self.register_buffer("keep", torch.ones(77, 77, dtype=torch.bool).tril(), persistent=False)

    def forward(self, tokens):
        batch, length, width = tokens.shape
        q, k, v = self.in_proj(tokens).chunk(3, dim=-1)
        q, k, v = (t.reshape(batch, length, self.heads, self.head_width).permute(0, 2, 1, 3) for t in (q, k, v))
        scores = torch.matmul(q, k.mT) * (1.0 / math.sqrt(self.heads))
        scores = scores.masked_fill(~self.keep[:length, :length], float("-inf"))
        context = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.out_proj(context.permute(0, 2, 1, 3).reshape(batch, length, width))
