"""Additive scores by native code, which keeps nothing of the size of pairs times features."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import native
from ..pairs import AdditivePairs, PairForm
from ..problem import Problem
from .base import Cost, Result
from .flat import Flat, Gradients, Saved
from .operator import attend, register
from .tilewise import TILE, Tilewise, with_features

FEATURE = 0.5
"""What a feature of a pair costs, in passes over a number: some five operations on 16 of them at once."""


class Additive:
    """Tile by tile, as `tiled`, with the scores weight · tanh(q + k) and their gradient from compiled code.

    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y): the exponentials are taken once for each token, not for each pair.
    """

    def __init__(self, tile: int = TILE) -> None:
        self.name = "additive" if tile == TILE else f"additive({tile})"
        self._tilewise = Tilewise(_NativeScoring, tile)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Other scores, other numbers, other processors, and no code where there was no compiler."""
        reasons = []
        if not isinstance(problem.pairs, AdditivePairs):
            reasons.append("its code computes additive scores; this score is a dot product")
        if problem.value.dtype != torch.float32:
            reasons.append(f"its code computes float32; this is {str(problem.value.dtype).removeprefix('torch.')}")
        if not problem.value.is_cpu:
            reasons.append(f"its code runs on the CPU; this is on {problem.value.device}")
        if reason := native.why_not():
            reasons.append(f"there is no native code: {reason}")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The tiles that the mask leaves, and a share of a pass for each feature."""
        return with_features(self._tilewise.cost(problem), problem, FEATURE)

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return attend(problem, self)

    def forward(self, flat: Flat) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a flat problem."""
        return self._tilewise.forward(flat)

    def backward(self, flat: Flat, saved: Saved) -> Gradients:
        """The gradients of a flat problem."""
        return self._tilewise.backward(flat, saved)


class _NativeScoring:
    """weight · tanh(q + k) by `regard.native`, all batches and heads at once."""

    def __init__(self, pairs: PairForm) -> None:
        if not isinstance(pairs, AdditivePairs):
            raise TypeError("native code scores additive pairs")
        self.leading = pairs.query.shape[:2]
        self.prepared = native.Prepared(pairs.query.flatten(0, 1), pairs.key.flatten(0, 1), pairs.weight.float())
        self.gradients = self.prepared.gradients()

    def scores(self, rows: slice, columns: slice) -> Tensor:
        return self.prepared.scores(rows, columns).unflatten(0, self.leading)

    def add_gradients(self, rows: slice, columns: slice, upstream: Tensor, into: Gradients) -> None:
        self.gradients.add(upstream.flatten(0, 1), rows, columns)

    def finish(self, into: Gradients) -> None:
        query, key, weight = self.gradients.result()
        into.query.add_(query.view_as(into.query))
        into.key.add_(key.view_as(into.key))
        if into.weight is not None:
            into.weight.add_(weight)
