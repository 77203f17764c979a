"""The scores of a tile, the bias of a tile, and the gradients of both, without autograd.

A bias or mask that depends on the distance of query and key alone has one number per diagonal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from ...core.batched_problem import ProblemGradients
from ...core.finite import waits
from ...core.score_forms import AdditivePairs, DotPairs, PairForm, at_least_float32, per_head, per_key_head
from ...tiles.mask_tiles import split_slice
from ...tiles.tile_size import scores_per_tile

LOG2_E = math.log2(math.e)
FEATURES_AT_ONCE = 2**17
"""The most numbers in memory at once on a CPU where a pair has one for each feature: they fit into a core's cache."""


class TileScores(Protocol):
    """Protocol of the scores f(q, k) over tiles of a batched problem, and of their gradients."""

    def scores(self, rows: slice, columns: slice) -> Tensor:
        """The scores of a tile, (B, H, m, n), in float32 at least, in newly allocated memory."""
        ...

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        """Add the gradients of Σ upstream · scores to those of query, key and weight; `finish` completes them."""
        ...

    def finish(self, into: ProblemGradients) -> None:
        """Finish the gradients after the last tile."""
        ...


class DotTileScores:
    """scale · q · k: two matrix products backward, one forward; the query is multiplied by the scale once."""

    def __init__(self, pairs: DotPairs) -> None:
        self.scale = pairs.scale
        self.query, self.key = at_least_float32(pairs.query) * pairs.scale, at_least_float32(pairs.key)

    def scores(self, rows: slice, columns: slice) -> Tensor:
        key = self.key[:, :, columns]
        return per_head(lambda folded: folded @ key.mT, self.query[:, :, rows], key)

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        into.query[:, :, rows] += per_head(lambda folded: folded @ key, upstream, key)
        into.key[:, :, columns] += per_key_head(upstream, query, key)

    def finish(self, into: ProblemGradients) -> None:
        into.query.mul_(self.scale)  # the key's has it from the query


class AdditiveTileScores:
    """weight · tanh(q + k), a few rows and columns at a time, since each pair takes one number per feature.

    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y), so that exponentials are taken once for each token. Where these might leave
    the range of numbers, the sum is made first. Where all entries are within [-1, 1], where 1 - 2 / (1 + P) would lose
    what is small, it is (tanh x + tanh y) / (1 + tanh x · tanh y). On a device that would have to be waited for, to see
    which of these holds, it is the tanh of the sum.
    """

    def __init__(self, pairs: AdditivePairs) -> None:
        query, key = at_least_float32(pairs.query), at_least_float32(pairs.key)
        self.weight = at_least_float32(pairs.weight).to(query.dtype)
        self.group = query.shape[1] // max(key.shape[1], 1)
        if self.group > 1:
            key = key.repeat_interleave(self.group, dim=1)  # linear in the length, unlike the scores
        self.small = self.wide = False
        self.unread = waits(query)
        if self.unread:
            self.query, self.key = query, key
            return
        largest = [float(tensor.abs().max()) if tensor.numel() else 0.0 for tensor in (query, key)]
        self.small, self.wide = max(largest) <= 1.0, not sum(largest) < 40.0
        if self.small:
            self.query, self.key = query.tanh(), key.tanh()
        elif self.wide:
            self.query, self.key = query * (2 * LOG2_E), key * (2 * LOG2_E)
        else:
            self.query, self.key = (2 * query).exp(), (2 * key).exp()

    def scores(self, rows: slice, columns: slice) -> Tensor:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        scores = query.new_empty(*query.shape[:3], key.shape[2])
        for above, left in self._chunks(scores):
            part, offset = self._tanh(query[:, :, above].unsqueeze(-2), key[:, :, left].unsqueeze(-3))
            scores[:, :, above, left] = (part @ self.weight).add_(offset * self.weight.sum())
        return scores

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        query, key = self.query[:, :, rows], self.key[:, :, columns]
        grad_query, grad_key = torch.zeros_like(query), torch.zeros_like(key)
        for above, left in self._chunks(upstream):
            given = upstream[:, :, above, left]
            tanh, offset = self._tanh(query[:, :, above].unsqueeze(-2), key[:, :, left].unsqueeze(-3))
            if into.weight is not None:
                into.weight.add_((given.flatten() @ tanh.flatten(0, -2)).add_(offset * given.sum()))
            # tanh² - 1, of t = tanh or of t = tanh - 1: t² - 1 or t² + 2t.
            slope = tanh.square().add_(tanh, alpha=2.0) if offset else tanh.square().sub_(1.0)
            slope.mul_(given.unsqueeze(-1))
            grad_query[:, :, above] -= slope.sum(-2)
            grad_key[:, :, left] -= slope.sum(-3)
        into.query[:, :, rows] += grad_query
        into.key[:, :, columns] += grad_key.unflatten(1, (-1, self.group)).sum(2)

    def finish(self, into: ProblemGradients) -> None:
        into.query.mul_(self.weight)
        into.key.mul_(self.weight)

    def _tanh(self, query: Tensor, key: Tensor) -> tuple[Tensor, int]:
        """tanh(q + k) - offset for each feature of some pairs, (B, H, m, n, A), and the offset, 0 or 1."""
        if self.unread:
            return torch.add(query, key).tanh_(), 0
        if self.small:
            return torch.add(query, key).div_(torch.mul(query, key).add_(1.0)), 0
        power = torch.add(query, key).exp2_() if self.wide else torch.mul(query, key)
        return power.add_(1.0).reciprocal_().mul_(-2.0), 1

    def _chunks(self, pairs: Tensor) -> Iterator[tuple[slice, slice]]:
        """Rectangles of a tile with at most FEATURES_AT_ONCE numbers a thread, or one pair of each batch and head.

        Off the CPU with as many numbers as a tile has scores there.
        """
        batch, heads, queries, keys = pairs.shape
        at_once = scores_per_tile(pairs.device) if self.unread else FEATURES_AT_ONCE * torch.get_num_threads()
        most = max(at_once // max(batch * heads * self.query.shape[-1], 1), 1)
        width = min(most, 128)
        for above in split_slice(slice(0, queries), max(most // width, 1)):
            for left in split_slice(slice(0, keys), width):
                yield above, left


class FormTileScores:
    """The scores of any pair form, by its own `tile` and `scores`, differentiated by autograd."""

    def __init__(self, pairs: PairForm) -> None:
        self.pairs = pairs

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.pairs.tile(rows, columns).scores()

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: ProblemGradients) -> None:
        tile = self.pairs.tile(rows, columns)
        leaves = tile.query.detach().requires_grad_(), tile.key.detach().requires_grad_()
        with torch.enable_grad():
            scores = replace(tile, query=leaves[0], key=leaves[1]).scores()
        grad_query, grad_key = torch.autograd.grad(scores, leaves, upstream)
        into.query[:, :, rows] += grad_query
        into.key[:, :, columns] += grad_key

    def finish(self, into: ProblemGradients) -> None:
        pass


def make_tile_scores(pairs: PairForm) -> TileScores:
    """The tile scores of a pair form."""
    if isinstance(pairs, DotPairs):
        return DotTileScores(pairs)
    return AdditiveTileScores(pairs) if isinstance(pairs, AdditivePairs) else FormTileScores(pairs)
