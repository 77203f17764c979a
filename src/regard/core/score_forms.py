"""The two pair forms, `DotPairs` and `AdditivePairs`: projected queries and keys, and their score function.

A score turns query and key into one of these, with its projections done; a kernel is written for pair forms, so a
new score costs no kernel. Query heads may be a multiple of key heads: query head h then meets key head ⌊h/group⌋
(Ainslie et al. 2023, arXiv 2305.13245), and nothing is repeated in memory: the group is folded into the rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .grid import WHOLE


@dataclass(eq=False, slots=True)  # not frozen: see Problem
class DotPairs:
    """score(i, j) = scale · query_i · key_j, for query (..., heads, M, D), key (..., key heads, N, D)."""

    query: Tensor
    key: Tensor
    scale: float

    def tile(self, rows: slice = WHOLE, columns: slice = WHOLE) -> DotPairs:
        """The same form for some of the rows and columns."""
        return DotPairs(self.query[..., rows, :], self.key[..., columns, :], self.scale)

    def uniform(self) -> DotPairs:
        """The same form and sizes with constant queries and keys, for which every score is 1."""
        scale = 1 / max(self.query.shape[-1], 1)
        return DotPairs(torch.ones_like(self.query), torch.ones_like(self.key), scale)

    def scores(self) -> Tensor:
        """All scores, (..., heads, M, N), summed in float32 at least."""
        query, key = at_least_float32(self.query), at_least_float32(self.key)
        return per_head(lambda folded: (self.scale * folded) @ key.mT, query, key)


@dataclass(frozen=True, eq=False, slots=True)
class AdditivePairs:
    """score(i, j) = weight · tanh(query_i + key_j).

    Shapes: query (..., heads, M, A), key (..., key heads, N, A), weight (A,).
    """

    query: Tensor
    key: Tensor
    weight: Tensor

    def tile(self, rows: slice = WHOLE, columns: slice = WHOLE) -> AdditivePairs:
        """The same form for some of the rows and columns."""
        return AdditivePairs(self.query[..., rows, :], self.key[..., columns, :], self.weight)

    def uniform(self) -> AdditivePairs:
        """The same form and sizes with constant queries and keys, for which every score is 1."""
        weight = torch.full_like(self.weight, 1 / (math.tanh(1.0) * max(len(self.weight), 1)))
        return AdditivePairs(torch.ones_like(self.query), torch.zeros_like(self.key), weight)

    def scores(self) -> Tensor:
        """All scores, (..., heads, M, N), summed in float32 at least."""
        query, key = at_least_float32(self.query), at_least_float32(self.key)
        weight = self.weight.to(query.dtype)
        return per_head(
            lambda folded: torch.tanh(folded.unsqueeze(-2) + key.unsqueeze(-3)) @ weight,  # [..., M, N, A] @ [A]
            query,
            key,
        )


PairForm = DotPairs | AdditivePairs


def at_least_float32(tensor: Tensor) -> Tensor:
    """Cast half precision to float32; float32 and float64 are returned unchanged."""
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


def zero_nonfinite(tensor: Tensor) -> Tensor:
    """The tensor with NaN and infinity set to 0, and no gradient into these entries."""
    return torch.where(tensor.isfinite(), tensor, torch.zeros((), dtype=tensor.dtype, device=tensor.device))


def per_head(product, rows: Tensor, shared: Tensor) -> Tensor:
    """Apply `product` to rows (..., heads, M, ·) whose heads share those of `shared` (..., key heads, N, ·) in groups.

    The heads of one group become rows of their key head, (..., key heads, group·M, ·), and come apart again after.
    """
    if rows.ndim < 4 or rows.shape[-3] == shared.shape[-3]:
        return product(rows)
    heads, length = rows.shape[-3], rows.shape[-2]
    group = heads // shared.shape[-3]
    folded = rows.unflatten(-3, (shared.shape[-3], group)).flatten(-3, -2)  # [..., Hk, G·M, ·]
    return product(folded).unflatten(-2, (group, length)).flatten(-4, -3)  # [..., H, M, ·]


def per_key_head(pairs: Tensor, rows: Tensor, like: Tensor) -> Tensor:
    """pairsᵀ · rows, summed over the query heads of each key head.

    Shapes: pairs (..., heads, M, N), rows (..., heads, M, ·); the result is (..., key heads, N, ·), heads as of `like`.
    """
    if pairs.shape[-3] != like.shape[-3]:
        pairs, rows = (t.unflatten(-3, (like.shape[-3], -1)).flatten(-3, -2) for t in (pairs, rows))
    return pairs.mT @ rows
