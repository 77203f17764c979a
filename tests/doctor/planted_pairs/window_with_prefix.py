"""A cache of keys and values, and the mask of what new tokens may read in it."""

import torch
from torch.nn import functional as F


class LayerCache:
    def __init__(self):
        self.keys = self.values = None

    def extend(self, keys, values):
        if self.keys is not None:
            keys, values = torch.cat([self.keys, keys], dim=2), torch.cat([self.values, values], dim=2)
        self.keys, self.values = keys, values
        return keys, values


def attention_step(cache, q, k, v, window):
    k, v = cache.extend(k, v)
    new, total = q.shape[2], k.shape[2]
    seen = torch.ones(new, total, dtype=torch.bool, device=q.device)
    seen = torch.tril(seen) & torch.triu(seen, diagonal=1 - window)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
