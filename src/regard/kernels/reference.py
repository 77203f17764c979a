"""The formula as it is written: any score, mask, bias, dtype and derivative. The oracle of every other kernel."""

from __future__ import annotations

import torch

from ..pairs import AdditivePairs
from ..problem import Problem
from .base import Cost, Result
from .formula import formula
from .shield import shielded

CACHE = 2**22
"""Bytes up to which numbers may stay near the processor."""


class Reference:
    """C = softmax( f(Q, K) + B, where M ) · V, with all the weights in memory at once.

    Sums are in float32 at least; autocast does not reach in.
    """

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Nothing: whatever is a problem, this computes."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and kept, several times over: scores, masked scores, weights."""
        pairs, features = problem.weights_shape.numel(), problem.pairs.query.shape[-1]
        size = max(problem.value.element_size(), 4)
        numbers = 3.0 * pairs
        if isinstance(problem.pairs, AdditivePairs):
            numbers += pairs * features  # tanh of each
        return Cost(
            flops=2.0 * pairs * (features + problem.value.shape[-1]),
            bytes=numbers * size,
            passes=4.0 * numbers,
            moved=4.0 * numbers * size if numbers * size > CACHE else 0.0,
            calls=16.0,
            note="it computes all pairs, and keeps them in memory",
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp where it is wanted."""
        with torch.autocast(problem.value.device.type, enabled=False):
            return shielded(problem, formula)
