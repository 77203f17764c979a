"""Work shared among as many threads as torch uses. The C code holds no lock of Python's while it runs."""

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


def workers(work: int, least: int) -> int:
    """How many threads `work` is worth, where each should get `least` of it."""
    return max(1, min(torch.get_num_threads(), work // least))


def share(call: Callable[[int, Job], None], jobs: Sequence[Job], count: int) -> None:
    """call(worker, job) for all jobs, by `count` workers that each do neighbouring ones; this thread is one of them."""
    count = min(count, len(jobs))
    if count <= 1:
        _each(call, 0, jobs)
        return
    shares = [jobs[begin:end] for begin, end in parts(0, len(jobs), count)]
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


def together(function: Any, work: Any, count: int) -> None:
    """The C function on the same work by at most `count` threads at once, each of which takes units that no other has.

    Raises:
        MemoryError: one of them found none for what it keeps, and has set `failed`.
    """
    team, count = _team(), min(count, work.units)
    if count <= 0:
        return
    if count == 1:
        function(ctypes.byref(work))
    elif team is not None:
        team(ctypes.cast(function, ctypes.c_void_p), ctypes.byref(work), torch.get_num_threads(), 0)
    else:
        share(lambda _, each: function(ctypes.byref(each)), [work] * count, count)
    if getattr(work, "failed", 0):
        raise MemoryError("native code found no memory for the blocks that it lays out")


def parts(begin: int, end: int, count: int, step: int = 1) -> list[tuple[int, int]]:
    """At most `count` parts of [begin, end), as even as can be, none empty, cut where `step` divides.

    >>> parts(0, 10, 3), parts(5, 200, 2, step=64)
    ([(0, 3), (3, 6), (6, 10)], [(5, 64), (64, 200)])
    """
    even = (begin + (end - begin) * part // count for part in range(1, count))
    cuts = [begin, *(max(begin, cut // step * step) for cut in even), end]
    return [(low, high) for low, high in pairwise(cuts) if low < high]


def _team() -> Callable | None:
    """What starts OpenMP's threads, where it can."""
    return None if _forked else _openmp()


@cache
def _openmp() -> Callable | None:
    """OpenMP's way to start its threads, as compilers call it, if torch has brought one along.

    Torch's own operators run on these threads, and for a while after each they wait awake: other threads would have to
    share the cores with them. Another number of them than torch's would end some, to be started again.
    """
    try:
        found = ctypes.CDLL(None).GOMP_parallel
    except (AttributeError, OSError, TypeError):  # another OpenMP, none at all, or a system without such a list
        return None
    found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return found


def _each(call: Callable[[int, Job], None], worker: int, jobs: Sequence[Job]) -> None:
    for job in jobs:
        call(worker, job)


def _threads() -> ThreadPoolExecutor:
    """Made when first needed, of threads that start one by one."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(32, os.cpu_count() or 1), thread_name_prefix="regard")
    return _pool


def _forget() -> None:
    """In a forked process: it has none of its parent's threads, and OpenMP would wait for them."""
    global _pool, _forked
    _pool, _forked = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
