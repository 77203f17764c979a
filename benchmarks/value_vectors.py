"""Shaw's vectors of the values, beside plain attention and the formula of the same run, float32, forward and backward.

The formula sums the weights by distance, with all of them in memory.

    python benchmarks/value_vectors.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import _timing
import torch
from _report import agree, gradients, milliseconds, table, times

import regard
from regard import masks

HEADS, DIM, BEFORE, CHECKED, ROUNDS = 4, 64, 16, 320, 5


def work(n: int) -> dict[str, Callable]:
    """Forward and backward passes of plain attention, of it, and of the formula."""
    torch.manual_seed(0)
    query, key, value = inputs = [torch.randn(1, HEADS, n, DIM, requires_grad=True) for _ in range(3)]
    vectors = torch.randn(1, BEFORE + 1, DIM, requires_grad=True)
    at = torch.arange(n)
    columns = ((at - at[:, None]).clamp(-BEFORE, 0) + BEFORE).expand(1, HEADS, n, n)
    hidden = torch.ones(n, n, dtype=torch.bool).triu(1)

    def formula() -> torch.Tensor:
        weights = (query @ key.mT / DIM**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        by_distance = weights.new_zeros(1, HEADS, n, BEFORE + 1).scatter_add(-1, columns, weights)
        return weights @ value + by_distance @ vectors

    def it() -> torch.Tensor:
        return regard.relative_value_attention(query, key, value, vectors, before=BEFORE, after=0, mask=masks.causal())

    return {
        "plain": lambda: gradients(regard.attention(query, key, value, mask=masks.causal()), inputs),
        "it": lambda: gradients(it(), [*inputs, vectors]),
        "formula": lambda: gradients(formula(), [*inputs, vectors]),
    }


def row(n: int, rounds: int) -> list[str]:
    """One line: the three, measured in turn."""
    spent = _timing.in_turn(work(n), rounds=rounds)
    ratio, gain = spent["it"] / spent["plain"], spent["formula"] / spent["it"]
    return [f"{n:,}", milliseconds(spent["plain"]), milliseconds(spent["it"]), times(ratio), times(gain)]


def main(*, quick: bool = False) -> None:
    checked = work(CHECKED)
    agree("vectors of the values", checked["it"](), checked["formula"](), within=1e-3)
    columns = "n", "plain attention", "it", "times plain", "the formula, times it"
    rows = [row(n, 1 if quick else ROUNDS) for n in (64, 512, 4096)]
    table(f"(1, {HEADS}, n, {DIM}), causal, {BEFORE + 1} vectors", columns, rows)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv[1:])
