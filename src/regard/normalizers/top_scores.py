"""Softmax over the largest scores of each row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer, quotients
from ..errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class TopScores(Normalizer):
    """Softmax over the k largest scores of each row; all other keys have weight 0, and no gradient.

    Exactly k keys have weight, or all where a row attends to fewer; of equal scores any may be chosen.

    Source: Gupta et al. 2021 (arXiv 2106.06899).

    Args:
        k: how many.

    Raises:
        ConfigurationError: k is no whole number of at least 1.

    >>> import torch, regard
    >>> regard.normalizers.TopScores(2).normalize(torch.tensor([[[1.0, 0.0, 1.0]]]))[0]
    tensor([[[0.5000, 0.0000, 0.5000]]])
    """

    k: int

    name = "top scores"
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "a sink is no key that could be among the k"}

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise ConfigurationError(f"TopScores needs k as a whole number of at least 1, such as 16; it is {self.k!r}")

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the log-sum-exp of the chosen scores."""
        if self.k < scores.shape[-1]:
            chosen = scores.detach().topk(self.k, sorted=False).indices
            others = torch.ones_like(scores, dtype=torch.bool).scatter(-1, chosen, False)
            scores = scores.masked_fill(others, -INFINITY)
        return quotients(scores, scores)

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """That of softmax: keys without weight have none."""
        shares = upstream * weights
        return shares.sub_(weights * shares.sum(-1, keepdim=True)), ()
