"""A layer of a translator's decoder."""

import torch
from torch import nn


class TranslatorLayer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.self_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.source_attention = nn.MultiheadAttention(width, heads, batch_first=True)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))

    def forward(self, target, memory, memory_padding):
        n = target.size(1)
        later = torch.triu(torch.ones(n, n, dtype=torch.bool, device=target.device), diagonal=1)
        read, _ = self.self_attention(target, target, target, attn_mask=later, need_weights=False)
        target = self.norms[0](target + read)
        read, _ = self.source_attention(memory, target, target, need_weights=False)
        target = self.norms[1](target + read)
        return self.norms[2](target + self.feed(target))
