import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from einops.layers.torch import Rearrange
from torch import einsum, nn


def exists(val):
    return val is not None


def default(val, d):
    return val if exists(val) else d


class PreNorm(nn.Module):
    def __init__(self, dim, fn):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fn = fn

    def forward(self, x, **kwargs):
        return self.fn(self.norm(x), **kwargs)


class Attention(nn.Module):
    def __init__(self, dim, *, context_dim=None, heads=8, dim_head=64, causal=False, dropout=0.0):
        super().__init__()
        inner = heads * dim_head
        self.heads = heads
        self.causal = causal
        self.scale = dim**-0.5
        self.to_q = nn.Linear(dim, inner, bias=False)
        self.to_kv = nn.Linear(default(context_dim, dim), inner * 2, bias=False)
        self.dropout = nn.Dropout(dropout)
        self.to_out = nn.Linear(inner, dim)

    def forward(self, x, context=None, mask=None):
        h = self.heads
        q = self.to_q(x)
        k, v = self.to_kv(default(context, x)).chunk(2, dim=-1)
        q, k, v = (rearrange(t, "b n (h d) -> (b h) n d", h=h) for t in (q, k, v))
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if exists(mask):
            mask = repeat(mask, "b j -> (h b) () j", h=h)
            sim.masked_fill_(~mask, -torch.finfo(sim.dtype).max)
        if self.causal:
            i, j = sim.shape[-2:]
            sim.masked_fill_(torch.ones(i, j, device=x.device, dtype=torch.bool).triu(j - i + 1), -torch.finfo(sim.dtype).max)
        attn = self.dropout(sim.softmax(dim=-1))
        out = einsum("b i j, b j d -> b i d", attn, v)
        return self.to_out(rearrange(out, "(b h) n d -> b n (h d)", h=h))


class ConvAttention2d(nn.Module):
    def __init__(self, dim, heads=4, dim_head=16):
        super().__init__()
        self.heads, self.scale = heads, dim_head**-0.5
        self.to_qkv = nn.Conv2d(dim, heads * dim_head * 3, 1, bias=False)
        self.to_out = nn.Sequential(nn.Conv2d(heads * dim_head, dim, 1), Rearrange("b c h w -> b c h w"))

    def forward(self, x):
        b, _, height, width = x.shape
        q, k, v = (rearrange(t, "b (h c) x y -> b h c (x y)", h=self.heads) for t in self.to_qkv(x).chunk(3, dim=1))
        sim = einsum("b h d i, b h d j -> b h i j", q * self.scale, k)
        attn = F.softmax(sim, dim=-2)
        out = einsum("b h i j, b h d j -> b h i d", attn, v)
        return self.to_out(rearrange(out, "b h (x y) d -> b (h d) x y", x=height, y=width))


class LinearAttention(nn.Module):
    def __init__(self, dim, heads=4, dim_head=16):
        super().__init__()
        self.heads = heads
        self.to_qkv = nn.Linear(dim, heads * dim_head * 3, bias=False)
        self.to_out = nn.Linear(heads * dim_head, dim)

    def forward(self, x):
        q, k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_qkv(x).chunk(3, dim=-1))
        q, k = F.elu(q) + 1, F.elu(k) + 1
        context = einsum("b h n d, b h n e -> b h n d e", k, v).cumsum(dim=2)
        out = einsum("b h n d, b h n d e -> b h n e", q, context)
        return self.to_out(rearrange(out, "b h n d -> b n (h d)"))
