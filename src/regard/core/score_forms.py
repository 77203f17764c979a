"""Pair forms, `DotPairs`, `AdditivePairs` and `DecayedDotPairs`: projected queries and keys, and their score function.

A score turns query and key into one of these, with its projections done; a kernel is written for pair forms, so a
new score costs no kernel. Query heads may be a multiple of key heads: query head h then meets key head ⌊h/group⌋
(Ainslie et al. 2023, arXiv 2305.13245), and nothing is repeated in memory: the group is folded into the rows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, eq=False, slots=True)
class DecayedDotPairs:
    """score(i, j) = Σ_d query_id key_jd e^{c_id - c_jd}, of causal linear attention with decay.

    Queries and keys are of one sequence, and c_i = g_1 + ... + g_i is the sum of its logarithms of decays. Pairs j > i,
    which a causal mask has to exclude, have finite scores of no meaning.

    Shapes: query (..., heads, N, D + 2G), key (..., key heads, N, D + 2G). D = `features` columns are q and k; the rest
    are c in two terms that add up to it, G = 1 for all features or G = D: rounded to one float32 number, c would be
    too coarse for the decay of near positions of a long sequence.

    rows, columns: the positions of the queries and keys in the sequence, 0..N-1 by default.
    """

    query: Tensor
    key: Tensor
    features: int
    rows: range | None = None
    columns: range | None = None

    @classmethod
    def from_decay(cls, query: Tensor, key: Tensor, decay: Tensor) -> DecayedDotPairs:
        """The form for q (..., heads, N, D), k (..., key heads, N, D) and g (..., key heads, N, 1 or D)."""
        return cls.from_sums(query, key, decay.double().cumsum(-2))

    @classmethod
    def from_sums(cls, query: Tensor, key: Tensor, sums: Tensor) -> DecayedDotPairs:
        """The form for q (..., heads, N, D), k (..., key heads, N, D) and c (..., key heads, N, 1 or D) in float64."""
        high = sums.to(key.dtype)
        terms = torch.cat([high, (sums - high).to(key.dtype)], -1)  # [..., Hk, N, 2G]
        group = query.shape[-3] // max(key.shape[-3], 1) if query.ndim >= 4 else 1
        per_query_head = terms.repeat_interleave(group, -3) if group != 1 else terms
        return cls(torch.cat([query, per_query_head], -1), torch.cat([key, terms], -1), key.shape[-1])

    def tile(self, rows: slice = WHOLE, columns: slice = WHOLE) -> DecayedDotPairs:
        """The same form for some of the rows and columns."""
        at = (self.rows or range(self.query.shape[-2]))[rows], (self.columns or range(self.key.shape[-2]))[columns]
        return DecayedDotPairs(self.query[..., rows, :], self.key[..., columns, :], self.features, *at)

    def uniform(self) -> DecayedDotPairs:
        """The same form and sizes with constant queries and keys and no decay: each score is 1 for j <= i."""
        query, key = torch.zeros_like(self.query), torch.zeros_like(self.key)
        query[..., : self.features], key[..., : self.features] = 1 / max(self.features, 1), 1.0
        return DecayedDotPairs(query, key, self.features, self.rows, self.columns)

    def scores(self) -> Tensor:
        """All scores, (..., heads, M, N), in float32 at least."""
        query, key = at_least_float32(self.query), at_least_float32(self.key)
        if query.shape[-3:-2] != key.shape[-3:-2]:
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)  # linear in the length
        (query, *q_sums), (key, *k_sums) = self._split(query), self._split(key)
        rows, columns = self.rows or range(query.shape[-2]), self.columns or range(key.shape[-2])
        if q_sums[0].shape[-1] == 1:
            decay = (q_sums[0] - k_sums[0].mT) + (q_sums[1] - k_sums[1].mT)  # [..., H, M, N]
            return (query @ key.mT) * decay.clamp_(max=0.0).exp_()
        scores = query.new_zeros(*query.shape[:-1], key.shape[-2])
        for start in range(0, len(rows), BLOCK_OF_ROWS):
            part = slice(start, min(start + BLOCK_OF_ROWS, len(rows)))
            # Up to the first row of the block, c_i - c_j is a sum of two that are both at most 0: a matrix product.
            before, after = bisect_right(columns, rows[start]), bisect_right(columns, rows[part.stop - 1])
            first = [sums[..., start : start + 1, :] for sums in q_sums]
            left = query[..., part, :] * _decay([sums[..., part, :] for sums in q_sums], first)
            right = key[..., :before, :] * _decay(first, [sums[..., :before, :] for sums in k_sums])
            scores[..., part, :before] = left @ right.mT
            own = [sums[..., part, None, :] for sums in q_sums], [sums[..., None, before:after, :] for sums in k_sums]
            pairs = query[..., part, None, :] * key[..., None, before:after, :] * _decay(*own)  # [..., H, m, n, D]
            scores[..., part, before:after] = pairs.sum(-1)
        return scores

    def decay(self) -> Tensor:
        """g, the logarithms of the decays: (..., key heads, N), or (..., key heads, N, D) with one for each feature."""
        _, high, low = self._split(self.key)
        sums = high.double() + low.double()
        decay = sums.diff(dim=-2, prepend=sums[..., :1, :]).to(self.key.dtype)  # of the first, nothing decays
        return decay.squeeze(-1) if decay.shape[-1] == 1 else decay

    def _split(self, tensor: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries or keys, and the two terms of c."""
        decays = (tensor.shape[-1] - self.features) // 2
        return tensor.split([self.features, decays, decays], -1)  # type: ignore[return-value]


BLOCK_OF_ROWS = 32
"""Rows whose products with the keys up to the first of them are one matrix product."""


def _decay(row_sums: Sequence[Tensor], column_sums: Sequence[Tensor]) -> Tensor:
    """e^{c_i - c_j}, at most 1: what is larger belongs to pairs j > i."""
    (high, low), (high_column, low_column) = row_sums, column_sums
    return ((high - high_column) + (low - low_column)).clamp_(max=0.0).exp_()


PairForm = DotPairs | AdditivePairs | DecayedDotPairs


def with_rows(pairs: PairForm, query: Tensor, key: Tensor, rows: range, columns: range) -> PairForm:
    """The same form over other queries and keys of the sequence, which are at these positions of it."""
    if isinstance(pairs, DecayedDotPairs):
        return DecayedDotPairs(query, key, pairs.features, rows, columns)
    return replace(pairs, query=query, key=key)


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
