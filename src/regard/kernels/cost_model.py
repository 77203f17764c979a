"""Cost model of the kernel choice: rates of the machine, measured or default, and unit costs of the kernels' work.

A kernel's `cost` counts flops, bytes, calls and passes; a pass is the time of an element-wise operator for one number
in the cache. `Rates` has the number of each per second, by default for the kind of device, the vector instructions that
torch uses and the variant of the native code. `calibration.measure` measures them on the kernels themselves. Prices are
in three places: the rates in the tables below or measured; the unit costs that kernels share, below; and the constants
at the top of a kernel's file for what it alone does. The choice of a kernel, `explain` and `regard.advise` read them
here; for linear attention, which has no choice, `regard.advise` has prices of its own in advisor/prices.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import torch

from .. import native
from ..biases.base import TensorBias
from ..biases.relative import RelativeBias
from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import BACKWARD, Cost, FlashWork

MEASURE = "`regard bench --calibrate` measures them"


@dataclass(frozen=True, slots=True)
class FlashRates:
    """Rates of one flash kernel in one dtype, of one thread.

    flops, pairs, packed, streamed: how much of each kind of `FlashWork` is done in a second, of keys and values in the
    cache. backward: seconds of the backward pass for one of the forward pass: five matrix products for two (Dao 2023,
    arXiv 2307.08691), and whatever they reach of its rate. tiles: those that the backward pass begins in a second, in
    addition: torch's products of bfloat16 take long to begin. moved: bytes of keys and values that are streamed from
    main memory in a second, by all threads together.
    """

    flops: float
    pairs: float
    packed: float
    streamed: float
    backward: float = 2.7
    tiles: float = 1e9
    moved: float = 1e10

    def numbers(self) -> list[float]:
        """All rates."""
        return [getattr(self, field.name) for field in fields(self)]

    def seconds(self, work: FlashWork) -> float:
        """Seconds of the forward pass on one thread, without those of `streamed`."""
        return work.flops / self.flops + work.pairs / self.pairs + work.packed / self.packed

    def backward_seconds(self, work: FlashWork) -> float:
        """Seconds of the backward pass on one thread."""
        return self.backward * self.seconds(work) + work.tiles / self.tiles


FLOAT32 = "float32"


@dataclass(frozen=True, slots=True)
class Rates:
    """Operations per second of one thread, memory bandwidths, and the overhead of a call.

    flops: of torch's matrix products in float32. passes: numbers that an element-wise operator reads and writes in the
    cache. torch, native: the flash kernels, by dtype; one that is not there has the rates of float32. moved: bytes read
    from main memory, all threads together. fresh: bytes of newly allocated memory, all threads together. call: seconds
    of overhead of one call of a torch operator. cache: bytes that the processor's cache keeps from call to call. Of the
    last four the defaults are those of every CPU.
    """

    flops: float
    passes: float
    torch: dict[str, FlashRates]
    native: dict[str, FlashRates]
    moved: float = 1e10
    fresh: float = 2.5e9
    call: float = 2.5e-6
    cache: float = 2.0**22

    def seconds(self, cost: Cost, dtype: torch.dtype, threads: int | None = None, *, training: bool = False) -> float:
        """Predicted seconds on `threads` threads, by default all of torch's; in training, forward and backward."""
        threads = threads or torch.get_num_threads()
        wide = dtype if dtype == torch.float64 else torch.float32
        kernels = [
            (self._of(self.torch, dtype), cost.torch),
            (self._of(self.native, dtype), cost.native),
            (self._of(self.torch, wide), FlashWork(streamed=cost.streamed)),
        ]
        slower = self.torch[FLOAT32].flops / self._of(self.torch, dtype).flops if dtype == torch.float64 else 1.0
        other = cost.flops * slower / self.flops + cost.passes / self.passes
        flash = sum(rates.seconds(work) + rates.backward_seconds(work) * training for rates, work in kernels)
        # Keys and values that are read once arrive from memory while others are multiplied.
        streaming = [rates.moved for rates, work in kernels if work.streamed or (work.packed and work is cost.native)]
        moved = cost.moved / min(streaming, default=self.moved) if cost.moved > self.cache else 0.0
        read = max(sum(work.streamed / rates.streamed for rates, work in kernels) / threads, moved)
        fresh = cost.bytes / self.fresh if cost.bytes >= REUSED_BYTES else 0.0
        return (
            (flash + other * (1 + cost.backward * training)) / threads
            + (read + fresh) * (1 + cost.backward * training)
            + (cost.calls * (1 + training) + cost.gradient * training) * self.call
        )

    def numbers(self) -> list[float]:
        """All rates."""
        flash = [rates for name in FLASH_KERNELS for rates in getattr(self, name).values()]
        return [getattr(self, name) for name in NUMBERS] + [number for rates in flash for number in rates.numbers()]

    @staticmethod
    def _of(by_dtype: dict[str, FlashRates], dtype: torch.dtype) -> FlashRates:
        return by_dtype.get(str(dtype).removeprefix("torch."), by_dtype[FLOAT32])


