from typing import Optional

import torch
from torch import nn


class AttentionBlock(nn.Module):
    """Self-attention between the pixels of a feature map, as in a diffusion U-Net."""

    def __init__(self, n_channels: int = 64, n_heads: int = 2, d_k: Optional[int] = None):
        super().__init__()
        if d_k is None:
            d_k = n_channels // n_heads
        self.norm = nn.GroupNorm(32, n_channels)
        self.projection = nn.Linear(n_channels, n_heads * d_k * 3)
        self.output = nn.Linear(n_heads * d_k, n_channels)
        self.scale = d_k ** -0.5
        self.n_heads = n_heads
        self.d_k = d_k

    def forward(self, x: torch.Tensor):
        batch_size, n_channels, height, width = x.shape
        h = self.norm(x).view(batch_size, n_channels, -1).permute(0, 2, 1)
        qkv = self.projection(h).view(batch_size, -1, self.n_heads, 3 * self.d_k)
        query, key, value = torch.chunk(qkv, 3, dim=-1)
        scores = torch.einsum("bihd,bjhd->bijh", query, key) * self.scale
        probs = scores.softmax(dim=1)
        mixed = torch.einsum("bijh,bjhd->bihd", probs, value)
        mixed = self.output(mixed.reshape(batch_size, -1, self.n_heads * self.d_k))
        mixed = mixed.permute(0, 2, 1).view(batch_size, n_channels, height, width)
        return x + mixed
