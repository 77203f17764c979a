"""Talking heads, multi-token and differential attention beside their formulas and plain attention, 16 to 4,096 tokens.

Peers: the formula as written, with all weights in memory, and causal softmax attention of the same heads. Goals:
talking heads at 4,096 tokens at most twice plain attention, forward and backward; differential attention at most the
time of its two calls; nothing slower than the formula at any length.

    python benchmarks/mixed_heads.py [--quick]
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor
from torch.nn.functional import conv2d, pad

import regard
from regard import masks, normalizers

HEADS, DIM, QUERIES, KEYS, LENGTHS, LONGEST_FORMULA = 8, 64, 6, 11, (16, 64, 256, 1024, 4096), 2048
CAUSAL = masks.causal()
Leaves = Sequence[Tensor]


class Mechanism(NamedTuple):
    """A mechanism: its leaves of so many tokens, the call, the formula, and the goal in times of plain attention."""

    leaves: Callable[[int], Leaves]
    ours: Callable[[Leaves], Tensor]
    formula: Callable[[Leaves], Tensor]
    goal: float | None


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def heads(n: int, *, dims: Sequence[int] = (DIM, DIM, DIM)) -> list[Tensor]:
    torch.manual_seed(0)
    return [drawn(1, HEADS, n, dim) for dim in dims]


def near_identity() -> Tensor:
    return (torch.eye(HEADS) + 0.1 * torch.randn(HEADS, HEADS)).requires_grad_()


def hidden(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).triu(1)


def mixed(matrix: Tensor, pairs: Tensor) -> Tensor:
    return torch.einsum("gh,bhmn->bgmn", matrix, pairs)


def talking_leaves(n: int) -> Leaves:
    return [*heads(n), near_identity(), near_identity()]


def talking(leaves: Leaves) -> Tensor:
    return regard.attention(*leaves[:3], mask=CAUSAL, normalizer=normalizers.TalkingHeads(*leaves[3:]))


def talking_formula(leaves: Leaves) -> Tensor:
    query, key, value, before, after = leaves
    scores = mixed(before, query @ key.mT / DIM**0.5).masked_fill(hidden(query.shape[-2]), -torch.inf)
    return mixed(after, scores.softmax(-1)) @ value


def multi_token_leaves(n: int) -> Leaves:
    kernels = [(0.1 * torch.randn(HEADS, QUERIES, KEYS)).requires_grad_() for _ in range(2)]
    return [*heads(n), *kernels, near_identity(), near_identity()]


def multi_token(leaves: Leaves) -> Tensor:
    return regard.attention(*leaves[:3], mask=CAUSAL, normalizer=normalizers.MultiToken(*leaves[3:]))


def convolved(kernel: Tensor, pairs: Tensor) -> Tensor:
    return conv2d(pad(pairs, (KEYS // 2, KEYS // 2, QUERIES - 1, 0)), kernel.unsqueeze(1), groups=HEADS)


def multi_token_formula(leaves: Leaves) -> Tensor:
    query, key, value, before, after, heads_before, heads_after = leaves
    out = hidden(query.shape[-2])
    logits = mixed(heads_before, convolved(before, (query @ key.mT / DIM**0.5).masked_fill(out, 0.0)))
    weights = convolved(after, logits.masked_fill(out, -torch.inf).softmax(-1)).masked_fill(out, 0.0)
    return mixed(heads_after, weights) @ value


def differential_leaves(n: int) -> Leaves:
    return heads(n, dims=(DIM, DIM, DIM, DIM, 2 * DIM))


def differential(leaves: Leaves) -> Tensor:
    q1, q2, k1, k2, value = leaves
    return regard.differential_attention((q1, q2), (k1, k2), value, 0.8, mask=CAUSAL)


def differential_formula(leaves: Leaves) -> Tensor:
    q1, q2, k1, k2, value = leaves
    out = hidden(q1.shape[-2])
    first, second = ((q @ k.mT / DIM**0.5).masked_fill(out, -torch.inf).softmax(-1) for q, k in ((q1, k1), (q2, k2)))
    return (first - 0.8 * second) @ value


MECHANISMS = {
    "talking heads": Mechanism(talking_leaves, talking, talking_formula, 2.0),
    f"multi-token, {QUERIES} × {KEYS}, twice": Mechanism(multi_token_leaves, multi_token, multi_token_formula, None),
    "differential": Mechanism(differential_leaves, differential, differential_formula, None),
}


def plain(leaves: Leaves) -> Tensor:
    return regard.attention(*leaves, mask=CAUSAL)


def two_calls(leaves: Leaves) -> Tensor:
    q1, q2, k1, k2, value = leaves
    return regard.attention(q1, k1, value, mask=CAUSAL) - 0.8 * regard.attention(q2, k2, value, mask=CAUSAL)


def trained(call: Callable[[Leaves], Tensor], leaves: Leaves) -> Any:
    """Forward and backward."""
    return gradients(call(leaves), leaves)


def row(name: str, mechanism: Mechanism, n: int) -> list[str]:
    leaves = mechanism.leaves(n)
    works = {"ours": partial(trained, mechanism.ours, leaves), "plain": partial(trained, plain, heads(n))}
    if n <= LONGEST_FORMULA:
        works["formula"] = partial(trained, mechanism.formula, leaves)
        agree(name, works["ours"](), works["formula"](), within=2e-3)
    if name == "differential":
        works["two calls"] = partial(trained, two_calls, leaves)
    spent = _timing.in_turn(works, rounds=31 if n <= 256 else 5, calls=max(512 // n, 1))
    ratio = spent["ours"] / spent["plain"]
    cells = [name, f"{n:,}", milliseconds(spent["plain"]), milliseconds(spent["ours"]), times(ratio)]
    cells.append(times(spent["ours"] / spent["formula"]) if "formula" in spent else "")
    cells.append(times(spent["ours"] / spent["two calls"]) if "two calls" in spent else "")
    goal = mechanism.goal if n == LENGTHS[-1] else None
    return [*cells, "" if goal is None else met(ratio, goal, most=True)]


def main(*, quick: bool = False) -> None:
    lengths = LENGTHS[:-1] if quick else LENGTHS
    rows = [row(name, mechanism, n) for name, mechanism in MECHANISMS.items() for n in lengths]
    columns = ["mechanism", "tokens", "plain", "it", "of plain", "of the formula", "of two calls", "goal"]
    title = f"Mixed heads, causal, {HEADS} heads of {DIM}, forward and backward (`benchmarks/mixed_heads.py`)"
    table(title, columns, rows)


if __name__ == "__main__":
    main(quick="--quick" in sys.argv)