FLASH_KERNELS = ("torch", "native")
NUMBERS = tuple(field.name for field in fields(Rates) if field.name not in FLASH_KERNELS)


def _scaled(rates: FlashRates, factor: float) -> FlashRates:
    """The same at another speed."""
    return replace(
        rates,
        flops=factor * rates.flops,
        pairs=factor * rates.pairs,
        packed=factor * rates.packed,
        streamed=factor * rates.streamed,
    )


DEFAULT_NATIVE = {
    "avx512": FlashRates(flops=9.5e10, pairs=3e9, packed=2e9, streamed=2.6e9),
    "avx2": FlashRates(flops=5.5e10, pairs=2e9, packed=1.6e9, streamed=2.4e9),
    "neon": FlashRates(flops=4e10, pairs=1.5e9, packed=1.2e9, streamed=8e8),
    "plain": FlashRates(flops=1.7e10, pairs=7e8, packed=1e9, streamed=2e9),
}
"""The native flash kernel, of each variant. Measured on Cascade Lake, but for neon, which is estimated."""
DEFAULT_FLASH = {
    "float32": FlashRates(flops=1.3e11, pairs=9e8, packed=2.5e9, streamed=2e9, backward=2.9),
    "float64": FlashRates(flops=4.5e10, pairs=5e8, packed=2e9, streamed=2e9, backward=2.8),
    "bfloat16": FlashRates(flops=1.1e11, pairs=9e8, packed=3e9, streamed=2.5e9, backward=7.5),
    "float16": FlashRates(flops=1.2e11, pairs=9e8, packed=3e9, streamed=2.5e9, backward=60.0),
}
"""Torch's flash kernel with AVX-512, measured likewise."""
ZEN_4, ZEN_5 = "AVX512 on Zen 4", "AVX512 on Zen 5"
"""AMD's processors with AVX-512, where MKL uses half of each vector: families 25, and 26 or later."""
DEFAULT_TORCH = {
    "AVX512": (8e10, 1e10, 1.0),
    "AVX2": (4e10, 7.5e9, 0.5),
    "DEFAULT": (2e10, 2e9, 0.25),
}
"""By the vector instructions that torch uses, as torch names them: flops and passes a second, and the speed of its
flash kernel by that with AVX-512. Measured likewise, but for the last."""
DEFAULT_OTHER_TORCH = DEFAULT_TORCH["AVX2"]
"""The same for other instruction sets, such as ARM's: estimated."""
MEASURED = {
    ZEN_5: Rates(
        flops=9.9e10,
        passes=1.4e10,
        torch={
            "float32": FlashRates(1.0e11, 2.8e9, 2.4e10, 2.0e10, 2.4, moved=1.3e10),
            "float64": FlashRates(6.1e10, 5.5e8, 2.5e9, 8.5e9, 2.8, moved=1.8e10),
            "bfloat16": FlashRates(1.1e11, 2.1e9, 8.2e9, 7.8e9, 1.9, tiles=26000.0, moved=6.9e9),
            "float16": FlashRates(1.0e11, 7.5e8, 9.3e8, 9.8e8, 12.0, moved=2.1e9),
        },
        native={},
        moved=4e10,
        fresh=2.7e9,
        call=1.8e-6,
        cache=2.0**24,
    ),
    ZEN_4: Rates(
        flops=9.1e10,
        passes=8.8e9,
        torch={
            "float32": FlashRates(1.0e11, 1.8e9, 1.6e10, 1.1e10, 2.5, moved=7.2e9),
            "float64": FlashRates(5.3e10, 3.2e8, 1.5e9, 4.5e9, 2.9, moved=8.8e9),
            "bfloat16": FlashRates(1.0e11, 1.4e9, 7.0e9, 5.0e9, 2.2, tiles=22000.0, moved=5.4e9),
            "float16": FlashRates(1.0e11, 5.7e8, 7.6e8, 7.7e8, 12.0, moved=1.8e9),
        },
        native={},
        moved=3.2e10,
        fresh=2.3e9,
        call=2.4e-6,
        cache=2.0**24,
    ),
}
MEASURED_NATIVE = {
    ZEN_5: {
        "avx512": {
            "float32": FlashRates(2.3e11, 6.0e9, 1.1e10, 2.0e10, 2.4, moved=2.9e10),
            "bfloat16": FlashRates(2.4e11, 7.1e9, 1.1e10, 3.3e10, 2.5, moved=3.3e10),
            "float16": FlashRates(2.3e11, 7.1e9, 1.2e10, 3.4e10, 2.4, moved=2.9e10),
        },
        "avx512bf16": {
            "float32": FlashRates(2.4e11, 5.3e9, 1.1e10, 2.1e10, 2.5, moved=2.9e10),
            "bfloat16": FlashRates(4.8e11, 4.8e9, 1.6e10, 3.2e10, 2.6, moved=3.2e10),
            "float16": FlashRates(2.4e11, 6.4e9, 1.2e10, 3.7e10, 2.5, moved=3.1e10),
        },
        "avx2": {
            "float32": FlashRates(1.1e11, 4.0e9, 1.1e10, 1.7e10, 2.5, moved=2.3e10),
            "bfloat16": FlashRates(1.1e11, 4.2e9, 8.0e9, 1.6e10, 2.6, moved=2.3e10),
            "float16": FlashRates(1.1e11, 4.5e9, 8.9e9, 2.3e10, 2.5, moved=2.7e10),
        },
        "plain": {
            "float32": FlashRates(4.4e10, 1.5e9, 5.0e9, 1.6e10, 2.5, moved=1.8e10),
            "bfloat16": FlashRates(4.4e10, 1.4e9, 4.0e9, 7.0e9, 2.5, moved=1.0e10),
            "float16": FlashRates(4.4e10, 1.4e9, 2.7e9, 3.3e9, 2.5, moved=5.6e9),
        },
    },
    ZEN_4: {
        "avx512": {
            "float32": FlashRates(1.1e11, 3.3e9, 6.7e9, 1.8e10, 2.3, moved=1.8e10),
            "bfloat16": FlashRates(1.1e11, 3.4e9, 6.2e9, 2.6e10, 2.4, moved=2.5e10),
            "float16": FlashRates(1.1e11, 3.9e9, 6.6e9, 2.6e10, 2.4, moved=2.5e10),
        },
        "avx512bf16": {
            "float32": FlashRates(1.1e11, 3.2e9, 6.7e9, 1.8e10, 2.4, moved=1.8e10),
            "bfloat16": FlashRates(2.2e11, 2.7e9, 9.0e9, 2.2e10, 2.6, moved=2.5e10),
            "float16": FlashRates(1.1e11, 3.8e9, 6.8e9, 2.8e10, 2.4, moved=2.8e10),
        },
        "avx2": {
            "float32": FlashRates(9.8e10, 3.8e9, 6.7e9, 1.1e10, 2.5, moved=1.2e10),
            "bfloat16": FlashRates(9.6e10, 3.5e9, 4.8e9, 9.3e9, 2.5, moved=1.5e10),
            "float16": FlashRates(1.0e11, 3.4e9, 5.4e9, 1.0e10, 2.5, moved=1.6e10),
        },
        "plain": {
            "float32": FlashRates(3.4e10, 1.4e9, 4.5e9, 7.3e9, 2.4, moved=1.7e10),
            "bfloat16": FlashRates(3.5e10, 1.2e9, 3.2e9, 4.9e9, 2.5, moved=7.4e9),
            "float16": FlashRates(3.4e10, 1.2e9, 2.1e9, 2.4e9, 2.5, moved=4.2e9),
        },
    },
}
"""Rates of these processors, and of the native code there, by variant and dtype: as `calibration.measure` found them on
one thread, rounded to two digits."""
GPU_FLASH = FlashRates(flops=3e13, pairs=2e12, packed=1e13, streamed=5e12, backward=3.0, moved=2e12)
DEFAULT_GPU = Rates(
    flops=3e13,
    passes=5e11,
    torch={FLOAT32: GPU_FLASH, **dict.fromkeys(("bfloat16", "float16"), replace(GPU_FLASH, flops=3e14))},
    native={FLOAT32: GPU_FLASH},
    moved=2e12,
    fresh=5e11,
    call=6e-6,
)
"""A data-centre GPU, estimated: one call takes as long as 10⁸ flops, so that few calls are what matters."""


