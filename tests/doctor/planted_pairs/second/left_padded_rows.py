import torch
import torch.nn as nn


class LeftPaddedDecoder(nn.Module):
    """A one-layer decoder over batches that are padded on the left."""

    def __init__(self, vocab=256, dim=64, heads=4, pad_id=0):
        super().__init__()
        self.pad_id, self.heads, self.head_dim = pad_id, heads, dim // heads
        self.tok = nn.Embedding(vocab, dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def attention_bias(self, ids, dtype):
        n = ids.size(1)
        causal = torch.tril(torch.ones(n, n, dtype=torch.bool, device=ids.device))
        real = (ids != self.pad_id)[:, None, None, :]
        allowed = causal & real
        bias = torch.zeros(allowed.shape, dtype=dtype, device=ids.device)
        return bias.masked_fill(~allowed, float("-inf"))

    def forward(self, ids):
        b, n = ids.shape
        x = self.tok(ids)
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT * self.head_dim ** -0.5 + self.attention_bias(ids, q.dtype)
        mixed = torch.softmax(scores, dim=-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(b, n, -1))
        return self.lm_head(x)
