"""Seeds, memory from `torch.empty` that is NaN, the marker `covering`, processes that start with torch loaded, records
of the log, and reports of times and of random problems.

One process computes on two threads. Of several side by side each computes on one, but for the tests that ask for the
fixture `two_threads`.
"""

import functools
import gc
import heapq
import itertools
import logging
import math
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import numpy
import pytest

# Read once, when torch is loaded: threads that wait awake for each other make training many times slower where
# something else keeps the cores busy.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import native
from regard.backends.cpu import library
from regard.kernels.planning import rates

sys.path.insert(0, str(Path(__file__).parent / "pages"))  # tests of three folders import the module there

CONFORMANCE = ("random problems", "computed", "wrong")
"""What test_conformance.py counts."""
STATED = itertools.count(-1, -1)
"""Numbers of times that prices were stated: memos of choices are kept by `rates.times_saved`."""
PACKAGE = str(Path(regard.__file__).parent) + os.sep
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2


def pytest_configure() -> None:
    gc.disable()  # until all is imported and collected: nothing of that is ever freed
    # A shell that runs the tests in the background has them ignore Ctrl-C, and what they start inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check_variant()
    # Also for the processes that tests start; many threads on small tensors are slower than few.
    os.environ.setdefault("OMP_NUM_THREADS", str(THREADS))
    torch.set_num_threads(min(THREADS, torch.get_num_threads()))