def default_rates(device: str = "cpu", native_variant: str | None = None, capability: str | None = None) -> Rates:
    """Rates assumed for a kind of device that was not measured.

    device: as `torch.device.type`. native_variant: of the native code, None where there is none. capability: the vector
    instructions that torch uses, a key of DEFAULT_TORCH or MEASURED; without it those in use here.
    """
    if device != "cpu":
        return DEFAULT_GPU
    capability = _torch_instructions() if capability is None else capability
    if capability in MEASURED:
        rates = MEASURED[capability]
        return replace(rates, native=MEASURED_NATIVE[capability].get(native_variant or "", rates.torch))
    is_arm = platform.machine().lower() in ("aarch64", "arm64")
    flops, passes, speed = DEFAULT_OTHER_TORCH if is_arm else DEFAULT_TORCH.get(capability, DEFAULT_OTHER_TORCH)
    flash = {dtype: _scaled(rates, speed) for dtype, rates in DEFAULT_FLASH.items()}
    variant = native_variant or ""
    own = DEFAULT_NATIVE.get(variant.removesuffix(PAIRED), flash[FLOAT32])
    half = replace(own, streamed=HALF * own.streamed)
    pairs = replace(half, flops=PAIRED_PRODUCTS * half.flops) if variant.endswith(PAIRED) else half
    return Rates(flops, passes, flash, {FLOAT32: own, "bfloat16": pairs, "float16": half})


