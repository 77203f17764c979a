from __future__ import annotations

import torch
from torch import Tensor, nn


class PatchEmbedding(nn.Module):
    def __init__(self, in_channels: int = 3, patch_size: int = 4, emb_size: int = 48, img_size: int = 16) -> None:
        super().__init__()
        self.projection = nn.Conv2d(in_channels, emb_size, kernel_size=patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.randn(1, 1, emb_size))
        self.positions = nn.Parameter(torch.randn((img_size // patch_size) ** 2 + 1, emb_size))

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(x).flatten(2).transpose(1, 2)
        cls_tokens = self.cls_token.expand(x.shape[0], -1, -1)
        return torch.cat([cls_tokens, x], dim=1) + self.positions


class PatchAttention(nn.Module):
    """Attention among the patches of a picture."""

    def __init__(self, emb_size: int = 48, num_heads: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.emb_size = emb_size
        self.qkv = nn.Linear(emb_size, emb_size * 3)
        self.att_drop = nn.Dropout(dropout)
        self.projection = nn.Linear(emb_size, emb_size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, self.emb_size // self.num_heads)
        queries, keys, values = qkv.permute(2, 0, 3, 1, 4)
        energy = torch.einsum("bhqd, bhkd -> bhqk", queries, keys)
        scaling = (self.emb_size // self.num_heads) ** -0.5
        att = torch.softmax(energy, dim=-1) * scaling
        att = self.att_drop(att)
        out = torch.einsum("bhal, bhlv -> bhav", att, values)
        out = out.transpose(1, 2).reshape(batch, length, self.emb_size)
        return self.projection(out)


class PoolingHead(nn.Module):
    """One learned query reads the patches."""

    def __init__(self, emb_size: int = 48, classes: int = 10) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.randn(1, 1, emb_size))
        self.key = nn.Linear(emb_size, emb_size)
        self.value = nn.Linear(emb_size, emb_size)
        self.classify = nn.Linear(emb_size, classes)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query.expand(x.shape[0], -1, -1)
        scores = query @ self.key(x).transpose(1, 2) / x.shape[-1] ** 0.5  # (batch, 1, patches)
        weights = scores.softmax(dim=1)
        return self.classify((weights @ self.value(x)).squeeze(1))


class EncoderBlock(nn.Module):
    def __init__(self, emb_size: int = 48, num_heads: int = 6, forward_expansion: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(emb_size)
        self.attention = PatchAttention(emb_size, num_heads)
        self.norm2 = nn.LayerNorm(emb_size)
        self.mlp = nn.Sequential(
            nn.Linear(emb_size, forward_expansion * emb_size), nn.GELU(), nn.Linear(forward_expansion * emb_size, emb_size)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Sequential):
    def __init__(self, depth: int = 2, emb_size: int = 48) -> None:
        super().__init__(PatchEmbedding(emb_size=emb_size), *[EncoderBlock(emb_size) for _ in range(depth)], PoolingHead(emb_size))
