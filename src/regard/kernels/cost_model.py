"""The cost model of the choice between kernels: rates of the machine, measured or defaults, and costs in units of them.

A kernel's `cost` counts flops, bytes, calls and passes; a pass is what an element-wise operator takes for one number in
the cache. `Rates` says how many of each a second has: by default those of the kind of device, of the vector
instructions that torch uses and of the variant of the native code.

`measure` measures the rates of this machine, each by work of the kind that the kernels do.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np
import torch

from .. import native
from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Cost

MEASURE = "`regard bench --calibrate` measures them"


@dataclass(frozen=True, slots=True)
class Rates:
    """What a thread does in a second, and what a call costs.

    flops: of torch's matrix products in float32; other dtypes by their share in `DTYPES`. native: of those in native
    code, whatever the dtype. passes: numbers that an element-wise
    operator reads and writes in the cache. moved: bytes of keys and values that are read from main memory, all threads
    together. fresh: bytes of new memory that the system hands out, all threads together. call: seconds that an operator
    of torch takes beside its work.
    """

    flops: float = 8e10
    native: float = 1e11
    passes: float = 1e10
    moved: float = 1e10
    fresh: float = 2.5e9
    call: float = 2.5e-6

    def seconds(self, cost: Cost, dtype: torch.dtype, threads: int | None = None) -> float:
        """What a cost takes, forward, by so many threads, without a number by all of torch's."""
        threads = threads or torch.get_num_threads()
        flops = self.flops * DTYPES.get(dtype, 1.0) * threads
        return (
            cost.flops / flops
            + cost.native / (self.native * threads)
            + cost.passes / (self.passes * threads)
            + cost.moved / self.moved
            + (cost.bytes / self.fresh if cost.bytes > KEPT else 0.0)
            + cost.calls * self.call
        )


DEFAULT_NATIVE = {"avx512": 1e11, "avx2": 6.5e10, "neon": 4e10, "plain": 2e10}
"""Flops a second of each variant of the native code. Measured on Cascade Lake, but for neon, which is estimated."""
DEFAULT_TORCH = {"AVX512": (8e10, 1e10), "AVX2": (4e10, 7.5e9), "DEFAULT": (2e10, 2e9)}
"""Flops and passes a second by the vector instructions that torch uses, as torch names them. Measured likewise."""
DEFAULT_OTHER_TORCH = 4e10, 7.5e9
"""The same for others, such as those of ARM: estimated."""
DEFAULT_GPU = Rates(flops=3e13, native=3e13, passes=5e11, moved=2e12, fresh=5e11, call=6e-6)
"""A data-centre GPU, estimated: one call takes as long as 10⁸ flops, so that few calls are what matters."""


def default_rates(device: str = "cpu", native_variant: str | None = None, capability: str | None = None) -> Rates:
    """The rates of a kind of device where nothing was measured.

    device: as `torch.device.type`. native_variant: of the native code, None where there is none. capability: the vector
    instructions that torch uses, as `torch.backends.cpu.get_cpu_capability` names them; without it those in use here.
    """
    if device != "cpu":
        return DEFAULT_GPU
    capability = torch.backends.cpu.get_cpu_capability() if capability is None else capability
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    flops, passes = DEFAULT_OTHER_TORCH if is_arm else DEFAULT_TORCH.get(capability, DEFAULT_OTHER_TORCH)
    return Rates(flops=flops, native=DEFAULT_NATIVE.get(native_variant or "", flops), passes=passes)


KEPT = 2**25
"""Bytes that the allocator keeps and hands out again; where a problem takes more, the system has to clear new pages."""
DTYPES = {torch.float32: 1.0, torch.float64: 0.5, torch.bfloat16: 1.0, torch.float16: 0.7}
"""Matrix products in a dtype, for each of float32: rough, and alike for all kernels of this machine."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What rates depend on, and what they are measured for."""

    processor: str
    threads: int
    torch: str
    native: str

    @classmethod
    def here(cls) -> Machine:
        """This one, now."""
        return cls(_processor(), torch.get_num_threads(), str(torch.__version__), _native_variant() or "none")

    def differences(self, other: Machine) -> str:
        """What is different here from another one; empty if nothing is."""
        own, others = asdict(self), asdict(other)
        return ", ".join(f"{name} {others[name]}, now {own[name]}" for name in own if own[name] != others[name])


@dataclass(frozen=True, slots=True)
class InUse:
    """The rates that choices are made by, and in words where they are from."""

    rates: Rates
    origin: str


def cache_file() -> Path:
    """Where measured rates are kept: calibration.json in regard's folder of the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "regard" / "calibration.json"


def predicted_seconds(cost: Cost, problem: Problem) -> float:
    """What a cost takes, forward, on the problem's device."""
    device = problem.value.device.type
    if device != "cpu":
        return default_rates(device).seconds(cost, problem.value.dtype, threads=1)
    return in_use().rates.seconds(cost, problem.value.dtype)


def in_use() -> InUse:
    """The rates of the CPU in use, measured or defaults, and their origin.

    They are looked up once for each number of threads and variant of the native code.
    """
    return _in_use(torch.get_num_threads(), _native_variant())


@cache
def _in_use(threads: int, native_variant: str | None) -> InUse:
    defaults = default_rates("cpu", native_variant)
    try:
        path = cache_file()
        measured, machine = read(path)
    except FileNotFoundError:
        return InUse(defaults, f"defaults: nothing was measured here; {MEASURE}")
    except (OSError, RuntimeError, ConfigurationError) as error:  # damaged, closed to us, no home: never in the way
        return InUse(defaults, f"defaults: {error}")
    if changed := Machine.here().differences(machine):
        return InUse(defaults, f"defaults: {path} was measured on another machine ({changed}); {MEASURE} anew")
    return InUse(measured, f"measured here, from {path}")


