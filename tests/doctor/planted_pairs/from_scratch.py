"""Several heads, written to be read."""

import torch
from torch import nn


class ManyHeads(nn.Module):
    def __init__(self, hidden_dim, num_heads):
        super().__init__()
        self.qkv_dim = hidden_dim // num_heads
        self.num_heads = num_heads
        self.qkv_proj = nn.Linear(hidden_dim, 3 * num_heads * self.qkv_dim, bias=False)
        self.o_proj = nn.Linear(num_heads * self.qkv_dim, hidden_dim, bias=False)

    def scaled_dot_product(self, q, k, v, mask):
        logits = torch.matmul(q, torch.transpose(k, -2, -1)) / self.qkv_dim**0.5
        if mask is not None:
            logits = logits.masked_fill(mask[:, None, None, :] == 0, float("-inf"))
        return torch.matmul(torch.softmax(logits, dim=-1), v)

    def forward(self, x, mask=None):
        batch_size, sequence_length, hidden_dim = x.size()
        qkv = self.qkv_proj(x).reshape(batch_size, sequence_length, self.num_heads, 3 * self.qkv_dim)
        q, k, v = qkv.permute(0, 2, 1, 3).chunk(3, dim=-1)
        values = self.scaled_dot_product(q, k, v, mask)
        values = values.reshape(batch_size, sequence_length, hidden_dim)
        return self.o_proj(values)
