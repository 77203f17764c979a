"""Timing on a shared, noisy machine: the sides alternate in one run, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

Work = Callable[[], object]


def seconds(work: Work, calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Seconds per call, over a number of calls in a row."""
    began = clock()
    for _ in range(calls):
        work()
    return (clock() - began) / calls


def cpu_seconds(work: Work) -> float:
    """CPU seconds, of this thread, of one call that cannot be repeated; other programs do not count.

    Nor do torch's other threads, which stay awake for a while after the operator before.
    """
    began = time.thread_time()
    work()
    return time.thread_time() - began


def compare(ours: Work, theirs: Work, *, calls: int, rounds: int = 31) -> tuple[float, float, float]:
    """Median seconds per call of each, and the median of the difference within a round; the order changes in turn."""
    ours()
    theirs()
    pairs = []
    for round_ in range(rounds):
        if round_ % 2:
            mine, other = seconds(ours, calls), seconds(theirs, calls)
        else:
            other, mine = seconds(theirs, calls), seconds(ours, calls)
        pairs.append((mine, other))
    return (
        statistics.median(mine for mine, _ in pairs),
        statistics.median(other for _, other in pairs),
        statistics.median(mine - other for mine, other in pairs),
    )


def least(ours: Work, theirs: Work, *, calls: int = 8, batches: int = 600) -> tuple[float, float]:
    """The least seconds per call of each, over many small batches in turn: what no other program disturbed."""
    ours()
    theirs()
    mine, other = zip(*((seconds(ours, calls), seconds(theirs, calls)) for _ in range(batches)), strict=True)
    return min(mine), min(other)


def in_turn(
    works: Mapping[str, Work], *, rounds: int, calls: int = 1, clock: Callable[[], float] = time.perf_counter
) -> dict[str, float]:
    """Median seconds per call of each: one round after another over all of them, each round in the other direction.

    clock: `time.thread_time` where one thread does all, so that other programs count for less.
    """
    for work in works.values():
        work()
    spent: dict[str, list[float]] = {name: [] for name in works}
    for round_ in range(rounds):
        names = list(works)[:: 1 if round_ % 2 else -1]
        for name in names:
            spent[name].append(seconds(works[name], calls, clock))
    return {name: statistics.median(each) for name, each in spent.items()}


def machine() -> str:
    """What the figures were measured on."""
    import platform

    import torch

    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, " + (
        f"CPU capability {torch.backends.cpu.get_cpu_capability()}"
    )
