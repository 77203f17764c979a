"""Run C functions on several threads: torch's OpenMP threads where they can be used, else a Python thread pool.

The C code runs without Python's global lock.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from itertools import pairwise
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")

_WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_pool: ThreadPoolExecutor | None = None
_forked = False


def thread_count(work: int, least: int) -> int:
    """The number of threads for an amount of work of which each should get at least `least`."""
    return max(1, min(torch.get_num_threads(), work // least))


def run_jobs(call: Callable[[int, Job], None], jobs: Sequence[Job], count: int) -> None:
    """Run call(worker, job) for all jobs on `count` threads, the calling one included, each on consecutive jobs."""
    count = min(count, len(jobs))
    if count <= 1:
        _each(call, 0, jobs)
        return
    shares = [jobs[begin:end] for begin, end in split_range(0, len(jobs), count)]
    left, errors = iter(range(count)), []

    def work(_: object = None) -> None:
        for worker in left:
            try:
                _each(call, worker, shares[worker])
            except BaseException as error:  # it may not pass through what runs the threads
                errors.append(error)

    team = _team()
    if team is not None:
        callback = _WORK(work)
        team(ctypes.cast(callback, ctypes.c_void_p), None, torch.get_num_threads(), 0)
    else:
        others = [_threads().submit(work) for _ in range(1, count)]
        work()
        wait(others)  # they write into memory that the caller holds
    if errors:
        raise errors[0]


def run_units(function: Any, work: Any, count: int) -> None:
    """Run a C function on threads that take units of the same work from a shared counter.

    count: of 1, or of one unit, the calling thread alone; of more, all of torch's threads where there is OpenMP, else
    `count` threads. A thread that finds no unit left returns at once.

    Raises:
        MemoryError: a thread could not allocate its scratch memory, and has set `failed`.
    """
    team, count = _team(), min(count, work.unit_count)
    if count <= 0:
        return
    if count == 1:
        function(ctypes.byref(work))
    elif team is not None:
        team(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(work), torch.get_num_threads(), 0)
    else:
        run_jobs(lambda _, shared_work: function(ctypes.byref(shared_work)), [work] * count, count)
    if getattr(work, "failed", 0):
        raise no_memory()


def no_memory() -> MemoryError:
    """The error of a thread that could not allocate its scratch memory."""
    return MemoryError("native code found no memory for the blocks that it lays out")


def split_range(begin: int, end: int, count: int, step: int = 1) -> list[tuple[int, int]]:
    """Split [begin, end) into at most `count` non-empty parts of about one length, at multiples of `step`.

    >>> split_range(0, 10, 3), split_range(5, 200, 2, step=64)
    ([(0, 3), (3, 6), (6, 10)], [(5, 64), (64, 200)])
    """
    even = (begin + (end - begin) * part // count for part in range(1, count))
    cuts = [begin, *(max(begin, cut // step * step) for cut in even), end]
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def team_address() -> int | None:
    """The address of the C function that starts a team of OpenMP threads; None where it cannot be called.

    It takes a function, its argument, the number of threads, which is torch's, and 0.
    """
    return None if _team() is None else _openmp_address()


def _team() -> Callable | None:
    """The function that starts a team of OpenMP threads; None where it cannot be called."""
    return None if _forked else _openmp()


@cache
def _openmp() -> Callable | None:
    """`GOMP_parallel` of the OpenMP library that torch has loaded, which compilers call to start threads.

    Torch's own operators run on these threads, and for a while after each they wait awake: other threads would have to
    share the cores with them. Another number of them than torch's would end some, to be started again.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another OpenMP, none at all, or a system without such a list
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found


@cache
def _openmp_address() -> int | None:
    """The address of `_openmp`."""
    return ctypes.cast(_openmp(), ctypes.c_void_p).value  # type: ignore[arg-type]


def _each(call: Callable[[int, Job], None], worker: int, jobs: Sequence[Job]) -> None:
    for job in jobs:
        call(worker, job)


def _threads() -> ThreadPoolExecutor:
    """The thread pool, created at first use; its threads start one by one."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(32, os.cpu_count() or 1), thread_name_prefix="regard")
    return _pool


def _reset_after_fork() -> None:
    """Discard the thread pool and OpenMP in a forked process, which has none of the parent's threads."""
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
