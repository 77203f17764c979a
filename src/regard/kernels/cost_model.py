"""Cost model of the kernel choice: rates of the machine, measured or default, and unit costs of the kernels' work.

A kernel's `cost` counts flops, bytes, calls and passes; a pass is the time of an element-wise operator for one number
in the cache. `Rates` has the number of each per second, by default for the kind of device, the vector instructions that
torch uses and the variant of the native code. `measure` measures them by benchmarks that resemble the kernels' work.
Prices are in three places: the rates in the tables below or measured; the unit costs that kernels share, below; and
the constants at the top of a kernel's file for what it alone does (`PAIR` and `CALLS` of cpu_flash).
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
    """Operations per second of one thread, memory bandwidths, and the overhead of a call.

    flops: of torch's matrix products in float32; other dtypes are scaled by `DTYPES`. native: flops of native code, in
    any dtype. passes: numbers that an element-wise operator reads and writes in the cache. moved: bytes of keys and
    values read from main memory, all threads together. fresh: bytes of newly allocated memory, all threads together.
    call: seconds of overhead of one call of a torch operator. Of the last three the defaults are those of every CPU.
    """

    flops: float
    native: float
    passes: float
    moved: float = 1e10
    fresh: float = 2.5e9
    call: float = 2.5e-6

    def seconds(self, cost: Cost, dtype: torch.dtype, threads: int | None = None) -> float:
        """Predicted seconds of a forward pass of this cost on `threads` threads, by default all of torch's."""
        threads = threads or torch.get_num_threads()
        flops = self.flops * DTYPES.get(dtype, 1.0) * threads
        return (
            cost.flops / flops
            + cost.native / (self.native * threads)
            + cost.passes / (self.passes * threads)
            + cost.moved / self.moved
            + (cost.bytes / self.fresh if cost.bytes > REUSED_BYTES else 0.0)
            + cost.calls * self.call
        )


DEFAULT_NATIVE = {"avx512": 1e11, "avx2": 6.5e10, "neon": 4e10, "plain": 2e10}
"""Flops a second of each variant of the native code. Measured on Cascade Lake, but for neon, which is estimated."""
DEFAULT_TORCH = {"AVX512": (8e10, 1e10), "AVX2": (4e10, 7.5e9), "DEFAULT": (2e10, 2e9)}
"""Flops and passes a second by the vector instructions that torch uses, as torch names them. Measured likewise."""
DEFAULT_OTHER_TORCH = 4e10, 7.5e9
"""The same for other instruction sets, such as ARM's: estimated."""
DEFAULT_GPU = Rates(flops=3e13, native=3e13, passes=5e11, moved=2e12, fresh=5e11, call=6e-6)
"""A data-centre GPU, estimated: one call takes as long as 10⁸ flops, so that few calls are what matters."""


def default_rates(device: str = "cpu", native_variant: str | None = None, capability: str | None = None) -> Rates:
    """Rates assumed for a kind of device that was not measured.

    device: as `torch.device.type`. native_variant: of the native code, None where there is none. capability: the vector
    instructions that torch uses, as `torch.backends.cpu.get_cpu_capability` names them; without it those in use here.
    """
    if device != "cpu":
        return DEFAULT_GPU
    capability = torch.backends.cpu.get_cpu_capability() if capability is None else capability
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    flops, passes = DEFAULT_OTHER_TORCH if is_arm else DEFAULT_TORCH.get(capability, DEFAULT_OTHER_TORCH)
    return Rates(flops=flops, native=DEFAULT_NATIVE.get(native_variant or "", flops), passes=passes)


