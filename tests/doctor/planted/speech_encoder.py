"""Encoder for speech with chunks, after the streaming papers."""

import math

import torch
from torch import nn
from torch.nn import functional as F


def chunk_mask(frames: int, chunk: int, left: int = -1) -> torch.Tensor:
    """Frames see their own chunk and those before it, as far back as `left` chunks."""
    number = torch.arange(frames) // chunk
    keep = number[None, :] <= number[:, None]
    if left >= 0:
        keep &= number[None, :] >= number[:, None] - left
    return keep


def pad_mask(lengths: torch.Tensor, frames: int) -> torch.Tensor:
    """True for the frames behind the end."""
    return torch.arange(frames, device=lengths.device)[None, :] >= lengths[:, None]


class StreamingAttention(nn.Module):
    def __init__(self, dim=64, heads=4, dropout=0.1):
        super().__init__()
        self.h, self.d_k = heads, dim // heads
        self.linear_q, self.linear_k, self.linear_v, self.linear_out = (nn.Linear(dim, dim) for _ in range(4))
        self.dropout = nn.Dropout(dropout)

    def forward_qkv(self, x):
        b = x.size(0)
        return (f(x).view(b, -1, self.h, self.d_k).transpose(1, 2) for f in (self.linear_q, self.linear_k, self.linear_v))

    def forward(self, x, keep):
        q, k, v = self.forward_qkv(x)
        scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(self.d_k)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        attn = torch.softmax(scores, dim=-1).masked_fill(~keep, 0.0)
        x = torch.matmul(self.dropout(attn), v)
        return self.linear_out(x.transpose(1, 2).flatten(2))


class StreamingEncoder(nn.Module):
    def __init__(self, features=80, dim=64, depth=2, chunk=4):
        super().__init__()
        self.chunk = chunk
        self.subsample = nn.Conv1d(features, dim, 3, stride=2, padding=1)
        self.position = nn.Conv1d(dim, dim, 3, padding=1, groups=dim)
        self.layers = nn.ModuleList([StreamingAttention(dim) for _ in range(depth)])

    def forward(self, audio, lengths):
        x = self.subsample(audio.transpose(1, 2))
        x = (x + self.position(x)).transpose(1, 2)
        outside = pad_mask((lengths + 1) // 2, x.shape[1])
        keep = chunk_mask(x.shape[1], self.chunk).to(x.device) & outside[:, None, None, :]
        for layer in self.layers:
            x = x + layer(x, keep)
        return x


class RelativeShift(nn.Module):
    """Transformer-XL's position scores."""

    def __init__(self, dim=64, heads=4):
        super().__init__()
        self.h, self.d_k = heads, dim // heads
        self.q, self.k, self.v, self.p = (nn.Linear(dim, dim) for _ in range(4))
        self.u = nn.Parameter(torch.zeros(heads, 1, dim // heads))
        self.w = nn.Parameter(torch.zeros(heads, 1, dim // heads))

    def shift(self, x):
        b, h, n, m = x.shape
        return F.pad(x, (1, 0)).view(b, h, m + 1, n)[:, :, 1:].reshape(b, h, n, m)[..., : m // 2 + 1]

    def forward(self, x, positions):
        b, n, d = x.shape
        heads = lambda t: t.view(t.shape[0], -1, self.h, self.d_k).transpose(1, 2)  # noqa: E731
        q, k, v, p = heads(self.q(x)), heads(self.k(x)), heads(self.v(x)), heads(self.p(positions))
        scores = (q + self.u) @ k.mT + self.shift((q + self.w) @ p.mT)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class ConformerLite(nn.Module):
    def __init__(self, dim=64):
        super().__init__()
        self.attention = nn.MultiheadAttention(dim, 4, dropout=0.1, batch_first=True)
        self.conv = nn.Conv1d(dim, dim, 7, padding=3, groups=dim)

    def forward(self, x, lengths):
        outside = pad_mask(lengths, x.shape[1])
        y = self.attention(x, x, x, key_padding_mask=outside)[0]
        return x + y + self.conv(x.transpose(1, 2)).transpose(1, 2)
