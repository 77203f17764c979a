"""Translation with torch's own layers: every mask where it belongs."""

import math

import torch
from torch import nn


class Positions(nn.Module):
    def __init__(self, dim, length=512, dropout=0.1):
        super().__init__()
        angle = torch.arange(length)[:, None] * torch.exp(torch.arange(0, dim, 2) * (-math.log(10000.0) / dim))
        self.register_buffer("table", torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x):
        return self.dropout(x + self.table[: x.size(1)])


class Seq2Seq(nn.Module):
    def __init__(self, source=100, target=100, dim=64, heads=4, layers=2, pad=0):
        super().__init__()
        self.pad, self.dim = pad, dim
        self.source = nn.Embedding(source, dim, padding_idx=pad)
        self.target = nn.Embedding(target, dim, padding_idx=pad)
        self.positions = Positions(dim)
        self.transformer = nn.Transformer(dim, heads, layers, layers, 4 * dim, batch_first=True)
        self.out = nn.Linear(dim, target)

    def forward(self, source, target):
        source_padding, target_padding = source == self.pad, target == self.pad
        causal = torch.ones(target.size(1), target.size(1), dtype=torch.bool, device=target.device).triu(1)
        hidden = self.transformer(
            self.positions(self.source(source) * self.dim**0.5),
            self.positions(self.target(target) * self.dim**0.5),
            tgt_mask=causal,
            src_key_padding_mask=source_padding,
            tgt_key_padding_mask=target_padding,
            memory_key_padding_mask=source_padding,
        )
        return self.out(hidden)


class MemoryFirst(nn.Module):
    """Length first, as torch's default has it."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, dropout=0.1)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x, lengths):
        """x of (batch, length, dim)."""
        padding = torch.arange(x.size(1), device=x.device) >= lengths[:, None]
        x = x.transpose(0, 1)
        y, _ = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)
        return self.norm(x + y).transpose(0, 1)


class Plotted(nn.Module):
    """Returns the weights because the figure of the thesis draws them."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, x, attn_mask=None):
        y, weights = self.attention(x, x, x, attn_mask=attn_mask, need_weights=True, average_attn_weights=False)
        return y, weights


class CausalEncoder(nn.Module):
    def __init__(self, vocabulary=100, dim=64, heads=4, layers=2):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, dim), nn.Embedding(256, dim)
        layer = nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary)

    def forward(self, tokens):
        n = tokens.size(1)
        x = self.embedding(tokens) + self.position(torch.arange(n, device=tokens.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=tokens.device)
        return self.head(self.encoder(x, mask=mask, is_causal=True))


class SentenceEncoder(nn.Module):
    """Mean of the tokens that exist."""

    def __init__(self, vocabulary=100, dim=64):
        super().__init__()
        self.embedding, self.position = nn.Embedding(vocabulary, dim, padding_idx=0), nn.Embedding(256, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 128, batch_first=True)

    def forward(self, tokens):
        padding = tokens.eq(0)
        x = self.embedding(tokens) + self.position.weight[: tokens.size(1)]
        x = self.layer(x, src_key_padding_mask=padding)
        keep = (~padding).unsqueeze(-1)
        return (x * keep).sum(1) / keep.sum(1).clamp(min=1)
