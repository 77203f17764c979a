"""What every score is: a function of query and key that gives one of two pair forms."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn

from ..core.score_forms import PairForm
from ..errors import DeviceError, DtypeError, ShapeError


class Score(nn.Module, ABC):
    """f(q, k), as a module: projections of query and of key, then a pair form over both.

    Subclasses are final and say `form`, and `project_query` or `project_key` where they have parameters. Query, key
    and value dims may all differ where the score has a projection for it.
    """

    def project_query(self, query: Tensor) -> Tensor:
        """(..., M, query dim) to what the pair form compares."""
        return query

    def project_key(self, key: Tensor) -> Tensor:
        """(..., N, key dim) to what the pair form compares: worth keeping where many calls share the keys."""
        return key

    @abstractmethod
    def form(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form of a projected query and a projected key."""

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form of this score over query (..., M, ·) and key (..., N, ·)."""
        return self.form(self.project_query(query), self.project_key(key))

    def over_projected_keys(self) -> OverProjectedKeys:
        """This score for keys that went through `project_key` before: a decoder projects a sentence once."""
        return OverProjectedKeys(self)


class OverProjectedKeys:
    """A score whose keys are projected already."""

    def __init__(self, score: Score) -> None:
        self.score = score

    def pairs(self, query: Tensor, key: Tensor) -> PairForm:
        """The pair form over a query and a projected key."""
        return self.score.form(self.score.project_query(query), key)

    def __repr__(self) -> str:
        return f"{self.score!r}.over_projected_keys()"


def check_dim(score: nn.Module, argument: str, tensor: Tensor, dim: int) -> None:
    """Refuse a tensor whose last dimension, device or dtype the score was not made for."""
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
    """Refuse a dot product of vectors of different lengths."""
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(
            f"query has the dim {query.shape[-1]} and key {key.shape[-1]}: {type(score).__name__} needs equal dims; "
            f"scores.General({query.shape[-1]}, {key.shape[-1]}) learns a matrix between them"
        )
