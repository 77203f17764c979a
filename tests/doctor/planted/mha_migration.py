"""Classifier and language model on nn.MultiheadAttention, with the code that replaced it half way."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention as sdpa


class TextClassifier(nn.Module):
    def __init__(self, vocab=1000, dim=64, heads=4, classes=3, pad=0):
        super().__init__()
        self.pad = pad
        self.embedding = nn.Embedding(vocab, dim, padding_idx=pad)
        self.position = nn.Parameter(torch.zeros(1, 256, dim))
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[:, : tokens.shape[1]]
        y, _ = self.attention(x, x, x, key_padding_mask=tokens.ne(self.pad), need_weights=False)
        return self.head(self.norm(x + y).mean(1))


class CausalLayer(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        length = x.shape[1]
        mask = torch.tril(torch.ones(length, length, device=x.device))
        y, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        return self.norm(x + y)


class CausalLayerNew(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.heads = heads
        self.in_proj = nn.Linear(dim, 3 * dim)
        self.out_proj = nn.Linear(dim, dim)

    def forward(self, x, key_padding_mask=None):
        q, k, v = self.in_proj(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        length = x.shape[1]
        drop = torch.triu(torch.ones(length, length, dtype=torch.bool, device=x.device), diagonal=1)
        if key_padding_mask is not None:
            drop = drop | key_padding_mask[:, None, None, :]
        y = sdpa(q, k, v, attn_mask=drop)
        return self.out_proj(y.transpose(1, 2).flatten(2))


class Pooler(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, dim))
        self.attention = nn.MultiheadAttention(dim, 1)

    def forward(self, x, pad_mask=None):
        query = self.query.expand(x.shape[0], 1, -1)
        x = x.transpose(0, 1)
        y, _ = self.attention(query.transpose(0, 1), x, x, key_padding_mask=pad_mask, need_weights=False)
        return y[0]


class SetEncoder(nn.Module):
    """Items of a set (batch, items, dim)."""

    def __init__(self, dim=64):
        super().__init__()
        self.first = nn.MultiheadAttention(dim, 4)
        self.second = nn.MultiheadAttention(dim, 4, batch_first=True)

    def forward(self, items: torch.Tensor):
        batch, count, dim = items.shape
        x, _ = self.first(items, items, items, need_weights=False)
        x, _ = self.second(x, x, x, need_weights=False)
        return x.mean(dim=1)
