"""A captioner: cross-attention from words to patches."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class CrossAttention(nn.Module):
    def __init__(self, dim: int = 64, context_dim: int = 48, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.scale = (dim // heads) ** -0.5
        self.to_q = nn.Linear(dim, dim, bias=False)
        self.to_k = nn.Linear(context_dim, dim, bias=False)
        self.to_v = nn.Linear(context_dim, dim, bias=False)
        self.to_out = nn.Linear(dim, dim)

    def split(self, x: Tensor) -> Tensor:
        b, n, _ = x.shape
        return x.view(b, self.heads, n, -1)

    def forward(self, x: Tensor, context: Tensor, context_mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.to_q(x)), self.split(self.to_k(context)), self.split(self.to_v(context))
        sim = q @ k.transpose(-1, -2) * self.scale
        weights = sim.softmax(dim=-1)
        out = (weights @ v).transpose(1, 2).reshape(x.shape)
        return self.to_out(out)


class Resampler(nn.Module):
    """Learned queries that read a picture of any size (Perceiver)."""

    def __init__(self, dim: int = 48, latents: int = 8, heads: int = 4) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.02)
        self.attention = nn.MultiheadAttention(dim, heads, batch_first=True)

    def forward(self, patches: Tensor) -> Tensor:
        latents = self.latents.expand(patches.shape[0], -1, -1)
        out, weights = self.attention(latents, patches, patches, need_weights=True)
        return latents + out


class CaptionLayer(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.qkv = nn.Linear(dim, 3 * dim)
        self.cross = CrossAttention(dim)
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)

    def forward(self, x: Tensor, image: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return x + self.cross(self.norm2(x), image)


class Captioner(nn.Module):
    def __init__(self, vocab: int = 100, dim: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, dim)
        self.place = nn.Embedding(128, dim)
        self.resampler = Resampler()
        self.layers = nn.ModuleList([CaptionLayer(dim) for _ in range(depth)])
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens: Tensor, patches: Tensor) -> Tensor:
        image = self.resampler(patches)
        x = self.token(tokens) + self.place.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, image)
        return self.head(x)
