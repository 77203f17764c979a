"""Measurement of the rates of this machine: the flash kernels in each dtype, products, passes, memory and calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from ...backends.base import TimedFlash, Work
from ...backends.registry import BACKENDS
from ...errors import ConfigurationError
from .rates import FlashRates, Rates

BUDGET = 10.0
"""Seconds that are spent on all measurements together."""
MIN_ROUNDS = 3
"""The least number of rounds."""
CACHE_SIZES = tuple(2**size for size in range(20, 26))
"""Bytes of which it is measured whether a cache keeps them."""
BRIEF = 5e-3
"""A work that takes fewer seconds is repeated: what it reads is in the cache then, as where calls are repeated."""


@dataclass(frozen=True)
class Sizes:
    """How much the benchmarks of a kind of device compute, so that a launch is a small part of it.

    large: numbers of float32 that exceed every cache. heads, keys, rows: of the flash kernels; rows of a backward pass.
    few_heads: times as many heads for a few rows. products: (heads, rows, columns) of the products and passes.
    """

    large: int
    heads: int
    keys: int
    rows: int
    trained_rows: int
    few_heads: int
    products: tuple[int, int, int]


SIZES = {
    "cpu": Sizes(2**25, 8, 1024, 1024, 256, 1, (8, 128, 512)),
    "cuda": Sizes(2**28, 16, 8192, 8192, 8192, 16, (64, 1024, 4096)),
}
"""By `torch.device.type`."""


def measure(budget: float = BUDGET, large: int | None = None, device: str = "cpu") -> Rates:
    """Measure the rates of this machine with torch's current number of threads, for `budget` seconds at least.

    The benchmarks run in turn, so that all meet the same disturbances; the least of the rounds counts, since
    disturbances only add time. large: numbers read from main memory, a multiple of 1024; twice as many are allocated.
    device: "cpu" or "cuda", whose work is waited for.

    Raises:
        ConfigurationError: another kind of device.
    """
    if device not in SIZES:
        raise ConfigurationError(
            f"rates are measured on {' and '.join(SIZES)}; this is a device of the kind {device!r}"
        )
    sizes = SIZES[device]
    large, threads = large or sizes.large, torch.get_num_threads() if device == "cpu" else 1
    with torch.no_grad(), torch.device(device):
        (product, flops), (softmax, passes) = _products(sizes), _passes(sizes)
        new, again = _fresh(large)
        numbers = torch.ones(large)
        flash = [(benchmark, benchmark.make_works()) for benchmark in _flash_benchmarks(sizes)]
        products, softmaxes, taken, written, calls, *others = time_in_turn(
            [
                *(_repeated(product, 16), _repeated(softmax, 16), new, again, _repeated(_call(), 1000)),
                *_reads(numbers),
                *(_stream(benchmark, numbers) for benchmark, _ in flash),
                *(work for _, works in flash for work in works),
            ],
            budget,
            wait=None if device == "cpu" else torch.cuda.synchronize,
        )
    found: dict[str, dict[str, FlashRates]] = {}
    spent = iter(others)
    *cached, moved = (size / next(spent) for size in (*CACHE_SIZES, 4 * large))
    streamed = [4 * large / next(spent) for _ in flash]
    for (benchmark, works), from_memory in zip(flash, streamed, strict=True):
        times = [threads * next(spent) for _ in works]
        name = str(benchmark.dtype).removeprefix("torch.")
        found.setdefault(benchmark.backend, {})[name] = replace(benchmark.rates(times), moved=from_memory)
    return Rates(
        flops=16 * flops / products / threads,
        passes=16 * passes / softmaxes / threads,
        flash=found,
        moved=moved,
        fresh=4.0 * large / max(taken - written, written / 100),  # where it costs nothing, noise would make it negative
        call=calls / 1000,
        cache=float(_cache_size(cached, moved)),
    )


def _cache_size(rates: Sequence[float], moved: float) -> int:
    """The most bytes up to which all of CACHE_SIZES are read nearer to the fastest rate than to main memory's."""
    between = (max(rates) * moved) ** 0.5
    slow = next((number for number, rate in enumerate(rates) if rate < between), len(rates))
    return CACHE_SIZES[max(slow - 1, 0)]


