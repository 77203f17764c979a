"""Grouped attention with rotary positions, a cache, windows and padding."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class AttentionSettings:
    dim: int = 64
    heads: int = 8
    kv_heads: int = 2
    window: int | None = None
    dropout: float = 0.0
    theta: float = 10_000.0

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads


def rotary_angles(positions: Tensor, dim: int, theta: float) -> Tensor:
    """(..., length) to (..., 1, length, dim / 2), in float32."""
    frequencies = theta ** (-torch.arange(0, dim, 2, device=positions.device, dtype=torch.float32) / dim)
    return (positions.float()[..., None] * frequencies).unsqueeze(-3)


def rotate(x: Tensor, angles: Tensor) -> Tensor:
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


@dataclass
class LayerCache:
    keys: Tensor
    values: Tensor

    @property
    def length(self) -> int:
        return self.keys.shape[-2]


class GroupedAttention(nn.Module):
    def __init__(self, settings: AttentionSettings) -> None:
        super().__init__()
        self.settings = settings
        kv_dim = settings.kv_heads * settings.head_dim
        self.query = nn.Linear(settings.dim, settings.dim, bias=False)
        self.key = nn.Linear(settings.dim, kv_dim, bias=False)
        self.value = nn.Linear(settings.dim, kv_dim, bias=False)
        self.output = nn.Linear(settings.dim, settings.dim, bias=False)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.settings.head_dim)).transpose(-2, -3)

    def keep(self, queries: int, keys: int, padding: Tensor | None, device: torch.device) -> Tensor:
        """True where a query may attend: the last query sees all keys, as far back as the window."""
        rows = torch.arange(keys - queries, keys, device=device)[:, None]
        columns = torch.arange(keys, device=device)
        keep = columns <= rows
        if self.settings.window is not None:
            keep &= columns > rows - self.settings.window
        return keep if padding is None else keep & ~padding[:, None, None, :]

    def forward(
        self, x: Tensor, positions: Tensor, cache: LayerCache | None = None, padding: Tensor | None = None
    ) -> tuple[Tensor, LayerCache]:
        angles = rotary_angles(positions, self.settings.head_dim, self.settings.theta)
        q = rotate(self._heads(self.query(x)), angles)
        k, v = rotate(self._heads(self.key(x)), angles), self._heads(self.value(x))
        if cache is not None:
            k, v = torch.cat([cache.keys, k], dim=-2), torch.cat([cache.values, v], dim=-2)
        y = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=self.keep(q.shape[-2], k.shape[-2], padding, x.device),
            dropout_p=self.settings.dropout if self.training else 0.0,
            enable_gqa=True,
        )
        return self.output(y.transpose(-2, -3).flatten(-2)), LayerCache(k, v)

    def weights(self, x: Tensor, positions: Tensor) -> Tensor:
        """The same by hand, for plots."""
        s = self.settings
        angles = rotary_angles(positions, s.head_dim, s.theta)
        q, k = (rotate(self._heads(f(x)), angles) for f in (self.query, self.key))
        q = q.unflatten(-3, (s.kv_heads, -1))
        scores = torch.einsum("...gid,...jd->...gij", q, k) / math.sqrt(s.head_dim)
        scores = scores.masked_fill(~self.keep(x.shape[-2], x.shape[-2], None, x.device), -math.inf)
        return scores.softmax(dim=-1, dtype=torch.float32).flatten(-4, -3)


class GroupedModel(nn.Module):
    def __init__(self, vocabulary: int = 128, layers: int = 2, settings: AttentionSettings | None = None) -> None:
        super().__init__()
        settings = settings or AttentionSettings()
        self.embedding = nn.Embedding(vocabulary, settings.dim)
        self.layers = nn.ModuleList(GroupedAttention(settings) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(settings.dim) for _ in range(layers))
        self.head = nn.Linear(settings.dim, vocabulary, bias=False)

    def forward(self, tokens: Tensor, caches: list[LayerCache] | None = None) -> tuple[Tensor, list[LayerCache]]:
        start = caches[0].length if caches else 0
        positions = torch.arange(start, start + tokens.shape[1], device=tokens.device)
        x, new = self.embedding(tokens), []
        for number, (layer, norm) in enumerate(zip(self.layers, self.norms, strict=True)):
            y, cache = layer(norm(x), positions, caches[number] if caches else None)
            x = x + y
            new.append(cache)
        return self.head(x), new

    @torch.inference_mode()
    def generate(self, tokens: Tensor, steps: int) -> Tensor:
        logits, caches = self(tokens)
        for _ in range(steps):
            token = logits[:, -1:].argmax(-1)
            tokens = torch.cat([tokens, token], dim=1)
            logits, caches = self(token, caches)
        return tokens
