"""Time and memory of exact and approximate attention, and the length from which the approximation is faster."""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from operator import and_
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled

from ..attention import run_problem
from ..core.problem import Problem
from ..errors import ConfigurationError, RegardError
from ..masks import Mask
from ..masks.base import And
from ..masks.documents import CrossDocuments, Documents
from ..masks.padding import Padding
from ..masks.prefix import PrefixPerBatch
from ..masks.tensor_mask import TensorMask
from .methods import Method

SHORTEST, LONGEST = 128, 2**16
"""The lengths between which the crossover is searched for by default."""
PATIENCE = 1.0
"""Seconds of a call above which no longer length is tried by default."""
CLEARLY = 1.2
"""A ratio of times that noise does not make."""
MOST_ROUNDS, MOST_SECONDS = 5, 1.0
"""Runs of each function whose median counts, and the time after which there are no more of them."""
FIXED_LENGTH = (CrossDocuments, Documents, Padding, PrefixPerBatch, TensorMask)
"""Masks with a number for each token or sequence."""


@dataclass(frozen=True)
class Timings:
    """Seconds of the exact attention and of an approximation at some lengths, in increasing order.

    lengths: numbers of keys. exact, approximate: medians of several runs, taken in turn in one process.
    """

    lengths: tuple[int, ...]
    exact: tuple[float, ...]
    approximate: tuple[float, ...]

    @property
    def crossover(self) -> float | None:
        """The length from which the approximation is faster, up to the longest that was measured; None for none.

        Between two measured lengths the ratio of the times is interpolated as a power of the length. The shortest
        length, where the approximation is faster at all of them.

        >>> Timings((100, 200, 400), (1.0, 4.0, 16.0), (2.0, 4.0, 8.0)).crossover
        200.0
        >>> Timings((100, 200), (1.0, 4.0), (2.0, 4.5)).crossover is None
        True
        """
        gains = [math.log(exact / other) for exact, other in zip(self.exact, self.approximate, strict=True)]
        if not gains or gains[-1] <= 0:
            return None
        points = list(zip(map(math.log, self.lengths), gains, strict=True))
        for (length, gain), (next_length, next_gain) in reversed(list(pairwise(points))):
            if gain <= 0:
                share = -gain / (next_gain - gain)
                return round(math.exp(length + share * (next_length - length)), 6)
        return float(self.lengths[0])

    @property
    def speedup(self) -> tuple[float, ...]:
        """Exact over approximate time at each length."""
        return tuple(exact / other for exact, other in zip(self.exact, self.approximate, strict=True))


def measure_times(problem: Problem, method: Method, lengths: Sequence[int] | None) -> tuple[Timings, str]:
    """The times at these lengths and at the problem's own, and a remark about what was left out, or "".

    Tensors of other lengths are rows of the problem's own, evenly spaced or repeated. None for lengths: from 128 on
    doubled, until the approximation is clearly faster at the two longest, or a call takes PATIENCE seconds.

    Raises:
        ConfigurationError: lengths that are no whole numbers of at least 1.
    """
    if lengths is not None and (isinstance(lengths, str) or not isinstance(lengths, Sequence)):
        raise ConfigurationError(f"lengths is {lengths!r}; it needs a list of whole numbers of at least 1, of keys")
    for length in lengths or ():
        if isinstance(length, bool) or not isinstance(length, int) or length < 1:
            raise ConfigurationError(f"lengths has {length!r}; it needs whole numbers of at least 1, of keys")
    times = {problem.keys: _times(problem, method)}
    bare, remark = _without_fixed_masks(problem)
    for length in _doubled() if lengths is None else sorted(set(lengths)):
        if length in times:
            continue
        other = resized(bare, length)
        if reason := method.why_not(other):
            remark = f"not timed from {length:,} keys on: {reason}"
            break
        try:
            times[length] = _times(other, method)
        except RegardError as error:  # a bias for one length, for example
            remark = f"not timed at {length:,} keys: {error}"
            break
        if lengths is None and (max(times[length]) > PATIENCE or _has_crossed(times)):
            break
    chosen = sorted(times)
    exact, approximate = zip(*(times[length] for length in chosen), strict=True)
    return Timings(tuple(chosen), exact, approximate), remark


