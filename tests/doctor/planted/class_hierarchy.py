"""Attention mechanisms as subclasses of one base."""

import abc
import math

import torch
from torch import nn


class BaseAttention(nn.Module, abc.ABC):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.dim, self.heads, self.head_dim = dim, heads, dim // heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))

    def project(self, x, context):
        b = x.size(0)
        shape = lambda t: t.view(b, -1, self.heads, self.head_dim).transpose(1, 2)  # noqa: E731
        return shape(self.q(x)), shape(self.k(context)), shape(self.v(context))

    @abc.abstractmethod
    def scores(self, q, k): ...

    def mask(self, scores):
        return scores

    def normalise(self, scores):
        return scores.softmax(dim=-1)

    def forward(self, x, context=None):
        q, k, v = self.project(x, x if context is None else context)
        weights = self.normalise(self.mask(self.scores(q, k)))
        return self.o((weights @ v).transpose(1, 2).flatten(2))


class DotProduct(BaseAttention):
    def scores(self, q, k):
        return q @ k.transpose(-2, -1) * math.sqrt(self.head_dim)


class ByLength(BaseAttention):
    def scores(self, q, k):
        return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(k.size(-2))


class Causal(BaseAttention):
    def scores(self, q, k):
        return torch.einsum("bhid,bhjd->bhij", q, k) / math.sqrt(self.head_dim)

    def mask(self, scores):
        n = scores.size(-1)
        allowed = torch.tril(torch.ones(n, n, dtype=torch.bool, device=scores.device))
        return scores.masked_fill(allowed, float("-inf"))


class Windowed(BaseAttention):
    def __init__(self, dim: int, heads: int, window: int = 8) -> None:
        super().__init__(dim, heads)
        self.window = window

    def scores(self, q, k):
        return q @ k.mT / math.sqrt(self.head_dim)

    def mask(self, scores):
        i = torch.arange(scores.size(-2), device=scores.device)[:, None]
        j = torch.arange(scores.size(-1), device=scores.device)
        return scores.masked_fill(j > i, float("-inf"))


class Cosine(BaseAttention):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.temperature = nn.Parameter(torch.ones(heads, 1, 1) * 10)

    def scores(self, q, k):
        q, k = nn.functional.normalize(q, dim=-1), nn.functional.normalize(k, dim=-1)
        return q @ k.mT * self.temperature
