import torch
import torch.nn as nn


class Block(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.norm2 = nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        y, weights = self.attn(y, y, y, need_weights=True)
        x = x + y
        return x + self.mlp(self.norm2(x)), weights


@torch.no_grad()
def importance(blocks, x):
    """How much attention each token receives, averaged over heads, queries and blocks: (batch, length)."""
    total = x.new_zeros(x.shape[:2])
    for block in blocks:
        x, weights = block(x)
        received = weights.mean(dim=1).mean(dim=-2)
        total = total + received
    return total / len(blocks)
