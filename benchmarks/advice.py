"""Predicted times of `regard.advise` against measured ones, over a grid of 100 problems of one layer.

The rates of the machine are measured first, as `regard bench --calibrate` does, into a folder of this run's own. Goal:
every prediction within a factor of 1.5 of what is measured, half of them within 20 %. The limit is the machine's own
spread from run to run, printed beside: the median ratio of the slowest to the fastest round.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import _timing
import torch
from _report import met, milliseconds, table

import regard
from regard.advisor import Price, Workload
from regard.advisor.prices import linear_price, softmax_price
from regard.kernels.planning.calibration import measure
from regard.kernels.planning.rates import cache_file, save_rates
from regard.masks import Mask, causal, window

ROUNDS, LEAST = 3, 0.02
"""Rounds of a problem, and seconds of a round."""


@dataclass(frozen=True)
class Case:
    """A problem of the grid: a workload of one layer, its mask or linear attention, and what is timed."""

    name: str
    workload: Workload
    mask: Mask | None
    linear: bool = False

    def price(self) -> Price:
        key_heads = self.workload.key_heads or self.workload.heads
        if self.linear:
            return linear_price(self.workload, self.workload.head_dim, key_heads)
        return softmax_price(self.workload, key_heads, self.workload.keys, mask=self.mask)

    def call(self) -> Callable[[], object]:
        shape = self.workload
        training = shape.task == "train"
        dtype = getattr(torch, shape.dtype)

        def tensor(heads: int, length: int) -> torch.Tensor:
            made = torch.randn(shape.batch, heads, length, shape.head_dim, dtype=dtype)
            return made.requires_grad_(training)

        key_heads = shape.key_heads or shape.heads
        inputs = tensor(shape.heads, shape.queries), tensor(key_heads, shape.keys), tensor(key_heads, shape.keys)

        def attend() -> torch.Tensor:
            if self.linear:
                return regard.linear_attention(*inputs, causal=True)
            return regard.attention(*inputs, mask=self.mask)

        if not training:
            return torch.no_grad()(attend)
        upstream = torch.randn(shape.batch, shape.heads, shape.queries, shape.head_dim, dtype=dtype)
        return lambda: torch.autograd.grad(attend(), inputs, upstream)


def grid() -> Iterator[Case]:
    """100 problems: training, prefill and decoding; dense, causal, windowed, linear; short and long; two dtypes."""
    base = Workload("prefill", layers=1, heads=8, head_dim=64, dtype="float32")
    sizes = [(1, 64), (1, 512), (1, 2048), (1, 4096), (16, 64), (16, 512)]
    kinds: list[tuple[str, Mask | None]] = [("all pairs", None), ("causal", causal())]
    for task, (batch, tokens), (kind, mask) in itertools.product(("prefill", "train"), sizes, kinds):
        for dim in (32, 64, 128):
            yield Case(kind, replace(base, task=task, batch=batch, tokens=tokens, head_dim=dim), mask)
    near = causal() & window(before=255)
    for task, tokens in itertools.product(("prefill", "train"), (1024, 4096, 16384)):
        yield Case("window of 256", replace(base, task=task, tokens=tokens), near)
        yield Case("linear", replace(base, task=task, tokens=tokens), None, linear=True)
    for tokens, key_heads, dtype in itertools.product((1024, 4096, 16384), (8, 2), ("float32", "bfloat16")):
        decoding = replace(base, task="decode", tokens=tokens, key_heads=key_heads, dtype=dtype, head_dim=128)
        yield Case("decode", decoding, None)
    for batch, tokens in ((64, 25), (16, 50), (1, 25), (1, 400)):
        yield Case(
            "cross", replace(base, architecture="translation", batch=batch, tokens=tokens, source_tokens=tokens), None
        )


def measured(case: Case) -> tuple[float, float]:
    """Median seconds of a call, and the ratio of the slowest to the fastest round."""
    work = case.call()
    work()
    calls = max(1, int(LEAST / max(_timing.seconds(work, 1), 1e-6)))
    rounds = sorted(_timing.seconds(work, calls) for _ in range(ROUNDS))
    return statistics.median(rounds), rounds[-1] / rounds[0]


def label(case: Case) -> str:
    shape = case.workload
    return (
        f"{shape.task}, {case.name}, {shape.batch} × {shape.tokens:,}, {shape.heads}/{shape.key_heads or shape.heads} "
        f"heads of {shape.head_dim}, {shape.dtype}"
    )


def main() -> None:
    print(_timing.machine())
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        save_rates(measure(), cache_file())
        found = []
        for case in grid():
            price, (spent, spread) = case.price(), measured(case)
            found.append((max(price.seconds / spent, spent / price.seconds), price, spent, spread, case))
    found.sort(key=lambda each: -each[0])
    rows = [
        [label(case), price.kernel, milliseconds(price.seconds), milliseconds(spent), f"{price.seconds / spent:.2f}"]
        for _, price, spent, _, case in found[:25]
    ]
    table(
        "Predictions: the 25 furthest off (`benchmarks/advice.py`)",
        ["problem", "kernel", "predicted", "measured", "ratio"],
        rows,
    )
    within, half = sum(each[0] <= 1.5 for each in found), statistics.median(each[0] for each in found)
    table(
        f"Predictions: all {len(found)}",
        ["what", "figure", "goal"],
        [
            ["within a factor of 1.5", f"{within} of {len(found)}", met(within, len(found))],
            ["median factor", f"{half:.2f}", met(half, 1.2, most=True)],
            ["the machine's own spread, median", f"{statistics.median(each[3] for each in found):.2f}", ""],
        ],
    )


if __name__ == "__main__":
    main()
