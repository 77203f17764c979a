"""Causal linear attention: forward and backward against the machine's products and exact attention, and one token.

Useful flops are those of the algorithm in chunks of 64: pairs within a chunk once, with each state and without those
that are computed anew. Steps are a loop over tokens in torch, at a length that it finishes.
"""

from collections.abc import Callable
from typing import Any

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor

import regard
from regard import masks
from regard.linear import linear_attention, naive
from regard.linear.recurrence import recurrence

N, HEADS, DIM, CHUNK, ROUNDS = 16384, 8, 64, 64, 3
STEPS, LENGTHS, MATRIX = 1024, (32768, 65536, 131072, 262144), 2048
LONG_HEADS = 2
"""Heads at the lengths that are compared with their halves, for memory's sake."""

Work = Callable[[], Any]


def leaves(n: int, heads: int = HEADS) -> list[Tensor]:
    torch.manual_seed(0)
    return [tensor.requires_grad_() for tensor in torch.randn(3, 1, heads, n, DIM).unbind()]


def linear(n: int, heads: int = HEADS) -> Work:
    inputs = leaves(n, heads)
    return lambda: gradients(linear_attention(*inputs, causal=True), inputs)


def exact(n: int) -> Work:
    inputs = leaves(n)
    return lambda: gradients(regard.attention(*inputs, mask=masks.causal()), inputs)


def steps(n: int) -> Work:
    """The recurrence token by token, with elu + 1 and the division."""
    inputs = leaves(n)

    def run() -> tuple[Tensor, ...]:
        query, key, value = inputs
        query, key = (torch.nn.functional.elu(tensor) + 1 for tensor in (query, key))
        value = torch.cat([value, torch.ones_like(value[..., :1])], -1)
        rows = naive.step_recurrence(query, key, value)[0]
        return gradients(rows[..., :-1] / rows[..., -1:], inputs)

    return run


def useful_flops(n: int, heads: int) -> float:
    """Products of chunks: half of those of pairs, forward 2 and backward 5, and those with states, 2 and 4."""
    pairs, states = 2 * CHUNK * DIM / 2, 2 * DIM * DIM
    return n * heads * (7 * pairs + 6 * states)


def whole_sequences() -> None:
    agree("linear", linear(257)(), steps(257)(), within=1e-3)
    left, right = torch.randn(2, MATRIX, MATRIX)
    spent = _timing.in_turn(
        {"linear": linear(N), "exact": exact(N), "product": lambda: torch.mm(left, right)}, rounds=ROUNDS
    )
    short = _timing.in_turn({"linear": linear(STEPS), "steps": steps(STEPS)}, rounds=ROUNDS)
    rate = 2 * MATRIX**3 / spent["product"]
    share = useful_flops(N, HEADS) / spent["linear"] / rate
    ratio, by_steps = spent["exact"] / spent["linear"], short["steps"] / short["linear"]
    rows = [
        ["exact causal attention", milliseconds(spent["exact"]), milliseconds(spent["linear"]), times(ratio)],
        [f"steps, n = {STEPS:,}", milliseconds(short["steps"]), milliseconds(short["linear"]), times(by_steps)],
        ["rate of products", f"{rate / 1e9:.0f} GF/s", f"{rate * share / 1e9:.0f} GF/s", f"{share:.0%}"],
    ]
    for row, value, goal in zip(rows, (ratio, by_steps, share), (25, 100, 1 / 3), strict=True):
        row.append(met(value, round(goal, 2)))
    title = f"Causal linear attention, elu + 1, n = {N:,}, {HEADS} heads of {DIM}, forward and backward"
    table(f"{title} (`benchmarks/linear.py`)", ["peer", "peer's", "regard's", "ratio", "goal"], rows)


def doubling() -> None:
    rows = []
    for n in LENGTHS:
        spent = _timing.in_turn({"half": linear(n // 2, LONG_HEADS), "whole": linear(n, LONG_HEADS)}, rounds=ROUNDS)
        ratio = spent["whole"] / spent["half"]
        row = [f"{n:,}", milliseconds(spent["half"]), milliseconds(spent["whole"]), times(ratio)]
        rows.append([*row, met(ratio, 2.1, most=True)])
    title = f"Twice the length, {LONG_HEADS} heads, forward and backward"
    table(title, ["n", "n / 2", "n", "ratio", "goal"], rows)


def one_token(batch: int = 16, heads: int = 16) -> None:
    """The state is larger than what a call costs by itself: 4 MiB."""
    torch.manual_seed(0)
    state, target = torch.randn(2, batch, heads, DIM, DIM)
    query, key, value = torch.randn(3, batch, heads, 1, DIM)
    key = torch.nn.functional.normalize(key, dim=-1)
    decay, beta = -torch.rand(batch, heads, 1), torch.rand(batch, heads, 1)
    works = {
        "plain": lambda: recurrence(query, key, value, None, None, state),
        "gated delta rule": lambda: recurrence(query, key, value, decay, beta, state),
        "reading": state.sum,
        "copy": lambda: target.copy_(state),
    }
    expected = naive.step_recurrence(query, key, value, decay=decay, beta=beta, state=state)
    agree("one token", works["gated delta rule"](), expected)
    with torch.no_grad():
        spent = _timing.in_turn(works, rounds=31)
    plain, gated = spent["plain"] / spent["reading"], spent["copy"] / spent["gated delta rule"]
    rows = [
        ["plain, reading the state", milliseconds(spent["reading"]), milliseconds(spent["plain"]), times(plain)],
        [
            "gated delta rule, a copy",
            milliseconds(spent["copy"]),
            milliseconds(spent["gated delta rule"]),
            f"{gated:.0%}",
        ],
    ]
    rows[0].append(met(plain, 2, most=True))
    rows[1].append(met(gated, 0.7))
    title = f"One token, {batch} sequences, {heads} heads of {DIM}"
    table(title, ["work and its limit", "limit", "regard", "ratio", "goal"], rows)


def main() -> None:
    print(_timing.machine())
    whole_sequences()
    doubling()
    one_token()


if __name__ == "__main__":
    main()