REUSED_BYTES = 2**25
"""The bytes that the allocator reuses; where a problem takes more, the system has to clear new pages."""
DTYPES = {torch.float32: 1.0, torch.float64: 0.5, torch.bfloat16: 1.0, torch.float16: 0.7}
"""Speed of matrix products in a dtype relative to float32: approximate, the same for all kernels and machines."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The properties of a machine that its rates depend on, stored with measured rates."""

    processor: str
    threads: int
    torch: str
    native: str

    @classmethod
    def here(cls) -> Machine:
        """The current machine and number of threads."""
        return cls(_processor(), torch.get_num_threads(), str(torch.__version__), native.variant_in_use() or "none")

    def differences(self, other: Machine) -> str:
        """The properties that differ from another machine's, as text; empty if none does."""
        own, others = asdict(self), asdict(other)
        return ", ".join(f"{name} {others[name]}, now {own[name]}" for name in own if own[name] != others[name])


@dataclass(frozen=True, slots=True)
class RatesInUse:
    """The rates that kernels are chosen by, and a description of their origin."""

    rates: Rates
    origin: str


def cache_file() -> Path:
    """Path of the measured rates: calibration.json in regard's folder of the user's cache directory."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "regard" / "calibration.json"


def predicted_seconds(cost: Cost, problem: Problem) -> float:
    """Predicted seconds of a forward pass of this cost on the problem's device."""
    return seconds_on(problem.value.device.type, cost, problem.value.dtype)


def seconds_on(device: str, cost: Cost, dtype: torch.dtype) -> float:
    """Predicted seconds of a forward pass of this cost on a kind of device, `torch.device.type`."""
    if device != "cpu":
        return default_rates(device).seconds(cost, dtype, threads=1)
    return rates_in_use().rates.seconds(cost, dtype)


def rates_in_use() -> RatesInUse:
    """The rates of the CPU in use, measured or default, and their origin; the file is read once for a `rates_key`."""
    return _rates_in_use(*rates_key())


times_saved = 0
"""How often `save_rates` has saved rates."""


def rates_key() -> tuple[int, str | None, int]:
    """Number of threads, variant of the native code, and how often rates were saved: memo key of predicted times."""
    return torch.get_num_threads(), native.variant_in_use(), times_saved


def choice_key(problem: Problem) -> tuple:
    """What the choice of a kernel depends on beside the sizes and the mask, by which `memoize` remembers it."""
    query, value = problem.pairs.query, problem.value
    kinds = value.dtype, query.shape[-1], value.shape[-1], type(problem.bias), type(problem.pairs)
    return (*kinds, problem.softcap is None, problem.dropout is None, *rates_key())


@cache
def _rates_in_use(threads: int, native_variant: str | None, times_saved: int) -> RatesInUse:
    defaults = default_rates("cpu", native_variant)
    try:
        path = cache_file()
        measured, machine = load_rates(path)
    except FileNotFoundError:
        return RatesInUse(defaults, f"defaults: nothing was measured here; {MEASURE}")
    except (OSError, RuntimeError, ConfigurationError) as error:  # damaged, closed to us, no home: never in the way
        return RatesInUse(defaults, f"defaults: {error}")
    if changed := Machine.here().differences(machine):
        return RatesInUse(defaults, f"defaults: {path} was measured on another machine ({changed}); {MEASURE} anew")
    return RatesInUse(measured, f"measured here, from {path}")


def load_rates(path: Path) -> tuple[Rates, Machine]:
    """Load the rates in a file, and the machine that they were measured on.

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


def make_folder(path: Path) -> None:
    """Make the folder of a file and check that it is writable, so that a failure is reported before measuring.

    Raises:
        ConfigurationError: it cannot be made, or not be written to.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise _unwritten(path, error) from error


def save_rates(measured: Rates, path: Path) -> None:
    """Save rates of this machine to a file, atomically; kernels are chosen by them from the next call on.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    global times_saved
    make_folder(path)
    text = json.dumps({"machine": asdict(Machine.here()), "rates": asdict(measured)}, indent=2) + "\n"
    beside = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        beside.write_text(text, "utf-8")
        beside.replace(path)
    except OSError as error:
        raise _unwritten(path, error) from error
    finally:
        beside.unlink(missing_ok=True)
    times_saved += 1


def _unwritten(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"cannot write {path}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that can be written to"
    )


@cache
def _processor() -> str:
    """The processor's name, the vector instructions that torch uses, and the number of CPUs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"


