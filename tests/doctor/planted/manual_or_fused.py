"""One layer with a fused path and a manual one, as in many libraries."""

import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class FlexibleAttention(nn.Module):
    def __init__(self, dim: int = 64, num_heads: int = 4, dropout: float = 0.0, is_causal: bool = True):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = dim // num_heads
        self.dropout = dropout
        self.is_causal = is_causal
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(dim, dim) for _ in range(4))

    def _shape(self, x):
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, x, attention_mask=None, return_attention_scores=False):
        q, k, v = self._shape(self.q_proj(x)), self._shape(self.k_proj(x)), self._shape(self.v_proj(x))
        if not return_attention_scores:
            if attention_mask is not None:
                out = F.scaled_dot_product_attention(q, k, v, attn_mask=attention_mask)
            else:
                out = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
            return self.out_proj(out.transpose(1, 2).flatten(2))
        scores = q @ k.transpose(-1, -2) / math.sqrt(self.head_dim)
        if attention_mask is not None:
            scores = scores.masked_fill(~attention_mask, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        out = (F.dropout(weights, self.dropout, self.training) @ v).transpose(1, 2).flatten(2)
        return self.out_proj(out), weights


class EvalSwitch(nn.Module):
    def __init__(self, attention: FlexibleAttention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        if not self.training:
            self.attention.dropout = 0.0
        return self.attention(x)


class Block(nn.Module):
    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.attn = FlexibleAttention(dim, heads, dropout=0.1)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x, mask=None):
        x = x + self.attn(self.norm1(x), mask)
        return x + self.mlp(self.norm2(x))