def _native_variant() -> str | None:
    return native.variant() if native.available() else None


def read(path: Path) -> tuple[Rates, Machine]:
    """The rates of a file, and the machine that they were measured on.

    Raises:
        ConfigurationError: the file does not hold one number above 0 for each rate, and the machine.
        OSError: it cannot be read.
    """
    names = [field.name for field in fields(Rates)]
    try:
        held = json.loads(path.read_text("utf-8"))
        measured = Rates(**{name: float(held["rates"][name]) for name in names})
        stored = held["machine"]
        machine = Machine(str(stored["processor"]), int(stored["threads"]), str(stored["torch"]), str(stored["native"]))
    except (KeyError, TypeError, ValueError):
        measured = machine = None
    if measured is None or machine is None or not all(0 < rate < float("inf") for rate in asdict(measured).values()):
        raise ConfigurationError(
            f"{path} holds no calibration: it needs a number above 0 for each of {', '.join(names)}, and the machine "
            "that they were measured on; `regard bench --calibrate` writes it anew"
        )
    return measured, machine


def folder_for(path: Path) -> None:
    """Make the folder of a file, so that it can be said at once where that cannot be.

    Raises:
        ConfigurationError: it cannot be made, or not be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritten(path, error) from error


def write(measured: Rates, path: Path) -> None:
    """Keep rates of this machine in a file, whole or not at all; from now on they are in use.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    folder_for(path)
    text = json.dumps({"machine": asdict(Machine.here()), "rates": asdict(measured)}, indent=2) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        beside.unlink(missing_ok=True)
    _in_use.cache_clear()


def _unwritten(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write {path}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written to"
    )


@cache
def _processor() -> str:
    """The processor's name, what torch uses of it, and how many there are."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"


EXPONENTIALS = 2.0
"""A pair in torch's flash kernel, beside its products."""
BLOCKWISE = 8.0
"""A pair in the same kernel where it is given few rows at a time: its products are narrower then."""
ROW = 1000.0
"""A row of the first few that a dense kernel is given for one batch and head, beside its products."""
FEW = 32
"""So many rows are few."""
OPERATOR = 100.0
"""Calls that an operator of our own takes beside its work: the problem taken apart, checked, put together."""
TRAINING = 2.0
"""So many times as many where a gradient is asked for."""
RESULT = 10.0
"""A number of the output on its way through an operator of our own: looked at, merged, copied."""
TILEWISE = 12.0
"""A pair in the online softmax of tiles: its largest score, difference, exponential, sum."""
WEIGHTS = 45.0
"""A pair where all weights stand in memory at once."""
SELECT = 40.0
"""A number that is taken or not by a boolean: torch does that one by one."""
MASK = 30.0
"""A pair that a mask is asked for, once for all batches and heads that are alike; and made a number from a boolean."""
VALUE = 80.0
"""A pair that a bias is asked for, once for all batches and heads that are alike."""
CAP = 25.0
"""The softcap of a pair: a hyperbolic tangent."""
DROP = 20.0
"""The fate of a pair under dropout."""
FEATURE = 28.0
"""A feature of a pair with an additive score, in plain torch: a sum, a tangent, a product."""
SKIPPED = 512
"""Keys that torch's causal kernel skips at a time."""
CACHE = 2**22
"""Bytes up to which keys and values may stay near the processor."""


def operator_calls(problem: Problem) -> float:
    """Calls that an operator of our own takes beside its work; its backward takes more of them than others' does."""
    return OPERATOR * (TRAINING if problem.inputs_require_grad() else 1.0)


def width_of(problem: Problem) -> int:
    """The key's and the value's dims, together."""
    return problem.pairs.query.shape[-1] + problem.value.shape[-1]


def flash_width(problem: Problem) -> int:
    """The same for torch's flash kernel, which has both as wide as the wider one."""
    return 2 * max(problem.pairs.query.shape[-1], problem.value.shape[-1])


def beginnings(rows: int, rectangles: float) -> float:
    """Passes that dense rectangles of so many rows take to begin."""
    return ROW * min(rows, FEW) * rectangles


def bytes_read(problem: Problem, *, heads: int | None = None, again: float = 1.0) -> float:
    """Bytes of keys and values that come from main memory, where they do not stay near the processor.

    heads: batches and heads for each of which they are read; without it each is read for its own. again: how often.
    """
    value = problem.value
    size = value.element_size() * problem.keys * width_of(problem)
    held = size * value.shape[:-2].numel()
    return again * size * (heads or value.shape[:-2].numel()) if held > CACHE else 0.0


def whole(problem: Problem, *, causal: bool) -> tuple[float, float, float]:
    """Flops, passes and bytes moved of torch's flash kernel over all the pairs, or over what it takes of them."""
    pairs, leading = problem.weights_shape.numel(), problem.weights_shape[:-2].numel()
    share = min(0.5 + SKIPPED / (2 * problem.queries), 1.0) if causal and problem.queries else 1.0
    passes = EXPONENTIALS * pairs * share + beginnings(problem.queries, leading)
    return 2.0 * pairs * share * flash_width(problem), passes, bytes_read(problem, heads=leading)


Work = Callable[[], object]

BUDGET = 10.0
"""Seconds that are spent on all measurements together."""
MIN_ROUNDS = 3
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
    while len(rounds) < MIN_ROUNDS or time.perf_counter() - began < budget:
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