EXPONENTIALS = 2.0
"""Passes per pair in torch's flash kernel, in addition to its products."""
BLOCKWISE = 8.0
"""Passes per pair in the same kernel when it is called for few rows, whose products are narrower."""
ROW = 1000.0
"""Passes per row, up to OVERHEAD_ROWS rows, of a dense kernel for one batch and head, in addition to its products."""
OVERHEAD_ROWS = 32
"""The number of rows of a rectangle that have the overhead ROW; further rows have none."""
OPERATOR = 100.0
"""Overhead of one of our operators, in calls: flattening, checking and rebuilding the problem."""
TRAINING = 2.0
"""The factor on OPERATOR if a gradient is required."""
RESULT = 10.0
"""Passes per number of the output of one of our operators: checked, merged, copied."""
TILEWISE = 12.0
"""Passes per pair in the online softmax of tiles: maximum, difference, exponential, sum."""
WEIGHTS = 45.0
"""Passes per pair where all weights are in memory at once."""
SELECT = 40.0
"""Passes per number selected by a boolean, which torch does not vectorise."""
MASK = 30.0
"""Passes per pair on which a mask is evaluated, once for equal batches and heads, and converted to a float."""
VALUE = 80.0
"""Passes per pair on which a bias is evaluated, once for equal batches and heads."""
CAP = 25.0
"""Passes per pair for softcap, a hyperbolic tangent."""
DROP = 20.0
"""Passes per pair for dropout."""
FEATURE = 28.0
"""Passes per feature and pair of an additive score in plain torch: a sum, a tangent, a product."""
SKIPPED = 512
"""Number of keys in the blocks that torch's causal kernel skips."""
CACHE = 2**22
"""Bytes of keys and values that are assumed to fit in the processor's cache."""


def operator_calls(problem: Problem) -> float:
    """Overhead of one of our operators, in torch calls; with a gradient it is larger by the factor TRAINING."""
    return OPERATOR * (TRAINING if problem.inputs_require_grad() else 1.0)


def total_width(problem: Problem) -> int:
    """Key dim plus value dim."""
    return problem.pairs.query.shape[-1] + problem.value.shape[-1]


def torch_flash_width(problem: Problem) -> int:
    """Key dim plus value dim in torch's flash kernel, which pads both to the larger one."""
    return 2 * max(problem.pairs.query.shape[-1], problem.value.shape[-1])


def startup_passes(rows: int, rectangles: float) -> float:
    """Overhead of dense rectangles of so many rows, in passes."""
    return ROW * min(rows, OVERHEAD_ROWS) * rectangles


def bytes_read(problem: Problem, *, heads: int | None = None, again: float = 1.0) -> float:
    """Bytes of keys and values that are read from main memory; 0 where they fit in the cache.

    heads: the number of batches times heads that read them, by default the key heads' own. again: how often each reads.
    """
    value = problem.value
    size = value.element_size() * problem.keys * total_width(problem)
    held = size * value.shape[:-2].numel()
    return again * size * (heads or value.shape[:-2].numel()) if held > CACHE else 0.0


def torch_flash_cost(problem: Problem, *, causal: bool) -> tuple[float, float, float]:
    """Flops, passes and bytes moved of torch's flash kernel over all pairs, or over the tiles that is_causal leaves."""
    pairs, leading = problem.weights_shape.numel(), problem.weights_shape[:-2].numel()
    share = min(0.5 + SKIPPED / (2 * problem.queries), 1.0) if causal and problem.queries else 1.0
    passes = EXPONENTIALS * pairs * share + startup_passes(problem.queries, leading)
    return 2.0 * pairs * share * torch_flash_width(problem), passes, bytes_read(problem, heads=leading)


Work = Callable[[], object]