def check_variant() -> None:
    """Refuse a variant of the native code that does not run here: all tests of native code would be skipped."""
    if os.environ.get("REGARD_NATIVE", "off") not in ("", "off") and not native.available():
        raise pytest.UsageError(str(native.why_not()))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow the combinations of parameters that the marker `covering` leaves to `make test-all`."""
    groups: defaultdict[object, list[tuple[pytest.Item, dict[str, object]]]] = defaultdict(list)
    strengths = {}
    for item in items:
        if marker := item.get_closest_marker("covering"):
            group, choices = grouped_choices(item, **marker.kwargs)
            groups[group].append((item, choices))
            strengths[group] = marker.kwargs.get("strength", 1)
    for group, members in groups.items():
        chosen = covering_rows([choices for _, choices in members], strengths[group])
        for index, (item, _) in enumerate(members):
            if index not in chosen:
                item.add_marker("slow")


def grouped_choices(item: Any, strength: int = 1, within: Sequence[str] = ()) -> tuple[object, dict[str, object]]:
    """The test with its parameters in `within`, and the other parameters; a `case` is a parameter for each field."""
    choices: dict[str, object] = {}
    for name, value in item.callspec.params.items():
        if name == "case" and is_dataclass(value):
            choices |= {field.name: getattr(value, field.name) for field in fields(value)}
        else:
            choices[name] = value if isinstance(value, str) else id(value)
    group = item.parent.nodeid, item.originalname, *(choices.pop(name) for name in within)
    return group, choices


def covering_rows(rows: Sequence[dict[str, Any]], strength: int) -> set[int]:
    """The indices of a few rows that hold any `strength` choices of different names which all rows hold together.

    Greedy: always the row with the most choices that are not yet held.
    """
    targets = [set(itertools.combinations(row.items(), min(strength, len(row)))) for row in rows]
    missing = set().union(*targets)
    chosen: set[int] = set()
    # A gain only shrinks: a row whose gain is still as large as the next one's is the best.
    gains = [(-len(target), index) for index, target in enumerate(targets)]
    heapq.heapify(gains)
    while missing:
        _, index = heapq.heappop(gains)
        gain = -len(targets[index] & missing), index
        if gains and gain > gains[0]:
            heapq.heappush(gains, gain)
        else:
            chosen.add(index)
            missing -= targets[index]
    return chosen


@pytest.fixture(scope="session")
def covering() -> Callable[[Sequence[dict[str, Any]], int], set[int]]:
    """`covering_rows`, for tests that loop over many cases."""
    return covering_rows


@pytest.fixture(scope="session")
def assert_all() -> Callable[[Callable[..., None], Iterable[tuple[Any, Any]]], None]:
    """Check pairs of a kernel and a case one after the other, and report the faults of all of them.

    A test for each pair would take as much time around it as in it.
    """

    def check_all(check: Callable[..., None], pairs: Iterable[tuple[Any, Any]]) -> None:
        faults, pairs = [], list(pairs)
        assert pairs, "there is nothing to check"
        for kernel, case in pairs:
            try:
                check(kernel, case)
            except Exception as error:  # a kernel that fails is wrong, too; the others go on
                faults.append(f"kernel {kernel.name!r} on the case {case.id}: {type(error).__name__}: {error}")
        assert not faults, f"{len(faults)} faults in {len(pairs)} checks:\n" + "\n".join(faults)

    return check_all


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Computes on two threads: for code that shares its work among threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def priced_as(monkeypatch) -> Callable[..., None]:
    """A function that has kernels chosen as on a processor, a key of the tables of rates, with a native variant.

    A choice then follows from what the test states: not from what is measured or runs here. What is chosen is computed
    by the native code in use; where there is none, there is none to choose either.
    """

    def state(processor: str, variant: str) -> None:
        chosen = variant if native.available() else None
        stated = rates.RatesInUse(rates.default_rates("cpu", chosen, processor), f"those of {processor} with {chosen}")
        monkeypatch.setattr(rates, "_rates_in_use", lambda *key: stated)
        monkeypatch.setattr(rates, "times_saved", next(STATED))
        for module in (native, library):
            monkeypatch.setattr(module, "variant_in_use", lambda: chosen)

    return state


@pytest.fixture(autouse=True)
def seeds() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.default_generator.manual_seed(0)
    # Before CUDA is initialised torch.manual_seed would store a traceback for it in each test, which takes longer than
    # most tests.
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)


@contextmanager
def loaded_python(*modules: str) -> Iterator[list[str]]:
    """How a command begins that runs `-c PROGRAM` or a file in a new process that has loaded torch and modules."""
    if not hasattr(os, "pidfd_open"):  # not Linux
        yield [sys.executable]
        return
    script = str(Path(__file__).with_name("warm_python.py"))
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path := f"{folder}/socket")
        listener.listen()
        command = [sys.executable, script, str(listener.fileno()), *modules]
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONIOENCODING": "utf-8"},
            pass_fds=[listener.fileno()],
            start_new_session=True,  # Ctrl-C is for the tests
        ):
            yield [sys.executable, "-IS", script, path]


@pytest.fixture(scope="session")
def warm_python() -> Iterator[list[str]]:
    """How a command begins that runs `-c PROGRAM` or a file in a new process that has loaded torch already.

    For programs that regard's modules, and not Python's options or the loading of torch, are tested by.
    """
    with loaded_python() as command:
        yield command


@pytest.fixture(scope="session")
def warm_training() -> Iterator[list[str]]:
    """As `warm_python`, with what a training loads besides torch: ten seconds of a core for each process."""
    with loaded_python("lightning.pytorch", "torch._dynamo", "torch.utils.tensorboard") as command:
        yield command


class RecordHandler(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def logged() -> Iterator[list[logging.LogRecord]]:
    """What is logged, by loggers that do not propagate too.

    pytest's own fixture for this, `caplog`, is off (`-p no:logging`): it adds a handler to each of torch's loggers six
    times a test, which takes longer than most tests.
    """
    handler = RecordHandler()
    every = [logging.root, *logging.root.manager.loggerDict.values()]
    loggers = [one for one in every if isinstance(one, logging.Logger) and (one is logging.root or not one.propagate)]
    for logger in loggers:
        logger.addHandler(handler)
    yield handler.records
    for logger in loggers:
        logger.removeHandler(handler)


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


class LargestStorage(TorchDispatchMode):
    """While it is entered, `bytes` becomes the size of the largest storage of which an operator returned a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


@pytest.fixture
def largest_storage() -> LargestStorage:
    """Tells how much memory one tensor took."""
    return LargestStorage()


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
