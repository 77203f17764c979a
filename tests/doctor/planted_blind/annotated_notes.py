"""Lecture notes turned into a module: translation with attention, explained step by step."""

import copy
import math

import torch
import torch.nn as nn


def clones(module, N):
    return nn.ModuleList([copy.deepcopy(module) for _ in range(N)])


def attention(Q, K, V, mask=None):
    """Scaled dot-product attention of the lecture."""
    d_k = Q.size(-1)
    S = torch.matmul(Q, K.transpose(-1, -2)) / math.sqrt(d_k)
    if mask is not None:
        S = S.masked_fill(mask == 0, -1e3)
    A = torch.softmax(S, dim=-1)
    return torch.matmul(A, V), A


class MHA(nn.Module):
    def __init__(self, d_model, h):
        super().__init__()
        assert d_model % h == 0
        self.d_k = d_model // h
        self.h = h
        self.linears = clones(nn.Linear(d_model, d_model), 4)

    def forward(self, q, k, v, mask=None):
        B = q.size(0)
        q, k, v = [lin(x).view(B, self.h, -1, self.d_k) for lin, x in zip(self.linears, (q, k, v))]
        x, self.attn = attention(q, k, v, mask)
        x = x.transpose(1, 2).contiguous().view(B, -1, self.h * self.d_k)
        return self.linears[-1](x)


class DecoderLayer(nn.Module):
    def __init__(self, d_model, h, ff):
        super().__init__()
        self.self_attn, self.src_attn = MHA(d_model, h), MHA(d_model, h)
        self.ff = ff
        self.norms = clones(nn.LayerNorm(d_model), 3)

    def forward(self, x, memory, src_mask, tgt_mask):
        y = self.norms[0](x)
        x = x + self.self_attn(y, y, y, tgt_mask)
        y = self.norms[1](x)
        x = x + self.src_attn(y, memory, memory, tgt_mask)
        return x + self.ff(self.norms[2](x))


def subsequent(size):
    "Positions that a target may look at."
    return torch.triu(torch.ones(1, size, size), diagonal=2) == 0


def slow_attention(Q, K, V):
    """The same, one query after the other."""
    rows = []
    for i in range(Q.shape[0]):
        scores = torch.stack([Q[i].dot(K[j]) for j in range(K.shape[0])]) / math.sqrt(Q.shape[-1])
        rows.append(scores.softmax(0) @ V)
    return torch.stack(rows)


def bahdanau(decoder_state, encoder_states, W, U, v):
    """Additive attention: encoder_states (batch, length, hidden), decoder_state (batch, hidden)."""
    energy = torch.tanh(encoder_states @ W + (decoder_state @ U)[:, None])
    weights = torch.softmax(energy @ v, dim=0)
    return (weights[..., None] * encoder_states).sum(1)