def _has_crossed(times: Mapping[int, tuple[float, float]]) -> bool:
    """Whether the approximation is clearly faster at the two longest lengths."""
    longest = sorted(times)[-2:]
    return len(longest) == 2 and all(times[length][0] > CLEARLY * times[length][1] for length in longest)


def _doubled() -> list[int]:
    """SHORTEST, and twice as much again and again up to LONGEST."""
    return [SHORTEST << n for n in range((LONGEST // SHORTEST).bit_length())]


def _times(problem: Problem, method: Method) -> tuple[float, float]:
    """Seconds of the exact and of the approximate attention."""
    return time_in_turn(lambda: run_problem(problem), lambda: method.run(problem), problem.value)


def time_in_turn(first: Callable[[], object], second: Callable[[], object], like: Tensor) -> tuple[float, float]:
    """Median seconds of two functions, run in turn after one run of each that does not count."""
    first()
    second()
    seconds: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    for _ in range(MOST_ROUNDS):
        for function, taken in zip((first, second), seconds, strict=True):
            _wait(like)
            start = time.perf_counter()
            function()
            _wait(like)
            taken.append(time.perf_counter() - start)
        if time.perf_counter() - started > MOST_SECONDS:
            break
    return statistics.median(seconds[0]), statistics.median(seconds[1])


def _wait(like: Tensor) -> None:
    """Wait for the work on the tensor's device."""
    if like.is_cuda:
        torch.cuda.synchronize(like.device)


def resized(problem: Problem, length: int) -> Problem:
    """The problem with this many keys, and queries in proportion: its rows evenly spaced, or repeated."""
    keys, queries = length, max(1, round(problem.queries * length / max(problem.keys, 1)))
    pairs = replace(problem.pairs, query=_rows(problem.pairs.query, queries), key=_rows(problem.pairs.key, keys))
    return replace(problem, pairs=pairs, value=_rows(problem.value, keys), query_positions=None, key_positions=None)


def _rows(tensor: Tensor, length: int) -> Tensor:
    """As many rows of a tensor (..., n, dim)."""
    own = tensor.shape[-2]
    numbers = torch.arange(length, device=tensor.device)
    return tensor.index_select(-2, numbers % own if length > own else numbers * own // length)


def _without_fixed_masks(problem: Problem) -> tuple[Problem, str]:
    """The problem with those masks that are meant for any length; a remark about the others."""
    parts = list(_intersected(problem.mask)) if problem.mask is not None else []
    fitting = [part for part in parts if _fits_any_length(part)]
    dropped = [part for part in parts if not _fits_any_length(part)]
    remark = f"other lengths are timed without {reduce(and_, dropped)}" if dropped else ""
    return replace(problem, mask=reduce(and_, fitting) if fitting else None), remark


def _intersected(mask: Mask) -> list[Mask]:
    """The masks joined by &."""
    return [*_intersected(mask.left), *_intersected(mask.right)] if isinstance(mask, And) else [mask]


def _fits_any_length(mask: Mask) -> bool:
    """Whether a mask has no numbers for the tokens of one sequence."""
    return not isinstance(mask, FIXED_LENGTH) and all(map(_fits_any_length, mask.operands))


def peak_memory(function: Callable[[], object], device: torch.device) -> int | None:
    """The most bytes of tensors that a function holds at once beside its inputs, its result among them.

    As torch's allocator counts them, on the CPU and on CUDA; scratch memory of native code is not counted. None on
    other devices, and within another profiler.
    """
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        function()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu" or _profiler_enabled():
        return None
    variable, quiet = "KINETO_LOG_LEVEL", os.environ.get("KINETO_LOG_LEVEL")
    if quiet is None:
        os.environ[variable] = "99"  # the profiler writes two lines to standard error otherwise
    try:
        # torch.profiler does the same, and imports 800 modules first.
        with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
            function()
    finally:
        if quiet is None:
            del os.environ[variable]
    now = peak = 0
    results: Any = None if profile is None else profile.kineto_results
    for event in [] if results is None else results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            peak = max(peak, now)
    return peak
