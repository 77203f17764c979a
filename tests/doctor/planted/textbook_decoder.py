"""A small decoder in the manner of the 2017 paper, for the third exercise sheet."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


def scaled_dot_product(q, k, v, mask=None):
    # (batch, heads, time, dim)
    scores = torch.matmul(q, k.transpose(-2, -1))
    if mask is not None:
        scores = scores.masked_fill(mask == 0, float("-inf"))
    weights = F.softmax(scores, dim=-1)
    return torch.matmul(weights, v), weights


class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        assert d_model % num_heads == 0
        self.d_model = d_model
        self.num_heads = num_heads
        self.d_k = d_model // num_heads
        self.W_q = nn.Linear(d_model, d_model)
        self.W_k = nn.Linear(d_model, d_model)
        self.W_v = nn.Linear(d_model, d_model)
        self.W_o = nn.Linear(d_model, d_model)

    def split_heads(self, x):
        batch_size, seq_len, _ = x.size()
        return x.view(batch_size, seq_len, self.num_heads, self.d_k).transpose(1, 2)

    def combine_heads(self, x):
        batch_size, _, seq_len, _ = x.size()
        return x.contiguous().view(batch_size, seq_len, self.d_model)

    def forward(self, q, k, v, mask=None):
        q, k, v = self.split_heads(self.W_q(q)), self.split_heads(self.W_k(k)), self.split_heads(self.W_v(v))
        out, _ = scaled_dot_product(q, k, v, mask)
        return self.W_o(self.combine_heads(out))


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.fc1 = nn.Linear(d_model, d_ff)
        self.fc2 = nn.Linear(d_ff, d_model)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


class DecoderLayer(nn.Module):
    def __init__(self, d_model, num_heads, d_ff):
        super().__init__()
        self.self_attn = MultiHeadAttention(d_model, num_heads)
        self.ff = FeedForward(d_model, d_ff)
        self.norm1 = nn.LayerNorm(d_model)
        self.norm2 = nn.LayerNorm(d_model)

    def forward(self, x, tgt_mask):
        x = self.norm1(x + self.self_attn(x, x, x, tgt_mask))
        return self.norm2(x + self.ff(x))


class Decoder(nn.Module):
    def __init__(self, vocab=100, d_model=32, num_heads=4, d_ff=64, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab, d_model)
        self.scale = math.sqrt(d_model)
        self.layers = nn.ModuleList([DecoderLayer(d_model, num_heads, d_ff) for _ in range(layers)])
        self.fc_out = nn.Linear(d_model, vocab)

    def forward(self, tokens):
        seq_len = tokens.size(1)
        tgt_mask = torch.tril(torch.ones(seq_len, seq_len, device=tokens.device))
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x, tgt_mask)
        return self.fc_out(x)
