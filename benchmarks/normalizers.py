"""Sigmoid attention, sparsemax and entmax-1.5 beside softmax at n = 4,096, forward and backward.

Peer: softmax attention of the same call, and for the sparse ones the scores' standard deviation, on which the number of
keys with weight depends. Goals: sigmoid at most 1.1 times softmax; the sparse ones faster than softmax from a deviation
of 0.3 on, and never above 2 times.
"""

from __future__ import annotations

from collections.abc import Callable

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table
from torch import Tensor

import regard
from regard import masks, normalizers
from regard.masks import Mask
from regard.normalizers import Normalizer

N, HEADS, DIM, CHECKED, ROUNDS = 4096, 2, 64, 320, 3
SPARSE: tuple[Normalizer, ...] = (normalizers.Sparsemax(), normalizers.Entmax(1.5))


def leaves(n: int, deviation: float) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, HEADS, n, DIM).unbind()
    return (query * deviation).requires_grad_(), key.requires_grad_(), value.requires_grad_()


def work(
    n: int, deviation: float, mask: Mask | None, normalizer: Normalizer | None, kernel: str | None = None
) -> Callable:
    inputs = leaves(n, deviation)
    return lambda: gradients(regard.attention(*inputs, mask=mask, normalizer=normalizer, kernel=kernel), inputs)


def row(deviation: float, mask: Mask | None, normalizer: Normalizer, goal: float) -> list[str]:
    """One line: its own time beside that of softmax, measured in turn."""
    small = (work(CHECKED, deviation, mask, normalizer, kernel)() for kernel in (None, "reference"))
    agree(repr(normalizer), next(small), next(small), within=1e-3)
    ours, theirs = (work(N, deviation, mask, of) for of in (normalizer, None))
    spent, beside, _ = _timing.compare(ours, theirs, calls=1, rounds=ROUNDS)
    ratio = spent / beside
    name = "causal" if mask is not None else "all pairs"
    cells = [repr(normalizer), f"{deviation:g}", name, milliseconds(beside), milliseconds(spent), f"{ratio:.2f}"]
    return [*cells, met(ratio, goal, most=True)]


def main() -> None:
    columns = "normalizer", "deviation of scores", "pairs", "softmax", "it", "times", "goal"
    rows = [row(1.0, mask, normalizers.Sigmoid(), 1.1) for mask in (None, masks.causal())]
    for normalizer in SPARSE:
        for deviation in (0.02, 0.1, 0.3, 1.0, 3.0):
            goal = 1.0 if deviation >= 0.3 else 2.0
            rows += [row(deviation, mask, normalizer, goal) for mask in (None, masks.causal())]
    table(f"(1, {HEADS}, {N:,}, {DIM}), forward and backward", columns, rows)


if __name__ == "__main__":
    main()