BUDGET = 10.0
"""Seconds that are spent on all measurements together."""
MIN_ROUNDS = 3
"""The least number of rounds."""
LARGE = 2**25
"""Numbers, 128 MiB of float32, that exceed every cache."""


def measure(budget: float = BUDGET, large: int = LARGE) -> Rates:
    """Measure the rates of this machine with torch's current number of threads, for `budget` seconds at least.

    The benchmarks run in turn, so that all meet the same disturbances; the lower quartile of the rounds counts, since
    disturbances only add time. large: numbers read from main memory, a multiple of 1024; twice as many are allocated.
    """
    threads = torch.get_num_threads()
    with torch.no_grad():
        (product, flops), (softmax, passes), (decoding, moved) = _products(), _passes(), _moved(large)
        (attending, attended) = _native()
        new, again = _fresh(large)
        products, softmaxes, natively, decoded, taken, written, calls = time_in_turn(
            [_repeated(product, 16), _repeated(softmax, 16), attending, decoding, new, again, _repeated(_call(), 1000)],
            budget,
        )
    return Rates(
        flops=16 * flops / products / threads,
        native=attended / natively / threads,
        passes=16 * passes / softmaxes / threads,
        moved=moved / decoded,
        fresh=4.0 * large / max(taken - written, written / 100),  # where it costs nothing, noise would make it negative
        call=calls / 1000,
    )


def time_in_turn(works: Sequence[Work], budget: float) -> list[float]:
    """Seconds of each work: the lower quartile over rounds in which each runs once."""
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


def _repeated(work: Work, calls: int) -> Work:
    """A work repeated `calls` times."""

    def often() -> None:
        for _ in range(calls):
            work()

    return often


def _products() -> tuple[Work, float]:
    """Benchmark of `flops`: matrix products of 8 heads in blocks as the dense kernel has them; and their flops."""
    query, key = torch.rand(8, 128, 64), torch.rand(8, 512, 64)
    scores = torch.empty(8, 128, 512)
    return lambda: torch.matmul(query, key.mT, out=scores), 2.0 * scores.numel() * query.shape[-1]


def _native() -> tuple[Work, float]:
    """Benchmark of `native`: native attention of 8 heads, and its flops; torch's products without native code."""
    if not native.available():
        return _products()
    query, key, value = torch.rand(3, 1, 8, 1024, 64).unbind()
    first, runs = np.arange(17), np.tile(np.array([[0, 1024, -1]]), (16, 1))
    tiles = native.FlashTiles(first, runs, np.zeros((1, 1, 1, 64), dtype=np.uint64))
    return native.FlashProblem(query, key, value, 0.125, tiles).forward, 4.0 * 8 * 1024 * 1024 * 64


def _passes() -> tuple[Work, float]:
    """Benchmark of `passes`: the online softmax of one tile, from maximum to sum; and its number of passes."""
    scores = torch.rand(8, 128, 256)
    weights = torch.empty_like(scores)

    def softmax() -> None:
        torch.sub(scores, scores.amax(-1, keepdim=True), out=weights)
        weights.mul_(1.5).exp2_().sum(-1)

    return softmax, 5.0 * scores.numel()


def _moved(large: int) -> tuple[Work, float]:
    """Benchmark of `moved`: one query for each of 8 heads over more keys than caches store; and the keys' bytes."""
    query, key = torch.rand(8, 1, 128), torch.rand(8, large // 1024, 128)
    return lambda: query @ key.mT, 4.0 * key.numel()


def _fresh(large: int) -> tuple[Work, Work]:
    """Benchmarks of `fresh`: a sum into newly allocated memory, and the same into existing memory."""
    numbers, there = torch.zeros(large), torch.zeros(large)
    return lambda: numbers + 1, lambda: torch.add(numbers, 1, out=there)


def _call() -> Work:
    """Benchmark of `call`: a slice and a sum of a few numbers."""
    few, other = torch.zeros(8), torch.zeros(4)
    return lambda: few[:4] + other
