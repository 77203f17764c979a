"""YOSO's weights: the probability that a query and a key have one hash by random hyperplanes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer
from ..errors import ConfigurationError


@dataclass(frozen=True)
class HashCollisions(Normalizer):
    """w_ij = (1 - arccos(s_ij) / π)^τ for scores that are cosines: the chance that τ hyperplanes all miss the angle.

    A random hyperplane puts two vectors at the angle θ on one side with the probability 1 - θ / π. YOSO samples which
    keys share a hash of τ bits with a query; these weights are the expectation, exact and without samples. Pass queries
    and keys of length 1 and `score=scores.Dot()`; a score above 1 by rounding is 1. Rows do not sum to 1: the paper
    divides outputs by their length, `torch.nn.functional.normalize(output, dim=-1)`.

    The slope of arccos is infinite where a query and a key are parallel; there it is taken as 0.

    The output for all keys is the sum of those for parts of them. There is no log-sum-exp, and no sink.
    `Observation.lse` has the logarithm of the sum of each row's weights.

    Source: Zeng et al. 2021, YOSO (arXiv 2111.09714), section 3.1.

    Args:
        hyperplanes: τ; 8 in the paper.

    Raises:
        ConfigurationError: hyperplanes is no whole number of at least 1.

    >>> import torch, regard
    >>> regard.normalizers.HashCollisions(hyperplanes=2).normalize(torch.tensor([[[1.0, 0.0, -1.0]]]))[0]
    tensor([[[1.0000, 0.2500, 0.0000]]])
    """

    hyperplanes: int = 8

    name = "hash-collisions"
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "no sum divides the weights, so a sink would take nothing of them"}

    def __post_init__(self) -> None:
        if not isinstance(self.hyperplanes, int) or isinstance(self.hyperplanes, bool) or self.hyperplanes < 1:
            raise ConfigurationError(
                f"HashCollisions needs hyperplanes as a whole number of at least 1, such as 8; it is "
                f"{self.hyperplanes!r}"
            )

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the logarithm of their sum."""
        masked = scores == -INFINITY
        cosines = scores.masked_fill(masked, 0.0)
        inside = cosines.clamp(torch.finfo(scores.dtype).eps - 1, 1 - torch.finfo(scores.dtype).eps)
        # Of the angle itself, with the slope of one that is not 0 or π.
        angles = cosines.detach().clamp(-1, 1).acos() + (inside.acos() - inside.detach().acos())
        weights = (1 - angles / math.pi).pow(self.hyperplanes).masked_fill(masked, 0.0)
        return weights, weights.detach().sum(-1).log()

    def merge(self, outputs: Tensor) -> Tensor:
        """The sum of the outputs."""
        return outputs.sum(0)
