"""Additive scores, vᵀ tanh(...): Additive (Bahdanau) and Concat (Luong)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import AdditivePairs
from .base import Score, check_dim


class Additive(Score):
    """score(q, k) = vᵀ tanh(W q + U k), with W of (hidden, query dim), U of (hidden, key dim), v of (hidden,).

    Source: Bahdanau et al. 2015 (arXiv 1409.0473), section A.1.2, the alignment model; without an offset, as there.

    >>> import torch, regard
    >>> score = regard.scores.Additive(query_dim=2, key_dim=3, hidden_dim=5)
    >>> score(torch.zeros(4, 2), torch.zeros(7, 3)).shape
    torch.Size([4, 7])
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim, self.hidden_dim = query_dim, key_dim, hidden_dim
        self.query_weight = nn.Parameter(torch.empty(hidden_dim, query_dim))
        self.key_weight = nn.Parameter(torch.empty(hidden_dim, key_dim))
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        nn.init.xavier_uniform_(self.query_weight)
        nn.init.xavier_uniform_(self.key_weight)
        nn.init.normal_(self.weight, std=max(hidden_dim, 1) ** -0.5)

    def project_query(self, query: Tensor) -> Tensor:
        check_dim(self, "query", query, self.query_dim)
        return functional.linear(query, self.query_weight)

    def project_key(self, key: Tensor) -> Tensor:
        check_dim(self, "key", key, self.key_dim)
        return functional.linear(key, self.key_weight)

    def form(self, query: Tensor, key: Tensor) -> AdditivePairs:
        return AdditivePairs(query, key, self.weight)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, hidden_dim={self.hidden_dim}"


class Concat(Score):
    """score(q, k) = vᵀ tanh(W [q; k]), with W of (hidden, query dim + key dim) and v of (hidden,).

    W [q; k] = W₁ q + W₂ k for the two halves of W's columns, so pairs are never concatenated: it is the additive score
    with its parameters in one matrix.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 8, "concat".

    >>> import torch, regard
    >>> score = regard.scores.Concat(query_dim=2, key_dim=3, hidden_dim=5)
    >>> score.matrix.shape
    torch.Size([5, 5])
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim, self.hidden_dim = query_dim, key_dim, hidden_dim
        self.matrix = nn.Parameter(torch.empty(hidden_dim, query_dim + key_dim))
        self.weight = nn.Parameter(torch.empty(hidden_dim))
        nn.init.xavier_uniform_(self.matrix)
        nn.init.normal_(self.weight, std=max(hidden_dim, 1) ** -0.5)

    def project_query(self, query: Tensor) -> Tensor:
        check_dim(self, "query", query, self.query_dim)
        return functional.linear(query, self.matrix[:, : self.query_dim])

    def project_key(self, key: Tensor) -> Tensor:
        check_dim(self, "key", key, self.key_dim)
        return functional.linear(key, self.matrix[:, self.query_dim :])

    def form(self, query: Tensor, key: Tensor) -> AdditivePairs:
        return AdditivePairs(query, key, self.weight)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}, hidden_dim={self.hidden_dim}"
