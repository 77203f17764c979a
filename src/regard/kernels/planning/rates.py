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

from ... import native
from ...backends.cpu.library import PAIRED
from ...core.problem import Problem
from ...errors import ConfigurationError
from ..base import Cost, FlashWork

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
PAIRED_PRODUCTS = 1.9
"""How many times more products they compute in a second then."""


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
