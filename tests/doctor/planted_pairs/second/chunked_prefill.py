import torch
import torch.nn as nn
import torch.nn.functional as F


class CachedAttention(nn.Module):
    """Causal attention that appends each chunk of a prompt to its keys and values."""

    def __init__(self, dim: int = 64, heads: int = 4, max_len: int = 512, max_batch: int = 4):
        super().__init__()
        self.heads, self.head_dim = heads, dim // heads
        self.wqkv = nn.Linear(dim, 3 * dim, bias=False)
        self.wo = nn.Linear(dim, dim, bias=False)
        shape = (max_batch, heads, max_len, self.head_dim)
        self.register_buffer("k_cache", torch.zeros(shape), persistent=False)
        self.register_buffer("v_cache", torch.zeros(shape), persistent=False)

    def forward(self, x: torch.Tensor, start: int) -> torch.Tensor:
        b, n, d = x.shape
        q, k, v = (
            t.view(b, n, self.heads, self.head_dim).transpose(1, 2) for t in self.wqkv(x).split(d, dim=-1)
        )
        end = start + n
        self.k_cache[:b, :, start:end] = k
        self.v_cache[:b, :, start:end] = v
        keys, values = self.k_cache[:b, :, :end], self.v_cache[:b, :, :end]
        y = F.scaled_dot_product_attention(q, keys, values, is_causal=n > 1)
        return self.wo(y.transpose(1, 2).reshape(b, n, d))


def prefill(layer: CachedAttention, x: torch.Tensor, chunk: int = 128) -> torch.Tensor:
    outs = [layer(part, start=i * chunk) for i, part in enumerate(x.split(chunk, dim=1))]
    return torch.cat(outs, dim=1)
