"""Positions that depend on content beside plain attention of the same run, n = 4,096, forward and backward, float32.

Peers: attention under the same mask without a bias, whose kernel is the same; and the formula, with all scores in
memory. Goals: forget gates at most 1.2 times plain causal attention, DeBERTa's terms at most 1.5 times plain attention
over all pairs, as the model has it.

    python benchmarks/content_positions.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor
from torch.nn.functional import logsigmoid, normalize

import regard
from regard import biases, masks
from regard.biases import Bias
from regard.masks import Mask

N, HEADS, DIM, CHECKED, ROUNDS = 4096, 4, 64, 320, 5
CAUSAL = masks.causal()


class ContentCase(NamedTuple):
    """A bias over tensors that are drawn for n tokens, a mask, and the goal, as times the plain attention's."""

    draw: Callable[[int], Sequence[Tensor]]
    make: Callable[..., Bias]
    mask: Mask | None
    goal: float | None


def vectors(count: int) -> Tensor:
    return torch.randn(HEADS, count, DIM)


def gates(n: int) -> Sequence[Tensor]:
    return [logsigmoid(torch.randn(1, HEADS, n) + 2.0)]


def both(n: int) -> Sequence[Tensor]:
    return [vectors(512), vectors(512)]


def projected(n: int) -> Sequence[Tensor]:
    return [torch.randn(HEADS, DIM, HEADS * DIM) / DIM, torch.randn(HEADS, DIM), torch.randn(HEADS, DIM)]


def reflections(n: int) -> Sequence[Tensor]:
    return [normalize(torch.randn(1, HEADS, n, DIM), dim=-1), 2 * torch.randn(1, HEADS, n).sigmoid()]


def blocks() -> Bias:
    return biases.landmarks(64)


def near(own: Tensor) -> Bias:
    return biases.shaw(own, before=16, after=16)


CASES = {
    "forget gates, causal": ContentCase(gates, biases.forget_gates, CAUSAL, 1.2),
    "Shaw, 33 distances, causal": ContentCase(lambda n: [vectors(33)], near, CAUSAL, None),
    "DeBERTa, 512 buckets, all pairs": ContentCase(both, biases.deberta, None, 1.5),
    "DeBERTa, 512 buckets, causal": ContentCase(both, biases.deberta, CAUSAL, None),
    "Transformer-XL, causal": ContentCase(projected, biases.transformer_xl, CAUSAL, None),
    "PaTH, causal": ContentCase(reflections, biases.path, CAUSAL, None),
    "PaTH, causal window of 256": ContentCase(reflections, biases.path, CAUSAL & masks.window(before=255), None),
    "PaTH, causal, 3,072 tokens exist": ContentCase(reflections, biases.path, CAUSAL & masks.padding([3072]), None),
    "landmarks of blocks of 64, causal": ContentCase(lambda n: [], blocks, CAUSAL, None),
}


def work(case: ContentCase, n: int, kernel: str | None = None, *, biased: bool = True) -> Callable:
    """One forward and backward pass, with the bias made anew, as a layer makes it from its input."""
    torch.manual_seed(0)
    drawn = [*torch.randn(3, 1, HEADS, n, DIM).unbind(), *case.draw(n)]
    inputs = [tensor.requires_grad_() for tensor in drawn[: None if biased else 3]]

    def attend() -> tuple[Tensor, ...]:
        bias = case.make(*inputs[3:]) if biased else None
        return gradients(regard.attention(*inputs[:3], mask=case.mask, bias=bias, kernel=kernel), inputs)

    return attend


def row(name: str, case: ContentCase, rounds: int) -> list[str]:
    """One line: its time beside that of plain attention, measured in turn, and of the formula."""
    agree(name, work(case, CHECKED)(), work(case, CHECKED, "reference")(), within=1e-3)
    spent = _timing.in_turn({"it": work(case, N), "plain": work(case, N, biased=False)}, rounds=rounds)
    ratio = spent["it"] / spent["plain"]
    formula = _timing.seconds(work(case, N, "reference"), 1)  # once: it takes many times as long
    cells = [name, milliseconds(spent["plain"]), milliseconds(spent["it"]), times(ratio)]
    return [
        *cells,
        times(formula / spent["it"]),
        "" if case.goal is None else met(ratio, case.goal, most=True),
    ]


def main(*, quick: bool = False) -> None:
    columns = "bias", "plain attention", "it", "times plain", "the formula, times it", "goal"
    rows = [row(name, case, 1 if quick else ROUNDS) for name, case in CASES.items()]
    table(f"(1, {HEADS}, {N:,}, {DIM}), forward and backward", columns, rows)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv[1:])
