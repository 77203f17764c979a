"""Forecasting of hourly loads with an encoder of nn.TransformerEncoder."""

import torch
from torch import nn


def subsequent_mask(size: int) -> torch.Tensor:
    return torch.triu(torch.ones(size, size) * float("-inf"), diagonal=1)


class Forecaster(nn.Module):
    def __init__(self, features: int = 7, d_model: int = 32, nhead: int = 4, layers: int = 2) -> None:
        super().__init__()
        self.project = nn.Linear(features, d_model)
        layer = nn.TransformerEncoderLayer(d_model, nhead, dim_feedforward=64, dropout=0.1, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x)
        h = self.encoder(h)
        return self.head(h[:, -1])


class NextHour(nn.Module):
    """Predicts each hour from the hours before it."""

    def __init__(self, features: int = 7, d_model: int = 32) -> None:
        super().__init__()
        self.project = nn.Linear(features, d_model)
        self.when = nn.Embedding(512, d_model)
        layer = nn.TransformerEncoderLayer(d_model, 4, dim_feedforward=64, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(d_model, features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.project(x) + self.when(torch.arange(x.shape[1], device=x.device))
        mask = subsequent_mask(x.shape[1]).to(x.device).isinf()
        return self.head(self.encoder(h, mask=~mask))


class LagAttention(nn.Module):
    """Attention over the lags of one series, weights returned for the report."""

    def __init__(self, dim: int = 32):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, now: torch.Tensor, lags: torch.Tensor):
        q = self.query(now).unsqueeze(1)
        scores = torch.bmm(q, self.key(lags).transpose(1, 2)).squeeze(1) / lags.size(-1) ** 0.5
        weights = scores.softmax(-1)
        return torch.einsum("bl,bld->bd", weights, self.value(lags)), weights


class ProbAttention(nn.Module):
    def __init__(self, scale=None, attention_dropout=0.1):
        super().__init__()
        self.scale = scale
        self.dropout = nn.Dropout(attention_dropout)

    def forward(self, queries, keys, values, causal=True):
        B, L, H, E = queries.shape
        scale = self.scale or 1.0 / E
        scores = torch.einsum("blhe,bshe->bhls", queries, keys)
        if causal:
            scores = scores.masked_fill(torch.ones(L, L, dtype=torch.bool, device=queries.device).triu(1), float("-inf"))
        A = self.dropout(torch.softmax(scale * scores, dim=-1))
        return torch.einsum("bhls,bshd->blhd", A, values).contiguous()
