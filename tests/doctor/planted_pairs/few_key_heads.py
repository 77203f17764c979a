"""Attention with fewer heads of keys than of queries."""

import torch
import torch.nn.functional as F
from torch import nn


class FewKeyHeads(nn.Module):
    def __init__(self, hidden, q_heads, kv_heads, head_dim):
        super().__init__()
        self.q_heads, self.kv_heads, self.head_dim = q_heads, kv_heads, head_dim
        self.wq = nn.Linear(hidden, q_heads * head_dim, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * head_dim, bias=False)
        self.wo = nn.Linear(q_heads * head_dim, hidden, bias=False)

    def forward(self, x):
        bs, seqlen, _ = x.shape
        q = self.wq(x).view(bs, seqlen, self.q_heads, self.head_dim)
        k = self.wk(x).view(bs, seqlen, self.kv_heads, self.head_dim)
        v = self.wv(x).view(bs, seqlen, self.kv_heads, self.head_dim)
        per_kv = self.q_heads // self.kv_heads
        if per_kv > 1:
            k = k.repeat_interleave(per_kv, dim=1)
            v = v.repeat_interleave(per_kv, dim=1)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(bs, seqlen, -1))
