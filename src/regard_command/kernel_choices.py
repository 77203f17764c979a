"""The chosen kernel beside the fastest one over a grid of 100 problems: the table of `regard bench --choices`."""

from __future__ import annotations

import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import biases, explain, masks
from regard.core.problem import Problem
from regard.errors import ConfigurationError, KernelError
from regard.kernels import Kernel
from regard.kernels.planning.choice import kernels_of
from regard.kernels.planning.rates import predicted_seconds
from regard.masks import Mask

PROBLEMS = 100
KINDS = ("all pairs", "causal", "window", "padding", "documents", "ALiBi", "grouped", "cross", "decode", "few queries")
"""A tenth of the problems each."""
LENGTHS = (16, 32, 64, 100, 128, 200, 256, 400, 512, 1000, 1024, 2048, 4096)
LONG = (512, 1024, 2048, 4096, 8192, 16384)
"""Lengths with windows, and numbers of keys for a few queries."""
MOST_WORK, MOST_NUMBERS = 2**31, 2**24
"""Flops of a forward pass over the pairs that a mask leaves, and numbers of the keys: a few tenths of a second."""
ROUND, ROUNDS, BUDGET = 1e-3, 5, 0.4
"""The least seconds of a round, the fewest rounds, and the seconds of a problem's rounds."""
IN_THE_RACE = 2.0
"""A kernel is timed in turn with the others if it takes at most this many times the fastest one's time at first."""
SLOWEST_TRIED = 12.0
"""A kernel is tried at all if its predicted time is at most this many times the least."""
WITHIN, GOAL = 1.2, 0.95
"""The goal: times the fastest kernel's time that the chosen one takes at most, and in which share of the problems."""


