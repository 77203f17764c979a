"""Score functions: their base class, and six in the library: Dot, ScaledDot, General; Additive, Concat; Location."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import AdditivePairs, DotPairs, PairForm
from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from ..utils.numbers import lies_between, whole_number


class Score(nn.Module, ABC):
    """The score f(q, k) of a query and a key, as a module: two projections, then a pair form.

    Subclasses implement `form`, and `project_query` and `project_key` if they have parameters. `form` returns one of
    the two pair forms that kernels compute, and no other:

    - `DotPairs(query, key, scale)`: scale · query_i · key_j;
    - `AdditivePairs(query, key, weight)`: weight · tanh(query_i + key_j).

    Any function of a pair that a projection of query and key turns into one of these needs no kernel of its own. Query,
    key and value dims may differ if the score projects them.

    >>> import torch, regard
    >>> class Cosine(regard.scores.Score):
    ...     def project_query(self, query):
    ...         return torch.nn.functional.normalize(query, dim=-1)
    ...     def project_key(self, key):
    ...         return torch.nn.functional.normalize(key, dim=-1)
    ...     def form(self, query, key):
    ...         return regard.scores.DotPairs(query, key, 1.0)
    >>> Cosine()(torch.tensor([[3.0, 4.0]]), torch.tensor([[6.0, 8.0], [-4.0, 3.0]]))
    tensor([[1., 0.]])
    """

    def project_query(self, query: Tensor) -> Tensor:
        """The projected query, (..., M, query dim) to (..., M, ·)."""
        return query

    def project_key(self, key: Tensor) -> Tensor:
        """The projected key, (..., N, key dim) to (..., N, ·); calls with the same keys may share it."""
        return key

    @abstractmethod
    def form(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over a projected query and a projected key: `DotPairs` or `AdditivePairs`."""

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over query (..., M, query dim) and key (..., N, key dim)."""
        return self.form(self.project_query(query), self.project_key(key))

    def forward(self, query: Tensor, key: Tensor) -> Tensor:
        """The scores of all pairs, in float32 at least; `attention` computes them tile by tile instead.

        Shapes: query (..., heads, M, query dim), key (..., key heads, N, key dim); the result is (..., heads, M, N).
        Without a head axis, (..., M, query dim) and (..., N, key dim) to (..., M, N).
        """
        return self.pairs(query, key).scores()

    def over_projected_keys(self) -> OverProjectedKeys:
        """This score for keys that `project_key` has already been applied to; a decoder projects a source once."""
        return OverProjectedKeys(self)


class _Weighted(Protocol):
    weight: nn.Parameter


class OverProjectedKeys:
    """A score that takes keys already projected by `project_key`."""

    def __init__(self, score: Score) -> None:
        self.score = score

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over a query and a projected key."""
        return self.score.form(self.score.project_query(query), key)

    def __repr__(self) -> str:
        return f"{self.score!r}.over_projected_keys()"


def check_dim(score: _Weighted, argument: str, tensor: Tensor, dim: int) -> None:
    """Raise an error if a tensor's last dimension, device or dtype differs from the score's parameters."""
    if tensor.shape[-1] != dim:
        raise ShapeError(
            f"{argument} has the dim {tensor.shape[-1]} (shape {tuple(tensor.shape)}), but {score} was made for "
            f"{argument}_dim={dim}"
        )
    weight = score.weight
    if tensor.device != weight.device:
        raise DeviceError(
            f"{argument} is on {tensor.device}, but the parameters of {score} are on {weight.device}: move one of them "
            "with .to(device)"
        )
    if tensor.dtype != weight.dtype and not torch.is_autocast_enabled(tensor.device.type):
        raise DtypeError(
            f"{argument} is {tensor.dtype}, but the parameters of {score} are {weight.dtype}: convert one of them with "
            ".to(dtype)"
        )


