import torch
import torch.nn as nn
import torch.nn.functional as F


def expand_kv(x: torch.Tensor, groups: int) -> torch.Tensor:
    """(batch, kv heads, length, dim) with each head once for every query head that reads it."""
    b, h, n, d = x.shape
    if groups == 1:
        return x
    return x.unsqueeze(1).expand(b, groups, h, n, d).reshape(b, h * groups, n, d)


class GroupedAttention(nn.Module):
    def __init__(self, dim=64, heads=8, kv_heads=2):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.wq = nn.Linear(dim, heads * self.head_dim, bias=False)
        self.wkv = nn.Linear(dim, 2 * kv_heads * self.head_dim, bias=False)
        self.wo = nn.Linear(heads * self.head_dim, dim, bias=False)

    def forward(self, x):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, self.heads, self.head_dim).transpose(1, 2)
        k, v = self.wkv(x).view(b, n, 2, self.kv_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        k = expand_kv(k, self.heads // self.kv_heads)
        v = expand_kv(v, self.heads // self.kv_heads)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, n, -1))
