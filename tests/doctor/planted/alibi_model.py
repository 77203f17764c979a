"""Long context by linear biases."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def get_slopes(n):
    start = 2 ** (-(2 ** -(math.log2(n) - 3)))
    return [start * start**i for i in range(n)]


def build_alibi(heads, length):
    slopes = torch.tensor(get_slopes(heads)).view(heads, 1, 1)
    distance = torch.arange(length)[None, :] - torch.arange(length)[:, None]
    return slopes * distance


class AlibiAttention(nn.Module):
    def __init__(self, dim=64, heads=4, max_len=256):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.register_buffer("causal", torch.full((max_len, max_len), float("-inf")).triu(1))
        self.register_buffer("alibi", build_alibi(heads, max_len), persistent=False)

    def forward(self, x, past=None):
        b, n, c = x.shape
        q, k, v = (t.view(b, n, self.heads, -1).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat((past[0], k), 2), torch.cat((past[1], v), 2)
        total = k.shape[2]
        bias = self.causal[total - n : total, :total]
        if past is None:
            bias = bias + self.alibi[:, :n, :n]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.out(y.transpose(1, 2).reshape(b, n, c)), (k, v)


class AlibiModel(nn.Module):
    def __init__(self, vocab=100, dim=64, depth=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([AlibiAttention(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids, past=None):
        x, present = self.embed(ids), []
        for i, layer in enumerate(self.layers):
            y, kv = layer(self.norm(x), None if past is None else past[i])
            x = x + y
            present.append(kv)
        return self.head(x), present


def t5_bias(length, table, max_distance=128):
    """Learned bias by bucketed distance."""
    buckets = table.shape[0]
    distance = (torch.arange(length)[:, None] - torch.arange(length)[None]).clamp(min=0)
    exact = buckets // 2
    large = exact + (torch.log(distance.clamp(min=1) / exact) / math.log(max_distance / exact) * (buckets - exact)).long()
    return table[torch.where(distance < exact, distance, large.clamp(max=buckets - 1))].permute(2, 0, 1)