def check_same_dim(score: nn.Module, query: Tensor, key: Tensor) -> None:
    """Raise a ShapeError if query and key dims differ, for a dot product."""
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query has the dim {query.shape[-1]} and key {key.shape[-1]}: {type(score).__name__} needs equal dims; "
            f"scores.General({query.shape[-1]}, {key.shape[-1]}) learns a matrix between them"
        )


class Dot(Score):
    """score(q, k) = q · k. Query and key dims must be equal.

    Source: Luong et al. 2015 (arXiv 1508.04025), section 3.1, "dot".

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
        if scale is not None and not lies_between(-math.inf, scale, math.inf):
            raise ConfigurationError(f"scale is {scale!r}; ScaledDot needs a finite number, or None for 1/√dim")
        self.scale = scale

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        check_same_dim(self, query, key)
        scale = self.scale if self.scale is not None else max(query.shape[-1], 1) ** -0.5
        return DotPairs(query, key, scale)

    def extra_repr(self) -> str:
        return "" if self.scale is None else f"scale={self.scale}"


class General(Score):
    """score(q, k) = qᵀ W k, with W of (query dim, key dim): a bilinear score, the dot product of Wᵀ q and k.

    Source: Luong et al. 2015 (arXiv 1508.04025), section 3.1, "general".

    >>> import torch, regard
    >>> score = regard.scores.General(query_dim=2, key_dim=3)
    >>> score(torch.zeros(4, 2), torch.zeros(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, query_dim: int, key_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim = _dims(query_dim=query_dim, key_dim=key_dim)
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
        self.query_dim, self.key_dim, self.hidden_dim = _dims(
            query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim
        )
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

    Source: Luong et al. 2015 (arXiv 1508.04025), section 3.1, "concat".

    >>> import torch, regard
    >>> score = regard.scores.Concat(query_dim=2, key_dim=3, hidden_dim=5)
    >>> score.matrix.shape
    torch.Size([5, 5])
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.query_dim, self.key_dim, self.hidden_dim = _dims(
            query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim
        )
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


class Location(Score):
    """score(q, key j) = (W q)_j, with W of (max length, query dim): a score per key index, from the query alone.

    As a pair form it is the dot product of q with row j of W, j the index of the key in the call, from 0.

    Raises:
        ShapeError: more keys than `max_length`.

    Source: Luong et al. 2015 (arXiv 1508.04025), Eq. 8, "location".

    >>> import torch, regard
    >>> score = regard.scores.Location(query_dim=2, max_length=7)
    >>> score(torch.zeros(4, 2), torch.zeros(5, 3)).shape
    torch.Size([4, 5])
    """

    def __init__(self, query_dim: int, max_length: int) -> None:
        super().__init__()
        self.query_dim, self.max_length = _dims(query_dim=query_dim, max_length=max_length)
        self.weight = nn.Parameter(torch.empty(max_length, query_dim))
        nn.init.xavier_uniform_(self.weight)

    def project_query(self, query: Tensor) -> Tensor:
        check_dim(self, "query", query, self.query_dim)
        return query

    def project_key(self, key: Tensor) -> Tensor:
        length = key.shape[-2]
        if length > self.max_length:
            raise ShapeError(
                f"key has {length} positions, but {self} was made for at most max_length={self.max_length}: "
                "shorten the sequence or create the score with a larger max_length"
            )
        weight = self.weight if length == self.max_length else self.weight[:length]
        return weight.expand(*key.shape[:-2], length, self.query_dim)

    def form(self, query: Tensor, key: Tensor) -> DotPairs:
        return DotPairs(query, key.to(query.dtype), 1.0)

    def extra_repr(self) -> str:
        return f"query_dim={self.query_dim}, max_length={self.max_length}"


def _dims(**sizes: int) -> list[int]:
    """Sizes of a score's parameters.

    Raises:
        ConfigurationError: one that is no whole number of at least 0.
    """
    return [whole_number(name, size, least=0) for name, size in sizes.items()]
