"""The location score, which depends on the query alone."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import DotPairs
from ..errors import ShapeError
from .base import Score, check_dim


class Location(Score):
    """score(q, key j) = (W q)_j, with W of (max length, query dim): a score per key index, from the query alone.

    As a pair form it is the dot product of W q with the one-hot vector of j, the index of the key in the call, from 0.

    Raises:
        ShapeError: more keys than `max_length`.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 9, "location".

    >>> import torch, regard
    >>> score = regard.scores.Location(query_dim=2, max_length=7)
    >>> score(torch.zeros(4, 2), torch.zeros(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, query_dim: int, max_length: int) -> None:
        super().__init__()
        self.query_dim, self.max_length = query_dim, max_length
        self.weight = nn.Parameter(torch.empty(max_length, query_dim))
        nn.init.xavier_uniform_(self.weight)

    def project_query(self, query: Tensor) -> Tensor:
        check_dim(self, "query", query, self.query_dim)
        return functional.linear(query, self.weight)

    def project_key(self, key: Tensor) -> Tensor:
        length = key.shape[-2]
        if length > self.max_length:
            raise ShapeError(
                f"key has {length} positions, but {self} was made for at most max_length={self.max_length}: "
                "shorten the sequence or create the score with a larger max_length"
            )
        one_hot = torch.eye(length, self.max_length, dtype=self.weight.dtype, device=key.device)
        return one_hot.expand(*key.shape[:-2], length, self.max_length)

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        return DotPairs(query, key.to(query.dtype), 1.0)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, max_length={self.max_length}"
