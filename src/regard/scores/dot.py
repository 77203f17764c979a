"""Dot-product scores: Dot, ScaledDot and General (bilinear)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..core.score_forms import DotPairs
from ..errors import ConfigurationError
from .base import Score, check_dim, check_same_dim


class Dot(Score):
    """score(q, k) = q · k. Query and key dims must be equal.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 8, "dot".

    >>> import torch, regard
    >>> score = regard.scores.Dot()
    >>> score(torch.tensor([[1.0, 1.1]]), torch.tensor([[2.0, 10.0]]))
    tensor([[13.]])
    """

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        check_same_dim(self, query, key)
        return DotPairs(query, key, 1.0)


class ScaledDot(Score):
    """score(q, k) = scale · q · k, with scale = 1/√dim by default. Query and key dims must be equal.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), Eq. 1.

    >>> import torch, regard
    >>> regard.scores.ScaledDot()(torch.ones(1, 4), torch.ones(1, 4))
    tensor([[2.]])
    """

    def __init__(self, scale: float | None = None) -> None:
        super().__init__()
        if scale is not None and not -math.inf < scale < math.inf:
            raise ConfigurationError(f"scale is {scale}; ScaledDot needs a finite number, or None for 1/√dim")
        self.scale = scale

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        check_same_dim(self, query, key)
        scale = self.scale if self.scale is not None else max(query.shape[-1], 1) ** -0.5
        return DotPairs(query, key, scale)

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"


class General(Score):
    """score(q, k) = qᵀ W k, with W of (query dim, key dim): a bilinear score, the dot product of Wᵀ q and k.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 8, "general".

    >>> import torch, regard
    >>> score = regard.scores.General(query_dim=2, key_dim=3)
    >>> score(torch.zeros(4, 2), torch.zeros(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim = query_dim, key_dim
        self.weight = nn.Parameter(torch.empty(query_dim, key_dim))
        nn.init.xavier_uniform_(self.weight)

    def project_query(self, query: Tensor) -> Tensor:
        check_dim(self, "query", query, self.query_dim)
        return query @ self.weight

    def project_key(self, key: Tensor) -> Tensor:
        check_dim(self, "key", key, self.key_dim)
        return key

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        return DotPairs(query, key, 1.0)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, key_dim={self.key_dim}"
