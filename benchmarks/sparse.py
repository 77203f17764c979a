"""Sparse patterns at n = 16,384: strided, dilated and fixed, by the dense parts that they fall into.

Goals: at most twice the time per pair of plain causal attention, forward and with backward; 40 times faster than
torch's operator with the mask; with stride √n, at most 9 times the time for 4 times the length. The limits: the time
per pair of plain causal attention, and 8 = 4 · √4 for the growth; for dilated(64, step=8), whose rows have 65 pairs,
that of a causal window with as many, whose rows lie side by side.

    python benchmarks/sparse.py [--quick]
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import _timing
import torch
from _report import agree, gradients, met, milliseconds, table, times
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import regard
from regard import lenses, masks
from regard.masks import Mask

N, HEADS, DIM, ROUNDS = 16384, 2, 64, 5
CAUSAL = masks.causal()
NEIGHBOURS = "causal window of 64"
"""As many pairs as dilated(64, step=8) has, without a stride."""
Work = Callable[[], Any]


def sparse_transformer(stride: int) -> Mask:
    return CAUSAL & (masks.window(before=stride) | masks.strided(stride))


PATTERNS = {
    "causal, window 128 or stride 128": sparse_transformer(128),
    "dilated(64, step=8)": masks.dilated(64, step=8),
    "causal, fixed(128, 8)": CAUSAL & masks.fixed(128, 8),
}


def tensors(n: int) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(3, 1, HEADS, n, DIM).unbind())


def forward(n: int, mask: Mask) -> Work:
    return torch.no_grad()(partial(regard.attention, *tensors(n), mask=mask))


def training(n: int, mask: Mask) -> Work:
    leaves = [tensor.requires_grad_() for tensor in tensors(n)]
    return lambda: gradients(regard.attention(*leaves, mask=mask), leaves)


def per_pair(n: int) -> None:
    patterns = PATTERNS | {NEIGHBOURS: CAUSAL & masks.window(before=64)}
    pairs = {name: mask.density(n, n, 64) * n * n for name, mask in patterns.items()}
    causal = n * (n + 1) / 2
    rows = []
    for way, make in (("forward", forward), ("forward and backward", training)):
        works = {name: make(n, mask) for name, mask in patterns.items()}
        spent = _timing.in_turn({"causal()": make(n, CAUSAL), **works}, rounds=ROUNDS)
        limit = spent["causal()"] / causal
        for name in patterns:
            ratio = spent[name] / pairs[name] / limit
            row = [name, way, f"{pairs[name] / n / n:.2%}", milliseconds(spent[name]), times(ratio)]
            rows.append([*row, "the limit of dilated" if name == NEIGHBOURS else met(ratio, 2, most=True)])
    columns = ["mask", "way", "of all pairs", "time", "per pair, of causal()", "goal"]
    table(f"Sparse patterns, n = {n:,}, {HEADS} heads of {DIM} (`benchmarks/sparse.py`)", columns, rows)


def against_torch(n: int) -> None:
    query, key, value = tensors(n)
    rows = []
    with torch.no_grad():
        for name, mask in PATTERNS.items():
            keep = mask.dense(n, n)
            works = {"regard": forward(n, mask), "torch": partial(sdpa, query, key, value, keep)}
            agree(name, [works["regard"]()], [works["torch"]()])
            spent = _timing.in_turn(works, rounds=2)
            ratio = spent["torch"] / spent["regard"]
            rows.append([name, milliseconds(spent["torch"]), milliseconds(spent["regard"]), times(ratio)])
            rows[-1].append(met(ratio, 40))
    table(f"The same, forward, and SDPA with the mask, n = {n:,}", ["mask", "SDPA", "regard", "ratio", "goal"], rows)


def growth(n: int) -> None:
    lengths = (n, 2 * n, 4 * n)
    works = {f"{length:,}": forward(length, sparse_transformer(math.isqrt(length))) for length in lengths}
    spent = _timing.in_turn(works, rounds=ROUNDS)
    first, *_, last = spent.values()
    rows = [[length, milliseconds(each), times(each / first)] for length, each in spent.items()]
    table("Window and stride √n, causal, forward: growth with n", ["n", "regard", "of the first"], rows)
    print(f"\nGoal: {met(last / first, 9, most=True)}; the limit is 8.")


def looking(n: int) -> None:
    """Lenses, with the forward pass before them: as a share of the same under plain causal attention."""
    chosen = {"Entropy()": lenses.Entropy(), "Pooled((64, 64))": lenses.Pooled((64, 64)), "TopK(4)": lenses.TopK(4)}
    rows = []
    for lens_name, lens in chosen.items():
        works = {
            name: torch.no_grad()(partial(regard.observe, *tensors(n), lens, mask=mask))
            for name, mask in {"causal()": CAUSAL, **PATTERNS}.items()
        }
        spent = _timing.in_turn(works, rounds=ROUNDS)
        rows += [
            [lens_name, name, milliseconds(spent[name]), f"{spent[name] / spent['causal()']:.1%}"] for name in PATTERNS
        ]
    table(f"Lenses by the parts of masks, n = {n:,}", ["lens", "mask", "time", "of causal()"], rows)


def main(n: int = N) -> None:
    print(_timing.machine())
    per_pair(n)
    against_torch(n)
    growth(n)
    looking(n)


if __name__ == "__main__":
    main(N // 8 if "--quick" in sys.argv[1:] else N)