def time_in_turn(works: Sequence[Work], budget: float, wait: Work | None = None) -> list[float]:
    """Seconds of each work: the least over rounds in which each runs once. wait: until what was launched is done."""
    works = works if wait is None else [_and_then(work, wait) for work in works]
    for work in works:
        work()
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < MIN_ROUNDS or time.perf_counter() - began < budget:
        rounds.append([_seconds(work) for work in works])
    return [min(spent) for spent in zip(*rounds, strict=True)]


def _and_then(work: Work, wait: Work) -> Work:
    """A work, and the end of what it launched."""

    def both() -> None:
        work()
        wait()

    return both


def _seconds(work: Work) -> float:
    """The least seconds of a work, repeated for BRIEF seconds."""
    least = total = _once(work)
    while total < BRIEF:
        spent = _once(work)
        least, total = min(least, spent), total + spent
    return least


def _once(work: Work) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def _repeated(work: Work, calls: int) -> Work:
    """A work repeated `calls` times."""

    def often() -> None:
        for _ in range(calls):
            work()

    return often


def _products(sizes: Sizes) -> tuple[Work, float]:
    """Benchmark of `flops`: matrix products of some heads in blocks as the dense kernel has them; and their flops."""
    heads, rows, columns = sizes.products
    query, key = torch.rand(heads, rows, 64), torch.rand(heads, columns, 64)
    scores = torch.empty(heads, rows, columns)
    return lambda: torch.matmul(query, key.mT, out=scores), 2.0 * scores.numel() * query.shape[-1]


@dataclass(frozen=True)
class _FlashBenchmark:
    """Calls of a flash kernel in a dtype that differ in dim and rows, so that its rates follow from their times."""

    backend: str
    timed: TimedFlash
    dtype: torch.dtype
    sizes: Sizes

    def make_works(self) -> list[Work]:
        """Three forward passes, few rows, a forward and a backward pass, and those of small tiles where they tell."""
        timed, (large, other, few) = self.timed, self.shapes
        trained, small = self._tensors(self.sizes.trained_rows, TRAINED_DIM), self._tensors(SMALL, FEW_DIM, keys=SMALL)
        works = [timed.forward(*self._tensors(*shape)) for shape in (large, other)]
        works += [timed.forward(*self._tensors(*few, times=self.sizes.few_heads))]
        works += [timed.stream(*self._tensors(1, FEW_DIM)[1:])]
        works += [timed.forward(*trained), timed.backward(*trained)]
        return [*works, timed.forward(*small), timed.backward(*small)] if timed.begins_tiles else works

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Rows and dims of the forward passes: large blocks, and few rows, of whose time much is packing."""
        return (self.sizes.rows, 32), (self.sizes.rows, 128), self.timed.few_rows

    def _tensors(
        self, rows: int, dim: int, *, keys: int | None = None, times: int = 1
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = (self.sizes.heads if keys is None else SMALL_HEADS) * times
        keys = self.sizes.keys if keys is None else keys
        query, key, value = (torch.rand(1, heads, length, dim).to(self.dtype) for length in (rows, keys, keys))
        return query, key, value

    def amounts(self, rows: int, dim: int) -> tuple[float, float, float]:
        """Flops, pairs and packed numbers of a forward pass."""
        pairs = float(self.sizes.heads * rows * self.sizes.keys)
        return 4.0 * pairs * dim, pairs, pairs / self.timed.packing_rows(rows) * 2 * dim

    def rates(self, times: Sequence[float]) -> FlashRates:
        """The rates from the seconds of the works, of one thread.

        Forward passes are sums of products, pairs and packed numbers: three rates from three times, none below 0.
        """
        work = np.array([self.amounts(rows, dim) for rows, dim in self.shapes])
        work[2] *= self.sizes.few_heads
        each = _least_squares(work / np.array(times[:3])[:, None], np.ones(3))
        flops, pairs, _ = self.amounts(1, FEW_DIM)
        numbers = self.sizes.heads * self.sizes.keys * 2 * FEW_DIM
        streamed = (times[3] - flops * each[0] - pairs * each[1]) / numbers
        least = times[3] / numbers / 10
        products, softmax, packed = (1 / max(float(seconds), 1e-13) for seconds in each)
        rates = FlashRates(products, softmax, packed, 1 / max(float(streamed), least), times[5] / times[4])
        if len(times) == 6:
            return rates
        begun = (times[7] - rates.backward * times[6]) / SMALL_HEADS
        return replace(rates, tiles=1 / max(begun, 1e-9))


FEW_DIM = 128
"""Dim of the benchmark of a single row."""
TRAINED_DIM = 64
"""Dim of the benchmark of a backward pass, of few rows as it is slow in float16, and of the forward pass beside it."""
SMALL_HEADS, SMALL = 64, 16
"""Heads, and rows and keys, of the benchmarks of `FlashRates.tiles`: one tile for each head, forward and backward."""


def _least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 that makes `matrix` x nearest to what is wanted: the best over all choices of entries that are 0."""
    best, least = np.zeros(matrix.shape[1]), float("inf")
    columns = range(matrix.shape[1])
    for chosen in (list(some) for count in columns for some in combinations(columns, count + 1)):
        solution = np.linalg.lstsq(matrix[:, chosen], wanted, rcond=None)[0]
        distance = float(np.square(matrix[:, chosen] @ solution - wanted).sum())
        if (solution >= 0).all() and distance < least * (1 - 1e-9):
            least, best = distance, np.zeros(matrix.shape[1])
            best[chosen] = solution
    return best


