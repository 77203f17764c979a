"""Attention maps of object queries over an image, one for each head."""

import torch
import torch.nn.functional as F
from torch import nn


class QueryMaps(nn.Module):
    """Weights (batch, queries, heads, height, width); no value is read."""

    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.q_linear = nn.Linear(dim, dim)
        self.k_linear = nn.Linear(dim, dim)
        self.norm = float(dim / heads) ** -0.5

    def forward(self, queries, pixels):
        q = self.q_linear(queries)
        k = F.conv2d(pixels, self.k_linear.weight.unsqueeze(-1).unsqueeze(-1), self.k_linear.bias)
        q = q.view(q.shape[0], q.shape[1], self.heads, -1)
        k = k.view(k.shape[0], self.heads, -1, k.shape[-2], k.shape[-1])
        maps = torch.einsum("bqnc,bnchw->bqnhw", q * self.norm, k)
        return F.softmax(maps.flatten(2), dim=-1).view(maps.size())
