"""A language model of today with one configuration object, for training on packed text."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention


@dataclass
class Config:
    vocab: int = 32000
    dim: int = 512
    n_layers: int = 6
    n_heads: int = 8
    n_kv_heads: int = 2
    sliding_window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0


def precompute(dim, length, theta=10_000.0):
    freqs = 1.0 / theta ** (torch.arange(0, dim, 2)[: dim // 2].float() / dim)
    t = torch.arange(length).float()
    angles = torch.outer(t, freqs)
    return torch.cat((angles, angles), dim=-1)


def turn(x, angles):
    even, odd = x[..., 0::2], x[..., 1::2]
    half = torch.stack((-odd, even), dim=-1).flatten(-2)
    return x * angles.cos() + half * angles.sin()


class Attention(nn.Module):
    def __init__(self, cfg: Config):
        super().__init__()
        self.n_heads, self.n_kv_heads = cfg.n_heads, cfg.n_kv_heads
        self.d = cfg.dim // cfg.n_heads
        self.sliding_window = cfg.sliding_window
        self.softcap = cfg.softcap
        self.wq = nn.Linear(cfg.dim, cfg.n_heads * self.d, bias=False)
        self.wk = nn.Linear(cfg.dim, cfg.n_kv_heads * self.d, bias=False)
        self.wv = nn.Linear(cfg.dim, cfg.n_kv_heads * self.d, bias=False)
        self.wo = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, angles, mask=None):
        b, n, _ = x.shape
        q = self.wq(x).view(b, n, self.n_heads, self.d).transpose(1, 2)
        k = self.wk(x).view(b, n, self.n_kv_heads, self.d).transpose(1, 2)
        v = self.wv(x).view(b, n, self.n_kv_heads, self.d).transpose(1, 2)
        q, k = turn(q, angles), turn(k, angles)
        k = k.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)
        v = v.repeat(1, self.n_heads // self.n_kv_heads, 1, 1)
        scores = q @ k.transpose(2, 3) * self.d**-0.5
        if self.sliding_window is not None:
            place = torch.arange(n, device=x.device)
            far = place[:, None] - place[None, :] >= self.sliding_window
            scores = scores.masked_fill(far, float("-inf"))
        if mask is not None:
            scores = scores + mask
        else:
            scores = scores + torch.full((n, n), float("-inf"), device=x.device).triu(1)
        return self.wo((scores.softmax(-1, dtype=torch.float32).to(v.dtype) @ v).transpose(1, 2).reshape(b, n, -1))


class PackedAttention(nn.Module):
    """Documents one after the other in one row."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.wo = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, document):
        n = x.shape[1]

        def same_document(b, h, q, k):
            return (document[b, q] == document[b, k]) | (q >= k)

        q, k, v = (one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        blocks = create_block_mask(same_document, x.shape[0], None, n, n, device=x.device)
        y = flex_attention(q, k, v, block_mask=blocks)
        return self.wo(y.transpose(1, 2).flatten(2))


class ChunkedAttention(nn.Module):
    """Prompts are read in chunks, then token by token."""

    def __init__(self, cfg: Config):
        super().__init__()
        self.n_heads = cfg.n_heads
        self.qkv = nn.Linear(cfg.dim, 3 * cfg.dim, bias=False)
        self.wo = nn.Linear(cfg.dim, cfg.dim, bias=False)

    def forward(self, x, past=None):
        q, k, v = (one.unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for one in self.qkv(x).chunk(3, -1))
        if past is not None:
            k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=past is None)
        return self.wo(y.transpose(1, 2).flatten(2)), (k, v)
