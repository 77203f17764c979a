import math

import torch
import torch.nn as nn


class ScaledDotProduct(nn.Module):
    def __init__(self, dropout: float = 0.0, causal: bool = False):
        super().__init__()
        self.attn_drop = nn.Dropout(dropout)
        self.causal = causal

    def forward(self, q, k, v, att_mask=None):
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.size(-1))
        if att_mask is not None:
            if self.causal:
                n, m = scores.shape[-2:]
                causal_mask = torch.ones(n, m, dtype=torch.bool, device=q.device).tril(m - n)
                att_mask = att_mask & causal_mask
            scores = scores.masked_fill(~att_mask, float("-inf"))
        return self.attn_drop(scores.softmax(dim=-1)) @ v


class Decoder(nn.Module):
    def __init__(self, vocab=512, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.embed = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attention = ScaledDotProduct(dropout=0.1, causal=True)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + self.attention(q, k, v).transpose(1, 2).flatten(2)
        return self.head(x)
