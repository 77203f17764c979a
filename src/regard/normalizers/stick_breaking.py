"""Stick-breaking attention: each key, from the last one back, takes its share of what is left."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from ..core.normalizer import INFINITY, Normalizer


@dataclass(frozen=True, eq=False)
class StickBreaking(Normalizer):
    """w_ij = σ(s_ij) Π_{k>j} (1 - σ(s_ik)) over the keys that query i attends to: the nearest of the past come first.

    Keys are broken off in the order of their indices, from the last. What no key takes, Π_k (1 - σ(s_ik)), is left.

    Source: Tan et al. 2024 (arXiv 2410.17980); theirs is with a causal mask that excludes the query's own
    position, `masks.causal() & ~masks.window(0, 0)`.

    There is no log-sum-exp, and no sink: what is left is one. `Observation.lse` has its logarithm.

    >>> import torch, regard
    >>> regard.normalizers.StickBreaking().normalize(torch.zeros(1, 1, 3))[0]
    tensor([[[0.1250, 0.2500, 0.5000]]])
    """

    name = "stick-breaking"
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "what its keys leave of a row is a sink already"}

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the logarithm of what is left."""
        left = -softplus(scores)  # log (1 - σ(s)); 0 of masked pairs
        after = pad(left.flip(-1).cumsum(-1), (1, 0)).flip(-1)  # of the keys from j on, the sum; and 0
        weights = (after[..., 1:] - softplus(-scores)).exp()
        empty = (scores == -INFINITY).all(-1)
        return weights, after[..., 0].detach().masked_fill(empty, -INFINITY)

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """G_j - σ(s_j) Σ_{k≤j} G_k for G = upstream · w."""
        shares = upstream * weights
        return shares - torch.sigmoid(scores).mul_(shares.cumsum(-1)), ()