@dataclass(frozen=True, slots=True)
class GridProblem:
    """One problem of the grid, by its sizes."""

    kind: str
    batch: int
    heads: int
    key_heads: int
    queries: int
    keys: int
    dim: int
    dtype: torch.dtype
    training: bool

    def __str__(self) -> str:
        heads = f"{self.heads}" if self.heads == self.key_heads else f"{self.heads}/{self.key_heads}"
        lengths = f"{self.queries}" if self.queries == self.keys else f"{self.queries} × {self.keys}"
        passes = ", trained" if self.training else ""
        return f"{self.kind} ({self.batch}, {heads}, {lengths}, {self.dim}) {_word(self.dtype)}{passes}"

    @property
    def work(self) -> float:
        """Flops of a forward pass over the pairs that the mask leaves."""
        width = min(window_of(self.keys), self.keys) if self.kind == "window" else self.keys
        return 4.0 * self.batch * self.heads * self.queries * width * self.dim

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Random query, key and value."""
        shapes = (self.heads, self.queries), (self.key_heads, self.keys), (self.key_heads, self.keys)
        query, key, value = (
            torch.randn(self.batch, *shape, self.dim).to(self.dtype).requires_grad_(self.training) for shape in shapes
        )
        return query, key, value

    def options(self) -> dict:
        """Mask and bias."""
        causal: Mask = masks.causal()
        if self.kind == "window":
            return {"mask": causal & masks.window(before=window_of(self.keys) - 1)}
        if self.kind == "padding":
            lengths = [1 + (self.keys - 1) * (number + 1) // self.batch for number in range(self.batch)]
            return {"mask": masks.padding(lengths=lengths)}
        if self.kind == "documents":
            return {"mask": causal & masks.documents(torch.arange(self.keys) * 5 // self.keys)}
        if self.kind == "ALiBi":
            return {"mask": causal, "bias": biases.alibi(self.heads)}
        return {"mask": causal} if self.kind in ("causal", "few queries") else {}


@dataclass(frozen=True, slots=True)
class Choice:
    """A problem with the least seconds of each kernel that was timed, and those that were predicted."""

    problem: GridProblem
    chosen: str
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def fastest(self) -> str:
        """The kernel that took the least time."""
        return min(self.measured, key=lambda kernel: self.measured[kernel])

    @property
    def factor(self) -> float:
        """The chosen kernel's time over the fastest one's."""
        return self.measured[self.chosen] / self.measured[self.fastest]


def window_of(length: int) -> int:
    """The window of a problem of this length: a sixteenth, 64 at least."""
    return max(length // 16, 64)


def grid(seed: int = 0) -> list[GridProblem]:
    """The problems that a seed stands for: each kind in turn, its sizes, dtype and training at random."""
    draw, found = random.Random(seed), []
    while len(found) < PROBLEMS:
        problem = _drawn(draw, KINDS[len(found) % len(KINDS)])
        if problem.work <= MOST_WORK and problem.batch * problem.key_heads * problem.keys * problem.dim <= MOST_NUMBERS:
            found.append(problem)
    return found


def _drawn(draw: random.Random, kind: str) -> GridProblem:
    keys = draw.choice(LONG if kind in ("window", "decode", "few queries") else LENGTHS)
    heads = draw.choice((1, 4, 8, 12, 16, 32))
    shared = [few for few in (1, 2, 4, 8) if heads % few == 0 and few < heads] or [heads]
    queries = {"cross": draw.choice(LENGTHS), "decode": 1, "few queries": draw.choice((2, 4, 8, 16, 32))}.get(
        kind, keys
    )
    return GridProblem(
        kind,
        batch=draw.choice((1, 1, 2, 4, 16, 64)),
        heads=heads,
        key_heads=draw.choice(shared) if kind == "grouped" or (kind == "decode" and draw.random() < 0.5) else heads,
        queries=queries,
        keys=keys,
        dim=draw.choice((32, 64, 64, 128)),
        dtype=draw.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16)),
        training=kind not in ("decode", "few queries") and draw.random() < 0.5,
    )


def part_of(problems: list[GridProblem], part: str) -> list[GridProblem]:
    """Every n-th problem, for a part such as "2/4" the second of four parts.

    Raises:
        ConfigurationError: it is not two numbers, of which the second is at least the first and that 1.
    """
    match = re.fullmatch(r"([1-9][0-9]*)/([1-9][0-9]*)", part)
    number, count = (int(group) for group in match.groups()) if match else (1, 0)
    if number > count:
        raise ConfigurationError(f"--part is the number of a part and how many there are, as in 2/4; this is {part!r}")
    return problems[number - 1 :: count]


def measured_choices(problems: list[GridProblem]) -> Iterator[Choice]:
    """The choice for each problem, and what the kernels take."""
    for number, problem in enumerate(problems):
        torch.manual_seed(number)
        yield measure(problem)


def measure(problem: GridProblem, *, tried: float = SLOWEST_TRIED) -> Choice:
    """The least seconds of the kernels that may be the fastest, timed in turn."""
    tensors, options = problem.tensors(), problem.options()
    plan = explain(*tensors, **options)
    posed, upstream = plan.problem, torch.randn_like(tensors[0])
    predicted = {
        each.name: predicted_seconds(each.cost(posed), posed) for each in kernels_of(posed) if not each.why_not(posed)
    }
    most = tried * min(predicted.values())
    works: dict[str, Callable[[], object]] = {}
    for kernel in sorted(kernels_of(posed), key=lambda each: predicted.get(each.name, 0.0)):
        if kernel is plan.kernel or predicted.get(kernel.name, 2 * most) <= most:
            works[kernel.name] = _work(kernel, posed, tensors if problem.training else (), upstream)
    return Choice(problem, plan.kernel.name, _least_seconds(works, plan.kernel.name), predicted)


def _work(kernel: Kernel, posed: Problem, inputs: tuple[Tensor, ...], upstream: Tensor) -> Callable[[], object]:
    """A forward pass, and with inputs the backward pass."""
    if not inputs:
        return torch.no_grad()(lambda: kernel.run(posed))
    return lambda: torch.autograd.grad(kernel.run(posed).output, inputs, upstream)


def _least_seconds(works: dict[str, Callable[[], object]], chosen: str) -> dict[str, float]:
    """Seconds of a call of each: the least of rounds in turn, of those that are in the race; of others the first."""
    least: dict[str, float] = {}
    for name in (chosen, *(name for name in works if name != chosen)):
        try:
            seconds = _seconds(works[name], 1)
        except KernelError:  # flex, which compares itself with the reference at its first use
            continue
        if seconds < 50 * min(least.values(), default=seconds):  # the first call prepares masks and memory
            seconds = _seconds(works[name], 1)
        least[name] = seconds
    racing = [name for name in least if name == chosen or least[name] <= IN_THE_RACE * min(least.values())]
    began, rounds = time.perf_counter(), 0
    while rounds < ROUNDS or time.perf_counter() - began < BUDGET:
        for name in racing[:: 1 if rounds % 2 else -1]:
            calls = max(1, int(ROUND / least[name]))
            least[name] = min(least[name], _seconds(works[name], calls))
        rounds += 1
    return least


def _seconds(work: Callable[[], object], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        work()
    return (time.perf_counter() - began) / calls


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
