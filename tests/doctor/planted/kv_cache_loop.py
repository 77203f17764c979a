"""Generation with a cache of keys and values, written for a reading group."""

from typing import NamedTuple, Optional

import torch
import torch.nn as nn
import torch.nn.functional as F


class Cache(NamedTuple):
    k: torch.Tensor
    v: torch.Tensor


class CachedAttention(nn.Module):
    def __init__(self, dim=64, n_heads=4):
        super().__init__()
        self.n_heads = n_heads
        self.to_qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, cache: Optional[Cache] = None):
        B, T, C = x.shape
        q, k, v = self.to_qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k = torch.cat([cache.k, k], dim=-2)
            v = torch.cat([cache.v, v], dim=-2)
        att = (q @ k.transpose(-2, -1)) * (C // self.n_heads) ** -0.5
        if cache is None:
            mask = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()
            att = att.masked_fill(~mask, float("-inf"))
        y = att.softmax(dim=-1) @ v
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), Cache(k, v)


class WindowCacheAttention(CachedAttention):
    def __init__(self, dim=64, n_heads=4, window=16):
        super().__init__(dim, n_heads)
        self.window = window

    def forward(self, x, cache: Optional[Cache] = None):
        B, T, C = x.shape
        q, k, v = self.to_qkv(x).view(B, T, 3, self.n_heads, C // self.n_heads).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k = torch.cat([cache.k, k], dim=-2)[..., -self.window :, :]
            v = torch.cat([cache.v, v], dim=-2)[..., -self.window :, :]
        S = k.size(-2)
        i = torch.arange(T, device=x.device)[:, None] + S - T
        j = torch.arange(S, device=x.device)[None]
        keep = (j <= i) & (i - j <= self.window)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep)
        return self.proj(y.transpose(1, 2).reshape(B, T, C)), Cache(k, v)


class Decoder(nn.Module):
    def __init__(self, vocab=64, dim=64, layers=2, max_len=256):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(max_len, dim)
        self.layers = nn.ModuleList([CachedAttention(dim) for _ in range(layers)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids, caches=None):
        past = 0 if caches is None else caches[0].k.size(-2)
        x = self.embed(ids) + self.pos(torch.arange(past, past + ids.size(1), device=ids.device))
        new = []
        for i, layer in enumerate(self.layers):
            y, cache = layer(self.norm(x), None if caches is None else caches[i])
            x = x + y
            new.append(cache)
        return self.head(x), new


@torch.no_grad()
def generate(model: Decoder, ids: torch.Tensor, steps: int) -> torch.Tensor:
    logits, caches = model(ids)
    for _ in range(steps):
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], dim=1)
        logits, caches = model(ids[:, -1:], caches)
    return ids


def greedy(model: nn.Module, prompt: torch.Tensor, steps: int) -> torch.Tensor:
    tokens = prompt
    model.eval()
    with torch.inference_mode():
        while tokens.size(1) < prompt.size(1) + steps:
            out = model(tokens)
            logits = out[0] if isinstance(out, tuple) else out
            tokens = torch.cat([tokens, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
    return tokens
