"""A recommendation service: attention over a history of items, with types and settings of a company."""

from __future__ import annotations

import logging
import math
from typing import Final

import torch
from torch import Tensor, nn

logger = logging.getLogger(__name__)
_NEGATIVE: Final = -50.0


class HistoryAttention(nn.Module):
    """Reads the items that a user has seen."""

    def __init__(self, item_dim: int, hidden_dim: int, num_heads: int) -> None:
        super().__init__()
        if hidden_dim % num_heads:
            raise ValueError(f"hidden_dim ({hidden_dim}) must be divisible by num_heads ({num_heads})")
        self._num_heads = num_heads
        self._head_dim = hidden_dim // num_heads
        self._query_projection = nn.Linear(item_dim, hidden_dim)
        self._key_projection = nn.Linear(item_dim, hidden_dim)
        self._value_projection = nn.Linear(item_dim, hidden_dim)

    def _split_heads(self, tensor: Tensor) -> Tensor:
        batch_size, sequence_length, _ = tensor.size()
        return tensor.view(batch_size, sequence_length, self._num_heads, self._head_dim).transpose(1, 2)

    def _scores(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.matmul(query, key.transpose(-1, -2)).div(math.sqrt(self._head_dim))

    def forward(self, items: Tensor, is_padding: Tensor) -> Tensor:
        query = self._split_heads(self._query_projection(items))
        key = self._split_heads(self._key_projection(items))
        value = self._split_heads(self._value_projection(items))
        scores = self._scores(query, key)
        scores = torch.where(is_padding[:, None, None, :], torch.full_like(scores, _NEGATIVE), scores)
        return torch.matmul(scores.softmax(dim=-1), value).transpose(1, 2).flatten(start_dim=2)


class TargetAttention(nn.Module):
    """One candidate reads the history: scores (batch, items, 1)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._score = nn.Sequential(nn.Linear(4 * dim, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, candidate: Tensor, history: Tensor) -> Tensor:
        expanded = candidate[:, None].expand_as(history)
        features = torch.cat([expanded, history, expanded - history, expanded * history], dim=-1)
        weights = torch.softmax(self._score(features), dim=-1)
        return (weights * history).sum(dim=1)


class MixedPrecisionAttention(nn.Module):
    """Runs in float16 on the serving machines."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, allowed: Tensor) -> Tensor:
        query, key, value = self._qkv(x).to(torch.float16).chunk(3, dim=-1)
        scores = torch.bmm(query, key.transpose(1, 2)) / math.sqrt(query.size(-1))
        scores = scores.masked_fill(allowed.logical_not(), torch.finfo(scores.dtype).min)
        return torch.bmm(torch.softmax(scores, dim=-1), value)


class CoAttention(nn.Module):
    """Users and items read each other: scores (batch, users, items)."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self._bridge = nn.Parameter(torch.empty(dim, dim))
        nn.init.xavier_uniform_(self._bridge)

    def forward(self, users: Tensor, items: Tensor, user_valid: Tensor, item_valid: Tensor) -> tuple[Tensor, Tensor]:
        affinity = users @ self._bridge @ items.transpose(1, 2)
        affinity = affinity.masked_fill(~item_valid[:, None, :], float("-inf"))
        read_items = affinity.softmax(dim=1) @ items
        read_users = affinity.transpose(1, 2).softmax(dim=-1) @ users
        return read_items, read_users


class SequenceModel(nn.Module):
    """Predicts the next item."""

    def __init__(self, num_items: int, dim: int, num_heads: int) -> None:
        super().__init__()
        self._items = nn.Embedding(num_items, dim)
        self._positions = nn.Embedding(200, dim)
        self._attention = nn.MultiheadAttention(dim, num_heads, batch_first=True)
        self._norm = nn.LayerNorm(dim)

    def forward(self, history: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        length = history.size(1)
        x = self._items(history) + self._positions.weight[:length]
        causal = torch.ones(length, length, device=x.device).tril()
        attended, _ = self._attention(x, x, x, attn_mask=causal, need_weights=False)
        return self._norm(x + attended) @ self._items.weight.T
