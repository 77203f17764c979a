"""Base class of scores: modules that project query and key, and return one of two pair forms."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ..core.score_forms import PairForm
from ..errors import DeviceError, DtypeError, ShapeError


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


class OverProjectedKeys:
    """A score that takes keys already projected by `project_key`."""

    def __init__(self, score: Score) -> None:
        self.score = score

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over a query and a projected key."""
        return self.score.form(self.score.project_query(query), key)

    def __repr__(self) -> str:
        return f"{self.score!r}.over_projected_keys()"


def check_dim(score: nn.Module, argument: str, tensor: Tensor, dim: int) -> None:
    """Raise an error if a tensor's last dimension, device or dtype differs from the score's parameters."""
    if tensor.shape[-1] != dim:
        raise ShapeError(
            f"{argument} has the dim {tensor.shape[-1]} (shape {tuple(tensor.shape)}), but {score} was made for "
            f"{argument}_dim={dim}"
        )
    weight = next(score.parameters())
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