def _flash_benchmarks(sizes: Sizes) -> Iterator[_FlashBenchmark]:
    """Benchmarks of the flash kernel of each backend on torch's default device, in each dtype."""
    for backend in BACKENDS:
        if (timed := backend.timed_flash) is None:
            continue
        for dtype in timed.dtypes(torch.get_default_device().type):
            if backend.runs(torch.empty(0, dtype=dtype)):
                yield _FlashBenchmark(backend.name, timed, dtype, sizes)


def _passes(sizes: Sizes) -> tuple[Work, float]:
    """Benchmark of `passes`: the online softmax of one tile, from maximum to sum; and its number of passes."""
    heads, rows, columns = sizes.products
    scores = torch.rand(heads, rows, columns // 2)
    weights = torch.empty_like(scores)

    def softmax() -> None:
        torch.sub(scores, scores.amax(-1, keepdim=True), out=weights)
        weights.mul_(1.5).exp2_().sum(-1)

    return softmax, 5.0 * scores.numel()


def _reads(numbers: Tensor) -> list[Work]:
    """Benchmarks of `cache` and `moved`: sums of as many bytes as CACHE_SIZES, and of more than caches store."""
    return [*(numbers[: size // 4].sum for size in CACHE_SIZES), numbers.sum]


def _stream(benchmark: _FlashBenchmark, numbers: Tensor) -> Work:
    """Benchmark of a flash kernel's `moved`: a few queries over these bytes as keys and values of its dtype."""
    key, value = numbers.view(benchmark.dtype).view(2, 1, benchmark.sizes.heads, -1, FEW_DIM)
    return benchmark.timed.stream(key, value)


def _fresh(large: int) -> tuple[Work, Work]:
    """Benchmarks of `fresh`: a sum into newly allocated memory, and the same into existing memory."""
    numbers, there = torch.zeros(large), torch.zeros(large)
    return lambda: numbers + 1, lambda: torch.add(numbers, 1, out=there)


def _call() -> Work:
    """Benchmark of `call`: a slice and a sum of a few numbers."""
    few, other = torch.zeros(8), torch.zeros(4)
    return lambda: few[:4] + other
