"""Half-precision inference code of a speech model."""

import math

import torch
from torch import nn


class HalfAttention(nn.Module):
    def __init__(self, dim: int = 64, heads: int = 4):
        super().__init__()
        self.heads = heads
        self.head_dim = dim // heads
        self.query = nn.Linear(dim, dim).half()
        self.key = nn.Linear(dim, dim).half()
        self.value = nn.Linear(dim, dim).half()

    def heads_first(self, x):
        return x.view(x.size(0), x.size(1), self.heads, self.head_dim).permute(0, 2, 1, 3)

    def forward(self, x: torch.Tensor, padding: torch.Tensor):
        x = x.half()
        q, k, v = self.heads_first(self.query(x)), self.heads_first(self.key(x)), self.heads_first(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = scores.masked_fill(padding[:, None, None, :], -1e9)
        weights = torch.softmax(scores, dim=-1)
        return torch.matmul(weights, v).permute(0, 2, 1, 3).flatten(2)


def extended_mask(attention_mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    n = attention_mask.size(1)
    smallest = torch.finfo(dtype).min
    causal = torch.full((n, n), smallest, dtype=dtype, device=attention_mask.device).triu(1)
    padding = (1 - attention_mask[:, None, None, :].to(dtype)) * smallest
    return causal + padding


def attention_bf16(q, k, v, mask):
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    scores = q @ k.transpose(-2, -1) / q.size(-1) ** 0.5 + mask.to(q.dtype)
    probs = nn.functional.softmax(scores, dim=-1, dtype=torch.float32)
    return probs.to(v.dtype) @ v


class RotaryTable(nn.Module):
    def __init__(self, dim, max_len, dtype=torch.float16):
        super().__init__()
        inv_freq = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        t = torch.arange(max_len, dtype=dtype)
        self.register_buffer("angles", torch.outer(t, inv_freq.to(dtype)))

    def forward(self, n):
        return self.angles[:n].cos(), self.angles[:n].sin()


class BeamScorer(nn.Module):
    """Reads the audio with one query for each beam."""

    def __init__(self, dim=64):
        super().__init__()
        self.dim = dim

    def forward(self, beams, audio, lengths):
        scores = torch.bmm(beams, audio.transpose(1, 2)) * self.dim**-0.5
        outside = torch.arange(audio.size(1), device=audio.device)[None] >= lengths[:, None]
        scores = scores.float().masked_fill(outside[:, None], float("-inf"))
        return torch.bmm(scores.softmax(-1).to(audio.dtype), audio)
