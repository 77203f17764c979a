"""The rates of this machine, measured: each by work of the kind that the kernels do."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from .. import native
from .cost_model import Rates

Work = Callable[[], object]

BUDGET = 10.0
"""Seconds that are spent on all measurements together."""
MIN_TILE_SIDE = 3
"""The fewest rounds."""
LARGE = 2**25
"""Numbers that fit into no cache: 128 MiB of them."""


def measure(budget: float = BUDGET, large: int = LARGE) -> Rates:
    """What this machine does with its present number of threads: all of it in turn, for `budget` seconds at least.

    Work in turn meets the same disturbance; of the rounds of each the lower quartile counts, for what disturbs only
    ever adds. large: numbers that are read from main memory, a multiple of 1024; twice as many stand in memory.
    """
    threads = torch.get_num_threads()
    with torch.no_grad():
        (product, flops), (softmax, passes), (decoding, moved) = _products(), _passes(), _moved(large)
        (attending, attended) = _native()
        new, again = _fresh(large)
        products, softmaxes, natively, decoded, taken, written, calls = in_turn(
            [_times(product, 16), _times(softmax, 16), attending, decoding, new, again, _times(_call(), 1000)], budget
        )
    return Rates(
        flops=16 * flops / products / threads,
        native=attended / natively / threads,
        passes=16 * passes / softmaxes / threads,
        moved=moved / decoded,
        fresh=4.0 * large / max(taken - written, written / 100),  # where it costs nothing, noise would make it negative
        call=calls / 1000,
    )


def in_turn(works: Sequence[Work], budget: float) -> list[float]:
    """Seconds that each takes: the lower quartile of rounds over all of them."""
    for work in works:
        work()
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < MIN_TILE_SIDE or time.perf_counter() - began < budget:
        rounds.append([_seconds(work) for work in works])
    return [statistics.quantiles(spent, n=4, method="inclusive")[0] for spent in zip(*rounds, strict=True)]


def _seconds(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _times(work: Work, calls: int) -> Work:
    """The same, so often in a row."""

    def often() -> None:
        for _ in range(calls):
            work()

    return often


def _products() -> tuple[Work, float]:
    """Products of eight heads' queries and keys, as a block of the dense kernel has them; and their flops."""
    query, key = torch.rand(8, 128, 64), torch.rand(8, 512, 64)
    scores = torch.empty(8, 128, 512)
    return lambda: torch.matmul(query, key.mT, out=scores), 2.0 * scores.numel() * query.shape[-1]


def _native() -> tuple[Work, float]:
    """Attention of eight heads in native code, and its flops; products of torch's where there is no such code."""
    if not native.available():
        return _products()
    query, key, value = torch.rand(3, 1, 8, 1024, 64).unbind()
    first, runs = np.arange(17), np.tile(np.array([[0, 1024, -1]]), (16, 1))
    tiles = native.FlashTiles(first, runs, np.zeros((1, 1, 1, 64), dtype=np.uint64))
    return native.FlashProblem(query, key, value, 0.125, tiles).forward, 4.0 * 8 * 1024 * 1024 * 64


def _passes() -> tuple[Work, float]:
    """The online softmax of one tile: maximum, difference, product, power, sum; and its passes."""
    scores = torch.rand(8, 128, 256)
    weights = torch.empty_like(scores)

    def softmax() -> None:
        torch.sub(scores, scores.amax(-1, keepdim=True), out=weights)
        weights.mul_(1.5).exp2_().sum(-1)

    return softmax, 5.0 * scores.numel()


def _moved(large: int) -> tuple[Work, float]:
    """One query for each of eight heads over more keys than any cache holds; and the bytes of these."""
    query, key = torch.rand(8, 1, 128), torch.rand(8, large // 1024, 128)
    return lambda: query @ key.mT, 4.0 * key.numel()


def _fresh(large: int) -> tuple[Work, Work]:
    """A sum in new memory, and the same in memory that is there."""
    numbers, there = torch.zeros(large), torch.zeros(large)
    return lambda: numbers + 1, lambda: torch.add(numbers, 1, out=there)


def _call() -> Work:
    """A slice and a sum of a few numbers."""
    few, other = torch.zeros(8), torch.zeros(4)
    return lambda: few[:4] + other
