"""A learned query for each label of a text classifier."""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention


class LabelQueries(nn.Module):
    def __init__(self, labels, dim, heads, pad=1):
        super().__init__()
        self.labels = nn.Embedding(labels, dim)
        self.heads, self.pad = heads, pad
        self.kv = nn.Linear(dim, 2 * dim)

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, hidden, ids):
        is_pad = ids.eq(self.pad)
        queries = self.labels.weight.expand(hidden.size(0), -1, -1)
        key, value = self.kv(hidden).chunk(2, -1)
        read = scaled_dot_product_attention(
            self.split(queries), self.split(key), self.split(value), attn_mask=is_pad[:, None, None, :]
        )
        return read.transpose(1, 2).flatten(2)