HALF = 1.6
"""How many times more numbers of 16 bits are streamed than of 32: they are half the bytes, and widened."""
PAIRED = "bf16"
"""How the names of the native variants end that multiply bfloat16 in pairs; in all else they are as those without."""
PAIRED_PRODUCTS = 1.9
"""How many times more products they compute in a second then."""


def multiplies_in_pairs(native_variant: str | None, dtype: torch.dtype) -> bool:
    """Whether a variant of the native code multiplies numbers of a dtype in pairs."""
    return dtype == torch.bfloat16 and (native_variant or "").endswith(PAIRED)


REUSED_BYTES = 2**25
"""From so many bytes on the allocator reuses none: the system has to clear new pages."""


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
    """Predicted seconds on the problem's device: of the forward pass, and of the backward if a gradient is required."""
    value = problem.value
    return seconds_on(value.device.type, cost, value.dtype, training=problem.inputs_require_grad())


def seconds_on(device: str, cost: Cost, dtype: torch.dtype, *, training: bool = False) -> float:
    """Predicted seconds of this cost on a kind of device, `torch.device.type`; in training, forward and backward."""
    if device != "cpu":
        return default_rates(device).seconds(cost, dtype, threads=1, training=training)
    return rates_in_use().rates.seconds(cost, dtype, training=training)


def rates_in_use() -> RatesInUse:
    """The rates of the CPU in use, measured or default, and their origin; the file is read once for a `rates_key`."""
    return _rates_in_use(*rates_key())


times_saved = 0
"""How often `save_rates` has saved rates."""


def rates_key() -> tuple[int, str | None, int]:
    """Number of threads, variant of the native code, and how often rates were saved: memo key of predicted times."""
    return torch.get_num_threads(), native.variant_in_use(), times_saved


