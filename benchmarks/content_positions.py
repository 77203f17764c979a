"""Positions that depend on content beside plain attention of the same run, n = 4,096, forward and backward, float32.

Peers: attention under the same mask without a bias, whose kernel is the same; and the formula, with all scores in
memory. Goals: forget gates at most 1.2 times plain causal attention, DeBERTa's terms at most 1.5 times plain attention
over all pairs, as the model has it, landmarks of blocks of 64 tokens at most twice plain causal attention. Then
landmarks of few tokens beside the formula, which is to take no less.

    python benchmarks/content_positions.py [--quick] [words of the rows to measure]
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
FEW = 16, 32, 64, 128, 256
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


def landmark_case(size: int, goal: float) -> ContentCase:
    return ContentCase(lambda n: [], lambda: biases.landmarks(size), CAUSAL, goal)


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
    "landmarks of blocks of 64, causal": landmark_case(64, 2.0),
    "landmarks of blocks of 16, causal": landmark_case(16, 2.0),
    "landmarks of blocks of 7, causal": landmark_case(7, 3.0),
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


def by_landmarks(query: Tensor, key: Tensor, value: Tensor, size: int) -> Tensor:
    """Landmark attention in torch's operators; the length is a multiple of the size."""
    at = torch.arange(query.shape[-2])
    hidden, own, landmark = at > at[:, None], at[:, None] // size == at // size, at % size == size - 1
    scores = (query @ key.mT / DIM**0.5).masked_fill(hidden, -torch.inf)
    keys = scores.masked_fill(landmark, -torch.inf)
    by_block = keys.unflatten(-1, (-1, size))
    gates = scores.unflatten(-1, (-1, size))[..., -1:]
    others = (by_block - by_block.logsumexp(-1, keepdim=True) + gates).flatten(-2)
    others = others.nan_to_num(-torch.inf, neginf=-torch.inf)  # of blocks that are hidden
    return torch.where(own, keys, others).softmax(-1) @ value


def few_tokens(length: int, rounds: int) -> list[str]:
    """One line: landmarks of blocks of 16 tokens of a short text beside the formula, and beside no bias."""
    torch.manual_seed(0)
    inputs = [tensor.requires_grad_() for tensor in torch.randn(3, 1, HEADS, length, DIM).unbind()]

    def formula() -> tuple[Tensor, ...]:
        return gradients(by_landmarks(*inputs, size=16), inputs)

    def ours(bias: Bias | None) -> tuple[Tensor, ...]:
        return gradients(regard.attention(*inputs, mask=CAUSAL, bias=bias), inputs)

    bias = biases.landmarks(16)
    agree(f"{length} tokens", ours(bias), formula())
    works = {"it": lambda: ours(bias), "plain": lambda: ours(None), "formula": formula}
    spent = _timing.in_turn(works, rounds=20 * rounds)
    ratio = spent["formula"] / spent["it"]
    cells = [milliseconds(spent[name]) for name in ("plain", "it")]
    return [f"{length}", *cells, times(spent["it"] / spent["plain"]), times(ratio), met(ratio, 1.0)]


def main(*words: str, quick: bool = False) -> None:
    rounds = 1 if quick else ROUNDS
    columns = "plain attention", "it", "times plain", "the formula, times it", "goal"
    rows = [row(name, case, rounds) for name, case in CASES.items() if all(word in name for word in words)]
    table(f"(1, {HEADS}, {N:,}, {DIM}), forward and backward", ("bias", *columns), rows)
    rows = [few_tokens(length, rounds) for length in FEW]
    table(f"landmarks of blocks of 16, (1, {HEADS}, n, {DIM}), forward and backward", ("n", *columns), rows)


if __name__ == "__main__":
    main(*(word for word in sys.argv[1:] if word != "--quick"), quick="--quick" in sys.argv[1:])
