import math

import torch
from torch import Tensor, nn


class MultiHeadAttention(nn.Module):
    def __init__(self, hidden_dim: int = 64, num_heads: int = 4):
        super().__init__()
        assert hidden_dim % num_heads == 0
        self.qkv_dim = hidden_dim // num_heads
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_dim, 3 * hidden_dim, bias=False)
        self.o_proj = nn.Linear(hidden_dim, hidden_dim, bias=False)

    def forward(self, x: Tensor, future_mask: Tensor | None = None) -> Tensor:
        batch_size, sequence_length, hidden_dim = x.size()
        qkv = self.qkv_proj(x)
        qkv = qkv.reshape(batch_size, sequence_length, self.num_heads, 3 * self.qkv_dim)
        qkv = qkv.permute(0, 2, 1, 3)
        q, k, v = qkv.chunk(3, dim=-1)
        values, _ = self.scaled_dot_product(q, k, v, future_mask)
        values = values.reshape(batch_size, sequence_length, hidden_dim)
        return self.o_proj(values)

    def scaled_dot_product(self, q: Tensor, k: Tensor, v: Tensor, future_mask: Tensor | None):
        attn_logits = torch.matmul(q, torch.transpose(k, -2, -1)) / math.sqrt(q.size(-1))
        if future_mask is not None:
            attn_logits = attn_logits.masked_fill(future_mask == 0, float("-inf"))
        attention = torch.softmax(attn_logits, dim=-1)
        return torch.matmul(attention, v), attention
