"""Every test starts from the same seeds; memory from `torch.empty` is NaN; reports of times and of random problems.

One process computes on two threads. Of several side by side each computes on one, but for the tests that ask for the
fixture `two_threads`.
"""

import functools
import math
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy
import pytest

# Read once, when torch is loaded: threads that wait awake for each other make training many times slower where
# something else keeps the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

import regard

CONFORMANCE = ("random problems", "computed", "wrong")
"""What test_conformance.py counts."""
PACKAGE = str(Path(regard.__file__).parent) + os.sep
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


def pytest_configure() -> None:
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # Also for the processes that tests start; many threads on small tensors are slower than few.
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Computes on two threads: for code that shares its work among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)


def poisoned(allocate: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """The same allocation, filled with NaN where regard itself asks for it and the dtype has a NaN."""

    @functools.wraps(allocate)
    def allocate_poisoned(*args, **kwargs) -> torch.Tensor:
        tensor = allocate(*args, **kwargs)
        asked_by_regard = sys._getframe(1).f_code.co_filename.startswith(PACKAGE)
        if asked_by_regard and (tensor.is_floating_point() or tensor.is_complex()):
            with torch.no_grad():
                tensor.fill_(math.nan)
        return tensor

    return allocate_poisoned


@pytest.fixture(autouse=True, scope="session")
def poisoned_memory() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for owner, name in (
            (torch, "empty"),
            (torch, "empty_like"),
            (torch, "empty_strided"),
            (torch.Tensor, "new_empty"),
        ):
            patch.setattr(owner, name, poisoned(getattr(owner, name)))
        yield


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    reports = [report for some in terminalreporter.stats.values() for report in some if hasattr(report, "duration")]
    random_problems = Counter()
    for report in reports:
        if report.when == "call":
            random_problems.update({name: count for name, count in report.user_properties if name in CONFORMANCE})
    if random_problems:
        problems, checks, wrong = (random_problems[name] for name in CONFORMANCE)
        terminalreporter.write_line(
            f"conformance: {problems:,} random problems, {checks:,} times computed by a kernel, {wrong:,} times wrong"
        )
    if config.getoption("durations"):
        seconds = Counter()
        for report in reports:
            seconds[report.nodeid.split("::")[0]] += report.duration
        terminalreporter.section("files that take the most time, of all processes together")
        for file, total in seconds.most_common(40):
            terminalreporter.write_line(f"{total:7.1f} s  {100 * total / seconds.total():4.1f} %  {file}")
