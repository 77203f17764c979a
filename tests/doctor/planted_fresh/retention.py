"""Retention and linear attention: no softmax, state of constant size."""

import torch
import torch.nn.functional as F
from torch import nn


class Retention(nn.Module):
    """The parallel form, with a decay for each head."""

    def __init__(self, hidden=32, heads=4):
        super().__init__()
        self.heads, self.d = heads, hidden // heads
        self.W_Q, self.W_K, self.W_V, self.W_O = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.group_norm = nn.GroupNorm(heads, hidden)
        self.register_buffer("gammas", 1 - 2.0 ** (-5 - torch.arange(heads)))

    def _get_D(self, length):
        n = torch.arange(length, device=self.gammas.device)
        distance = (n[:, None] - n[None, :]).abs()
        return self.gammas[:, None, None] ** distance

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = (w(x).view(b, n, self.heads, self.d).transpose(1, 2) for w in (self.W_Q, self.W_K, self.W_V))
        ret = (q @ k.transpose(-1, -2)) * self.d**-0.5 * self._get_D(n)
        out = (ret @ v).transpose(1, 2).reshape(b * n, c)
        return self.W_O(self.group_norm(out).view(b, n, c))


class CausalLinearAttention(nn.Module):
    """Sums of outer products along the sequence."""

    def __init__(self, dim=32, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        state = torch.einsum("bhnd,bhne->bhnde", k, v).cumsum(dim=2)
        out = torch.einsum("bhnd,bhnde->bhne", q, state)
        return out.transpose(1, 2).reshape(b, n, c)


class NormalizedLinearAttention(nn.Module):
    def __init__(self, dim=32, heads=4, eps=1e-6):
        super().__init__()
        self.heads, self.eps = heads, eps
        self.to_qkv = nn.Linear(dim, 3 * dim)

    def feature_map(self, x):
        return F.elu(x)

    def forward(self, x, mask=None):
        b, n, c = x.shape
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        q, k, v = (t.view(b, n, self.heads, -1) for t in (q, k, v))
        q, k = self.feature_map(q), self.feature_map(k)
        if mask is not None:
            k = k * mask[:, :, None, None]
        kv = torch.einsum("nlhd,nlhm->nhmd", k, v)
        z = 1 / (torch.einsum("nlhd,nhd->nlh", q, k.sum(dim=1)) + self.eps)
        return torch.einsum("nlhd,nhmd,nlh->nlhm", q, kv, z).reshape(b, n, c)
