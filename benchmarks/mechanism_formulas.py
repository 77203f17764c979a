"""Mechanisms of docs/every-mechanism.md beside their formulas with all weights in memory, from 16 to 4,096 tokens.

Goal: none slower than its formula at any length, forward or with gradients, in memory linear in the length.

    python benchmarks/mechanism_formulas.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import NamedTuple

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table
from torch import Tensor

import regard
from regard import biases, masks, normalizers
from regard.approximations import nystrom_attention
from regard.selection import hierarchical_blocks, sinkhorn, sinkhorn_attention

SIZES, CHECKED, HEADS, DIM, ROUNDS = (16, 128, 1024, 4096), 1024, 2, 64, 5
Attend = Callable[..., Tensor]


class FormulaCase(NamedTuple):
    """A call of regard and its formula, over query, key, value and tensors that are drawn for n tokens."""

    draw: Callable[[int], list[Tensor]]
    ours: Attend
    formula: Attend


def hidden(scores: Tensor) -> Tensor:
    """Causal scores."""
    return scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))


def no_tensors(n: int) -> list[Tensor]:
    return []


def spans(n: int) -> list[Tensor]:
    return [torch.tensor([n / 8 + 0.3, n / 4 + 0.7])]


def within_spans(query: Tensor, key: Tensor, value: Tensor, spans: Tensor) -> Tensor:
    bias = biases.adaptive_span(spans, 32.0)
    mask = masks.causal() & masks.window(before=bias.reach)
    return regard.attention(query, key, value, mask=mask, bias=bias)


def masked_softly(query: Tensor, key: Tensor, value: Tensor, spans: Tensor) -> Tensor:
    position = torch.arange(query.shape[-2])
    away = (position[:, None] - position).abs()
    terms = hidden(query @ key.mT / 8).exp() * ((32 + spans[:, None, None] - away) / 32).clamp(0, 1)
    return terms / terms.sum(-1, keepdim=True) @ value


def coupling(n: int) -> list[Tensor]:
    return [torch.tensor([[0.5, 0.0], [-0.3, 1.0]])]


def chain(query: Tensor, key: Tensor, value: Tensor, transitions: Tensor) -> Tensor:
    return regard.attention(query, key, value, normalizer=normalizers.LinearChain(transitions))


def forward_backward(query: Tensor, key: Tensor, value: Tensor, transitions: Tensor) -> Tensor:
    """Messages of both states of all rows at once, key by key from both ends."""
    scores = (query @ key.mT / 8).movedim(-1, 0)
    states = torch.stack([torch.zeros_like(scores), scores], -1)  # [n, 1, H, n, 2]
    before, after = [states[0]], [torch.zeros_like(states[0])]
    for own in states[1:]:
        before.append(own + torch.logsumexp(before[-1].unsqueeze(-1) + transitions, -2))
    for own in states[1:].flip(0):
        after.append(torch.logsumexp(transitions + (own + after[-1]).unsqueeze(-2), -1))
    log = torch.stack(before) + torch.stack(after[::-1])
    return log.softmax(-1)[..., 1].movedim(0, -1) @ value


def landmarks(n: int) -> int:
    return min(64, n // 4)


def through_landmarks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return nystrom_attention(query, key, value, landmarks=landmarks(query.shape[-2]))


def three_softmaxes(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    count = landmarks(query.shape[-2])
    small_query, small_key = (rows.unflatten(-2, (count, -1)).mean(-2) for rows in (query, key))
    left, middle = ((rows @ small_key.mT / 8).softmax(-1) for rows in (query, small_query))
    inverse, one = middle.mT / middle.sum(-2).amax(-1)[..., None, None], torch.eye(count)
    for _ in range(6):
        product = middle @ inverse
        inverse = inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product))) / 4
    return left @ (inverse @ ((small_query @ key.mT / 8).softmax(-1) @ value))


def blocks_of(n: int) -> int:
    return min(64, n // 4)


def sorting(n: int) -> list[Tensor]:
    return [torch.randn(HEADS, n // blocks_of(n), n // blocks_of(n))]


def sorted_blocks(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
    return sinkhorn_attention(query, key, value, sinkhorn(scores), size=blocks_of(query.shape[-2]))


def by_products(query: Tensor, key: Tensor, value: Tensor, scores: Tensor) -> Tensor:
    n, size = query.shape[-2], blocks_of(query.shape[-2])
    matrix = scores.exp()
    for _ in range(8):
        matrix = matrix / matrix.sum(-1, keepdim=True)
        matrix = matrix / matrix.sum(-2, keepdim=True)
    mixing = torch.kron(matrix[0], torch.eye(size)), torch.kron(matrix[1], torch.eye(size))
    there = torch.stack(mixing)
    own = torch.arange(n) // size
    keep = (own[:, None] == own).repeat(1, 2)
    keys, values = torch.cat([there @ key, key], -2), torch.cat([there @ value, value], -2)
    return (query @ keys.mT / 8).masked_fill(~keep, float("-inf")).softmax(-1) @ values


def found_blocks(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    size = blocks_of(query.shape[-2])
    found = hierarchical_blocks(query, key, size=size, count=4)
    return regard.attention(query, key, value, mask=masks.causal() & masks.blocks(found, size))


def all_scores(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The weights of all pairs, of which those of other blocks are hidden."""
    n, size = query.shape[-2], blocks_of(query.shape[-2])
    found = hierarchical_blocks(query, key, size=size, count=4)
    chosen = (found.unsqueeze(-1) == torch.arange(n // size)).any(-2)
    keep = chosen.repeat_interleave(size, -1).repeat_interleave(size, -2)
    return hidden(query @ key.mT / 8).masked_fill(~keep, float("-inf")).softmax(-1) @ value


CASES = {
    "adaptive span, up to n/4": FormulaCase(spans, within_spans, masked_softly),
    "linear chain, all pairs": FormulaCase(coupling, chain, forward_backward),
    "Nyström, n/4 landmarks, at most 64": FormulaCase(no_tensors, through_landmarks, three_softmaxes),
    "Sinkhorn, blocks of n/4, at most 64": FormulaCase(sorting, sorted_blocks, by_products),
    "HiP, 4 blocks of n/4, at most 64": FormulaCase(no_tensors, found_blocks, all_scores),
}


def line(name: str, case: FormulaCase, n: int) -> list[str]:
    """One line: forward, and forward and backward, of the formula and of regard."""
    torch.manual_seed(0)
    learned = [tensor.requires_grad_() for tensor in (*torch.randn(3, 1, HEADS, n, DIM).unbind(), *case.draw(n))]
    plain = [tensor.detach() for tensor in learned]
    if n <= CHECKED:  # in float64: sums of logarithms over a row round more than what is compared with them
        agree(name, [case.ours(*plain)], [case.formula(*(tensor.double() for tensor in plain))], within=1e-5)
    cells = [name, f"{n:,}"]
    for way in (lambda attend: attend(*plain), lambda attend: gradients(attend(*learned), learned)):
        works = (lambda way=way: way(case.ours)), (lambda way=way: way(case.formula))
        spent, beside, _ = _timing.compare(*works, calls=max(1, 1024 // n), rounds=ROUNDS)
        cells += [milliseconds(beside), milliseconds(spent), f"{spent / beside:.2f}"]
        cells.append(met(spent / beside, 1.0, most=True))
    return cells


def main(sizes: tuple[int, ...], named: str = "") -> None:
    print(_timing.machine())
    columns = (
        "mechanism",
        "n",
        "formula",
        "forward",
        "times",
        "goal",
        "formula, with gradients",
        "both",
        "times",
        "goal",
    )
    rows = [line(name, case, n) for name, case in CASES.items() if named in name for n in sizes]
    table(f"(1, {HEADS}, n, {DIM}), float32 (`benchmarks/mechanism_formulas.py`)", columns, rows)


if __name__ == "__main__":
    main(SIZES[:3] if "--quick" in sys.argv else SIZES)