def part_choice_key(problem: Problem) -> tuple:
    """What the kernel of a part of a mask, or of a block of a ring, depends on beside sizes and mask: `memoize`'s key.

    The key of whole calls is `dispatch._signature`.
    """
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
    try:
        held = json.loads(path.read_text("utf-8"))
        torch_flash, native_flash = (_flash_rates(held["rates"][name]) for name in FLASH_KERNELS)
        numbers = {name: float(held["rates"][name]) for name in NUMBERS}
        measured = Rates(**numbers, torch=torch_flash, native=native_flash)
        stored = held["machine"]
        machine = Machine(str(stored["processor"]), int(stored["threads"]), str(stored["torch"]), str(stored["native"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        measured = machine = None
    if measured is None or machine is None or not all(0 < rate < float("inf") for rate in measured.numbers()):
        raise ConfigurationError(
            f"{path} holds no calibration: it needs a number above 0 for each of {', '.join(NUMBERS)}, those of the "
            f"flash kernels {' and '.join(FLASH_KERNELS)} in each dtype, and the machine that they were measured on; "
            "`regard bench --calibrate` writes it anew"
        )
    return measured, machine


def _flash_rates(by_dtype: dict[str, dict[str, float]]) -> dict[str, FlashRates]:
    """The rates of a flash kernel from a file; those of float32 have to be among them."""
    names = [field.name for field in fields(FlashRates)]
    found = {dtype: FlashRates(**{name: float(rates[name]) for name in names}) for dtype, rates in by_dtype.items()}
    return {FLOAT32: found[FLOAT32], **found}


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
def _torch_instructions() -> str:
    """The vector instructions that torch uses here, and which of AMD's processors has them, as in DEFAULT_TORCH and
    MEASURED.
    """
    capability = torch.backends.cpu.get_cpu_capability()
    with contextlib.suppress(OSError):  # only Linux has it
        processor = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        if capability == "AVX512" and "AuthenticAMD" in processor:
            return ZEN_4 if re.search(r"^cpu family\s*: 25$", processor, re.MULTILINE) else ZEN_5
    return capability


def _processor() -> str:
    """The processor's name, the vector instructions that torch uses, and the number of CPUs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"


ROW = 300.0
"""Passes per row, up to OVERHEAD_ROWS rows, of a dense kernel for one batch and head, in addition to its products."""
TRAINED_STARTUP = 2.0
"""The factor on that overhead in training: the backward pass has more and smaller products."""
OVERHEAD_ROWS = 32
"""The number of rows of a rectangle that have the overhead ROW; further rows have none."""
OPERATOR = 35.0
"""Overhead of one of our operators, in calls: flattening, checking and rebuilding the problem."""
RESULT = 3.0
"""Passes per number of the output of one of our operators: checked, merged, copied."""
TILEWISE = 12.0
"""Passes per pair in the online softmax of tiles: maximum, difference, exponential, sum."""
WEIGHTS = 19.0
"""Passes per pair where all weights are in memory at once."""
WIDEN = 3.0
"""Passes per number of 16 bits that is converted to float32."""
SELECT = 18.0
"""Passes per number selected by a boolean, which torch does not vectorise."""
MASK = 30.0
"""Passes per pair on which a mask is evaluated, once for equal batches and heads, and converted to a float."""
VALUE, COPIED_VALUE = 80.0, 2.0
"""Passes per pair on which a bias is evaluated, once for equal batches and heads; and on which its values are copied,
from those of the diagonals or from a tensor."""
CAP = 25.0
"""Passes per pair for softcap, a hyperbolic tangent."""
DROP = 20.0
"""Passes per pair for dropout."""
FEATURE = 28.0
"""Passes per feature and pair of an additive score in plain torch: a sum, a tangent, a product."""
TORCH_BLOCKS = (768, 256), (192, 64), (0, 32)
"""From so many rows on, torch's flash kernel computes blocks of so many."""
TORCH_COLUMNS = 512
"""The keys of its blocks; with a causal mask it skips those that are masked."""
NARROW_PRODUCT = 8.0
"""The columns that a product of torch's with a block of keys takes as long as, in addition to those that it has."""
REREAD, REREAD_WIDENED = 0.25, 0.7
"""The time to read numbers again that are in a core's own cache, of that to read them first; and of 16 bits, which are
widened again."""
MIN_PACKED_ROWS = 16
"""The fewest rows for which torch's products pack keys and values; a few rows read them as they are."""


def heads_per_key(problem: Problem) -> int:
    """Query heads per key head, 1 at least."""
    return max(problem.pairs.query.shape[-3] // max(problem.value.shape[-3], 1), 1) if problem.heads else 1


def total_width(problem: Problem) -> int:
    """Key dim plus value dim."""
    return problem.pairs.query.shape[-1] + problem.value.shape[-1]


def torch_flash_width(problem: Problem) -> int:
    """Key dim plus value dim in torch's flash kernel, which pads both to the larger one."""
    return 2 * max(problem.pairs.query.shape[-1], problem.value.shape[-1])


def startup_passes(rows: int, rectangles: float) -> float:
    """Overhead of dense rectangles of so many rows, in passes."""
    return ROW * min(rows, OVERHEAD_ROWS) * rectangles


def torch_flash_startup(problem: Problem, rows: int, rectangles: float) -> float:
    """`startup_passes` of rectangles whose gradient is by torch's flash kernel too."""
    return startup_passes(rows, rectangles) * (TRAINED_STARTUP if problem.inputs_require_grad() else 1.0)


def bytes_read(problem: Problem, *, again: float = 1.0) -> float:
    """Bytes of keys and values that are read, `again` times; query heads of a group find them in the cache."""
    value = problem.value
    return again * value.element_size() * value.shape[:-2].numel() * problem.keys * total_width(problem)


def torch_flash_work(problem: Problem, pairs: float, rows: int, columns: float | None = None) -> FlashWork:
    """The work of torch's flash kernel over so many pairs, in rectangles of so many rows and columns, by default all.

    Few rows are one block; of more, blocks of 32, 64 or 256 rows pack the keys and values anew.
    """
    width = torch_flash_width(problem)
    height = next(block for least, block in TORCH_BLOCKS if rows >= least)
    many = max(min(height, rows), 1)
    numbers = pairs / many * width
    tiles = pairs / many / max(min(columns or problem.keys, TORCH_COLUMNS), 1)
    few = rows < MIN_PACKED_ROWS
    if few and rows == problem.queries:  # each query head of a group reads the keys, all but the first from the cache
        group = heads_per_key(problem)
        again = REREAD if problem.value.element_size() >= 4 else REREAD_WIDENED
        numbers *= (1 + again * (group - 1)) / group
        if rows == 1 and problem.value.dtype == torch.bfloat16:  # it is doubled: see `without_single_row`
            numbers *= 1 + again
    flops = 2.0 * pairs * width * (1 + NARROW_PRODUCT / max(min(columns or problem.keys, TORCH_COLUMNS), 1))
    return FlashWork(flops, pairs, 0.0 if few else numbers, numbers if few else 0.0, tiles)


def product_work(pairs: float, rows: int, width: int) -> tuple[float, float]:
    """Flops of torch's products over so many pairs, in rectangles of so many rows, and numbers that few rows stream."""
    return 2.0 * pairs * width, pairs / max(rows, 1) * width if rows < MIN_PACKED_ROWS else 0.0


def bias_passes(problem: Problem) -> float:
    """Passes per pair on which the bias is evaluated."""
    return COPIED_VALUE if isinstance(problem.bias, RelativeBias | TensorBias) else VALUE


def evaluated(problem: Problem, passes: float, *, times: int = 2, backward: float = BACKWARD) -> float:
    """The part of `Cost.passes` that evaluating a mask or bias takes.

    In training it is evaluated `times` times in all, whatever the backward pass repeats of the rest. backward:
    `Cost.backward`.
    """
    return passes * times / (1 + backward) if problem.inputs_require_grad() else passes


def widened_numbers(problem: Problem) -> float:
    """Numbers of keys and values that are converted to float32, in new memory: all of those of 16 bits."""
    numbers = problem.value.shape[:-2].numel() * problem.keys * total_width(problem)
    return float(numbers) if problem.value.element_size() < 4 else 0.0


def result_bytes(problem: Problem) -> float:
    """Bytes of fresh memory for the output of torch's operators, whose memory may be used again where it is small."""
    value = problem.value
    size = float(value.element_size() * problem.weights_shape[:-1].numel() * value.shape[-1])
    return size if size >= REUSED_BYTES else 0.0


def widened_bytes(problem: Problem) -> float:
    """Bytes of fresh memory for them: keys and values have one tensor each, whose memory may be used again."""
    size = 4.0 * widened_numbers(problem)
    return size if size / 2 >= REUSED_BYTES else 0.0


def torch_flash_cost(problem: Problem, *, causal: bool) -> Cost:
    """The cost of torch's flash kernel over all pairs, or over the tiles that is_causal leaves."""
    pairs, leading = problem.weights_shape.numel(), problem.weights_shape[:-2].numel()
    share = min(0.5 + TORCH_COLUMNS / (2 * problem.queries), 1.0) if causal and problem.queries else 1.0
    return Cost(
        flops=0.0,
        bytes=result_bytes(problem),
        passes=torch_flash_startup(problem, problem.queries, leading),
        moved=bytes_read(problem),
        torch=torch_flash_work(problem, pairs * share, problem.queries),
    )
