"""Measurement of the rates of this machine: the flash kernels in each dtype, products, passes, memory and calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from torch import Tensor

from ... import native
from ...backends.cpu.few_queries import attend_few_queries
from ...backends.cpu.flash_tiles import FlashProblem
from ...backends.cpu.library import DTYPES
from ...tiles.tile_bits import BLOCK, TileBits
from .rates import FlashRates, Rates
from .unit_costs import TORCH_BLOCKS

Work = Callable[[], object]

BUDGET = 10.0
"""Seconds that are spent on all measurements together."""
MIN_ROUNDS = 3
"""The least number of rounds."""
LARGE = 2**25
"""Numbers, 128 MiB of float32, that exceed every cache."""
CACHE_SIZES = tuple(2**size for size in range(20, 26))
"""Bytes of which it is measured whether a cache keeps them."""
BRIEF = 5e-3
"""A work that takes fewer seconds is repeated: what it reads is in the cache then, as where calls are repeated."""


def measure(budget: float = BUDGET, large: int = LARGE) -> Rates:
    """Measure the rates of this machine with torch's current number of threads, for `budget` seconds at least.

    The benchmarks run in turn, so that all meet the same disturbances; the least of the rounds counts, since
    disturbances only add time. large: numbers read from main memory, a multiple of 1024; twice as many are allocated.
    """
    threads = torch.get_num_threads()
    with torch.no_grad():
        (product, flops), (softmax, passes) = _products(), _passes()
        new, again = _fresh(large)
        numbers = torch.ones(large, device="cpu")
        flash = list(_flash_benchmarks())
        products, softmaxes, taken, written, calls, *others = time_in_turn(
            [
                *(_repeated(product, 16), _repeated(softmax, 16), new, again, _repeated(_call(), 1000)),
                *_reads(numbers),
                *(_stream(benchmark, numbers) for benchmark in flash),
                *(work for benchmark in flash for work in benchmark.works),
            ],
            budget,
        )
    found: dict[str, dict[str, FlashRates]] = {"torch": {}}
    spent = iter(others)
    *cached, moved = (size / next(spent) for size in (*CACHE_SIZES, 4 * large))
    streamed = [4 * large / next(spent) for _ in flash]
    for benchmark, from_memory in zip(flash, streamed, strict=True):
        times = [threads * next(spent) for _ in benchmark.works]
        found.setdefault(benchmark.backend, {})[benchmark.dtype] = replace(benchmark.rates(times), moved=from_memory)
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


def time_in_turn(works: Sequence[Work], budget: float) -> list[float]:
    """Seconds of each work: the least over rounds in which each runs once."""
    for work in works:
        work()
    rounds: list[list[float]] = []
    began = time.perf_counter()
    while len(rounds) < MIN_ROUNDS or time.perf_counter() - began < budget:
        rounds.append([_seconds(work) for work in works])
    return [min(spent) for spent in zip(*rounds, strict=True)]


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


def _products() -> tuple[Work, float]:
    """Benchmark of `flops`: matrix products of 8 heads in blocks as the dense kernel has them; and their flops."""
    query, key = torch.rand(8, 128, 64, device="cpu"), torch.rand(8, 512, 64, device="cpu")
    scores = torch.empty(8, 128, 512, device="cpu")
    return lambda: torch.matmul(query, key.mT, out=scores), 2.0 * scores.numel() * query.shape[-1]


@dataclass(frozen=True)
class _FlashBenchmark:
    """Calls of a flash kernel in a dtype that differ in dim and rows, so that its rates follow from their times."""

    backend: str
    dtype: str
    works: tuple[Work, ...]

    def rates(self, times: Sequence[float]) -> FlashRates:
        """The rates from the seconds of the works, of one thread.

        Forward passes are sums of products, pairs and packed numbers: three rates from three times, none below 0.
        """
        work = np.array([_amounts(self.backend, rows, dim) for rows, dim in SHAPES[self.backend]])
        each = _least_squares(work / np.array(times[:3])[:, None], np.ones(3))
        flops, pairs, _ = _amounts(self.backend, 1, FEW_DIM)
        numbers = HEADS * KEYS * 2 * FEW_DIM
        streamed = (times[3] - flops * each[0] - pairs * each[1]) / numbers
        least = times[3] / numbers / 10
        products, softmax, packed = (1 / max(float(seconds), 1e-13) for seconds in each)
        rates = FlashRates(products, softmax, packed, 1 / max(float(streamed), least), times[5] / times[4])
        if len(times) == 6:
            return rates
        begun = (times[7] - rates.backward * times[6]) / SMALL_HEADS
        return replace(rates, tiles=1 / max(begun, 1e-9))


HEADS, KEYS = 8, 1024
"""Heads and keys of the benchmarks of the flash kernels."""
SHAPES = {"torch": ((1024, 32), (1024, 128), (32, 64)), "cpu": ((1024, 32), (1024, 128), (8, 64))}
"""Rows and dims of their forward passes: large blocks, and one so small that what it packs is much of its time."""
FEW_DIM = 128
"""Dim of the benchmark of a single row."""
TRAINED = 256, 64
"""Rows and dim of the benchmark of a backward pass, which in float16 is slow, and of the forward pass beside it."""
SMALL_HEADS, SMALL = 64, 16
"""Heads, and rows and keys, of the benchmarks of `FlashRates.tiles`: one tile for each head, forward and backward."""
NATIVE_BLOCK = 256
"""Rows for which the native flash kernel packs a block of keys once."""


def _amounts(backend: str, rows: int, dim: int) -> tuple[float, float, float]:
    """Flops, pairs and packed numbers of a forward pass."""
    pairs = float(HEADS * rows * KEYS)
    block = next(block for least, block in TORCH_BLOCKS if rows >= least) if backend == "torch" else NATIVE_BLOCK
    return 4.0 * pairs * dim, pairs, pairs / min(block, rows) * 2 * dim


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


def _flash_benchmarks() -> Iterator[_FlashBenchmark]:
    """Benchmarks of torch's flash kernel in each dtype, and of the native one in those that it reads."""
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        yield _FlashBenchmark("torch", _name(dtype), tuple(_torch_works(dtype)))
    if native.available():
        for dtype in DTYPES:
            yield _FlashBenchmark("cpu", _name(dtype), tuple(_native_works(dtype)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _tensors(
    rows: int, dim: int, dtype: torch.dtype, *, keys: int = KEYS, heads: int = HEADS
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.rand(1, heads, rows, dim, device="cpu").to(dtype),
        torch.rand(1, heads, keys, dim, device="cpu").to(dtype),
        torch.rand(1, heads, keys, dim, device="cpu").to(dtype),
    )


_torch_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def _torch_works(dtype: torch.dtype) -> Iterator[Work]:
    backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    for rows, dim in (*SHAPES["torch"], (_few_rows(dtype), FEW_DIM), TRAINED):
        inputs = _tensors(rows, dim, dtype)
        yield lambda inputs=inputs: _torch_flash(*inputs)
    for inputs in (_tensors(*TRAINED, dtype), _tensors(SMALL, FEW_DIM, dtype, keys=SMALL, heads=SMALL_HEADS)):
        output, lse = _torch_flash(*inputs)
        if inputs[0].shape[2] == SMALL:
            yield lambda inputs=inputs: _torch_flash(*inputs)
        yield lambda inputs=inputs, output=output, lse=lse: backward(output, *inputs, output, lse, 0.0, False)


def _native_works(dtype: torch.dtype) -> Iterator[Work]:
    for rows, dim in SHAPES["cpu"]:
        yield _native_problem(_tensors(rows, dim, dtype)).forward
    inputs = _tensors(1, FEW_DIM, dtype)
    yield lambda: attend_few_queries(*inputs, 0.125)
    problem = _native_problem(_tensors(*TRAINED, dtype))
    output, lse = problem.forward()
    yield problem.forward
    yield lambda: problem.backward(output, lse, output, None)


def _native_problem(inputs: tuple[Tensor, Tensor, Tensor]) -> FlashProblem:
    """All pairs, in tiles without bits."""
    rows = -(-inputs[0].shape[2] // BLOCK)
    tiles = TileBits(
        np.arange(rows + 1), np.tile(np.array([[0, KEYS, -1]]), (rows, 1)), np.zeros((1, 1, 1, BLOCK), dtype=np.uint64)
    )
    return FlashProblem(*inputs, 0.125, tiles)


def _passes() -> tuple[Work, float]:
    """Benchmark of `passes`: the online softmax of one tile, from maximum to sum; and its number of passes."""
    scores = torch.rand(8, 128, 256, device="cpu")
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
    dtype: torch.dtype = getattr(torch, benchmark.dtype)
    key, value = numbers.view(dtype).view(2, 1, HEADS, -1, FEW_DIM)
    query = torch.ones(1, HEADS, _few_rows(dtype), FEW_DIM, dtype=dtype, device="cpu")
    if benchmark.backend == "torch":
        return lambda: _torch_flash(query, key, value)
    return lambda: attend_few_queries(query[:, :, :1], key, value, 0.125)


def _few_rows(dtype: torch.dtype) -> int:
    """The rows that torch's kernel has at least, as `without_single_row` does."""
    return 2 if dtype == torch.bfloat16 else 1


def _fresh(large: int) -> tuple[Work, Work]:
    """Benchmarks of `fresh`: a sum into newly allocated memory, and the same into existing memory."""
    numbers, there = torch.zeros(large, device="cpu"), torch.zeros(large, device="cpu")
    return lambda: numbers + 1, lambda: torch.add(numbers, 1, out=there)


def _call() -> Work:
    """Benchmark of `call`: a slice and a sum of a few numbers."""
    few, other = torch.zeros(8, device="cpu"), torch.zeros(4, device="cpu")
    return lambda: few[:4] + other
