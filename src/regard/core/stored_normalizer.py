"""Normalizers of few pairs, whose gradient follows from what the forward pass has stored."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from .finite import waits
from .normalizer import INFINITY, Normalizer

Stored: TypeAlias = tuple[Tensor, ...]
"""The tensors that a forward pass leaves to the gradient, the weights not among them."""


@dataclass(frozen=True, eq=False, slots=True)
class PairMask:
    """Which pairs exist, as numbers that are added to scores and multiplied with them.

    Torch adds and multiplies several times as fast as it fills by booleans that broadcast. Shapes: (B or 1, H or 1, M,
    N), and empty (B or 1, H or 1, M, 1).

    added: 0, and -inf of a pair that does not exist. factor: 1, and 0. empty: the rows without any pair; None where
    each has one.
    """

    added: Tensor
    factor: Tensor
    empty: Tensor | None

    @classmethod
    def of(cls, keep: Tensor, dtype: torch.dtype) -> PairMask:
        """The mask of booleans (True = attend), as numbers of this dtype.

        >>> PairMask.of(torch.tensor([[True, False]]), torch.float32).added
        tensor([[0., -inf]])
        """
        empty = ~keep.any(-1, keepdim=True)
        added = torch.zeros_like(keep, dtype=dtype).masked_fill_(~keep, -INFINITY)
        return cls(added, keep.to(dtype), empty if waits(keep) or bool(empty.any()) else None)


class StoredNormalizer(Normalizer):
    """A normalizer that can store what its gradient needs, where pairs are few: nothing is computed twice.

    Subclasses implement `weigh` and `differentiate` beside `normalize`, whose weights these are.
    """

    @abstractmethod
    def weigh(self, scores: Tensor, mask: PairMask | None) -> tuple[Tensor, Stored]:
        """The weights of all pairs, and what `differentiate` needs of them, without autograd.

        Shapes: finite scores, which may be written to, and weights (..., heads, M, N). mask: None where all pairs
        exist.
        """

    @abstractmethod
    def differentiate(
        self, stored: Stored, upstream: Tensor, mask: PairMask | None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The gradients of Σ upstream · weights in the scores and in each of `parameters`.

        Those of the scores may be written to.
        """

    def existing(self, keep: Tensor) -> Tensor:
        """The pairs that count, of those that a mask keeps, (B or 1, H or 1, M, N); here all of them."""
        return keep


def softmax_of(logits: Tensor, mask: PairMask | None) -> Tensor:
    """The softmax of logits to which `mask.added` is added already, with 0 in rows without any pair."""
    weights = logits.softmax(-1)
    return weights if mask is None or mask.empty is None else weights.masked_fill_(mask.empty, 0.0)


def softmax_gradient(upstream: Tensor, weights: Tensor) -> Tensor:
    """The gradient in the logits of a softmax, from that in its weights: w (u - Σ w u).

    >>> softmax_gradient(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.5, 0.5]]))
    tensor([[ 0.2500, -0.2500]])
    """
    return torch.ops.aten._softmax_backward_data(upstream, weights, -1, weights.dtype)
