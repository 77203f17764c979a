"""The scores of a tile and their gradient, without autograd: for each pair form one way that stays in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from ..pairs import AdditivePairs, DotPairs, PairForm, at_least_float32, per_head, per_key_head
from .flat import Gradients
from .layout import cut

CHUNK = 2**19
"""Numbers that stand in memory at once where a pair has one for each feature."""


class Scoring(Protocol):
    """f(q, k) over tiles of a flat problem."""

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """The scores of a tile, (B, H, m, n), in float32 at least, in memory of their own."""
        ...

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        """Add the gradients of Σ upstream · scores to those of query, key and weight, but for what `finish` does."""
        ...

    def finish(self, into: Gradients) -> None:
        """What is the same for all tiles, once after the last."""
        ...


class DotScoring:
    """scale · q · k: two matrix products backward, one forward; the scale goes into the query once."""

    def __init__(self, pairs: DotPairs) -> None:
        self.scale = pairs.scale
        self.query, self.key = at_least_float32(pairs.query) * pairs.scale, at_least_float32(pairs.key)

    def scores(self, rows: slice, columns: slice) -> Tensor:
        key = self.key[:, :, columns]
        return per_head(lambda folded: folded @ key.mT, self.query[:, :, rows], key)

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        into.query[:, :, rows] += per_head(lambda folded: folded @ key, upstream, key)
        into.key[:, :, columns] += per_key_head(upstream, query, key)

    def finish(self, into: Gradients) -> None:
        into.query.mul_(self.scale)  # the key's has it from the query


class AdditiveScoring:
    """weight · tanh(q + k), a few rows and columns at a time: each pair has as many numbers as there are features."""

    def __init__(self, pairs: AdditivePairs) -> None:
        self.query, self.key = at_least_float32(pairs.query), at_least_float32(pairs.key)
        self.weight = at_least_float32(pairs.weight).to(self.query.dtype)
        group = self.query.shape[1] // max(self.key.shape[1], 1)
        if group > 1:
            self.key = self.key.repeat_interleave(group, dim=1)  # linear in the length, unlike the scores
        self.group = group

    def scores(self, rows: slice, columns: slice) -> Tensor:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        scores = query.new_empty(*query.shape[:3], key.shape[2])
        for above, left in self._chunks(scores):
            sums = query[:, :, above].unsqueeze(-2) + key[:, :, left].unsqueeze(-3)  # [B, H, m, n, A]
            torch.matmul(sums.tanh_(), self.weight, out=(part := scores.new_empty(sums.shape[:-1])))
            scores[:, :, above, left] = part
        return scores

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        grad_query, grad_key = torch.zeros_like(query), torch.zeros_like(key)
        for above, left in self._chunks(upstream):
            part = upstream[:, :, above, left].unsqueeze(-1)  # [B, H, m, n, 1]
            tanh = (query[:, :, above].unsqueeze(-2) + key[:, :, left].unsqueeze(-3)).tanh_()
            if into.weight is not None:
                into.weight.add_((tanh * part).sum((0, 1, 2, 3)))
            inner = tanh.square_().neg_().add_(1.0).mul_(part)
            grad_query[:, :, above] += inner.sum(-2)
            grad_key[:, :, left] += inner.sum(-3)
        into.query[:, :, rows] += grad_query
        into.key[:, :, columns] += grad_key.unflatten(1, (-1, self.group)).sum(2)

    def finish(self, into: Gradients) -> None:
        into.query.mul_(self.weight)
        into.key.mul_(self.weight)

    def _chunks(self, pairs: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rectangles of a tile with at most CHUNK numbers, or one pair of each batch and head."""
        batch, heads, queries, keys = pairs.shape
        most = max(CHUNK // max(batch * heads * self.query.shape[-1], 1), 1)
        width = min(most, 256)
        for above in cut(slice(0, queries), max(most // width, 1)):
            for left in cut(slice(0, keys), width):
                yield above, left


def scoring(pairs: PairForm) -> Scoring:
    """The way to score the tiles of a pair form."""
    return DotScoring(pairs) if isinstance(pairs, DotPairs) else AdditiveScoring(pairs)
