"""The written-out path of an attention module, beside kernels that other files choose."""

import torch
from torch import nn


def padding_mask(ids, pad_id=0):
    """True where a token is read: (batch, 1, 1, keys)."""
    return (ids != pad_id)[:, None, None, :]


def eager_attention(module, query, key, value, attention_mask, scaling):
    scores = torch.matmul(query, key.transpose(2, 3)) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = nn.functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, value).transpose(1, 2)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, states, ids):
        b, n, _ = states.shape
        q, k, v = self.qkv(states).view(b, n, 3, self.heads, self.size).permute(2, 0, 3, 1, 4)
        return eager_attention(self, q, k, v, padding_mask(ids), self.size**-0.5).reshape(b, n, -1)
