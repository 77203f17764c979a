"""Rates of a machine, measured or default, and the time that they predict for the work of a kernel.

A kernel's `cost` counts flops, bytes, calls and passes; a pass is the time of an element-wise operator for one number
in the cache. `Rates` has the number of each per second, by default for the kind of device, the vector instructions that
torch uses and the variant of the native code (`machine_rates.json`); `calibration.measure` measures them on the kernels
themselves. What a unit of a kernel's work costs in passes or calls is in `unit_prices.json`. The choice of a kernel,
`explain` and `regard.advise` read them here; for linear attention, which has no choice, `regard.advise` has prices of
its own in advisor/prices.py.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import platform
import re
from dataclasses import asdict, dataclass, fields
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from ... import native
from ...core.problem import Problem
from ...errors import ConfigurationError
from ..base import Cost, FlashWork

CALIBRATE = "regard bench --calibrate"


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
    cache. flash: of the flash kernel of each backend, by dtype; a dtype that is not there has the rates of float32, a
    backend those of torch. moved: bytes read from main memory, all threads together. fresh: bytes of newly allocated
    memory, all threads together. call: seconds of overhead of one call of a torch operator. cache: bytes that the
    processor's cache keeps from call to call. Of the last four the defaults are those of every CPU.
    """

    flops: float
    passes: float
    flash: dict[str, dict[str, FlashRates]]
    moved: float = 1e10
    fresh: float = 2.5e9
    call: float = 2.5e-6
    cache: float = 2.0**22

    def seconds(self, cost: Cost, dtype: torch.dtype, threads: int | None = None, *, training: bool = False) -> float:
        """Predicted seconds on `threads` threads, by default all of torch's; in training, forward and backward."""
        threads = threads or torch.get_num_threads()
        wide = dtype if dtype == torch.float64 else torch.float32
        kernels = [(self.of(backend, dtype), work, backend in OVERLAPPING) for backend, work in cost.flash.items()]
        kernels.append((self.of("torch", wide), FlashWork(streamed=cost.streamed), False))
        slower = self.of("torch", torch.float32).flops / self.of("torch", wide).flops
        other = cost.flops * slower / self.flops + cost.passes / self.passes
        flash = sum(rates.seconds(work) + rates.backward_seconds(work) * training for rates, work, _ in kernels)
        # Keys and values that are read once arrive from memory while others are multiplied.
        streaming = [rates.moved for rates, work, packs in kernels if work.streamed or (work.packed and packs)]
        moved = cost.moved / min(streaming, default=self.moved) if cost.moved > self.cache else 0.0
        read = max(sum(work.streamed / rates.streamed for rates, work, _ in kernels) / threads, moved)
        fresh = cost.bytes / self.fresh if cost.bytes >= REUSED_BYTES else 0.0
        return (
            (flash + other * (1 + cost.backward * training)) / threads
            + (read + fresh) * (1 + cost.backward * training)
            + (cost.calls * (1 + training) + cost.gradient * training) * self.call
        )

    def numbers(self) -> list[float]:
        """All rates."""
        flash = [rates for by_dtype in self.flash.values() for rates in by_dtype.values()]
        return [getattr(self, name) for name in NUMBERS] + [number for rates in flash for number in rates.numbers()]

    def of(self, backend: str, dtype: torch.dtype) -> FlashRates:
        """The rates of a backend's flash kernel in a dtype."""
        by_dtype = self.flash.get(backend) or self.flash["torch"]
        return by_dtype.get(str(dtype).removeprefix("torch."), by_dtype[FLOAT32])


NUMBERS = tuple(field.name for field in fields(Rates) if field.name != "flash")
OVERLAPPING = ("cpu",)
"""Backends that bring keys into the order of their products while others arrive from memory."""


ZEN_4, ZEN_5 = "AVX512 on Zen 4", "AVX512 on Zen 5"
"""AMD's processors with AVX-512, where MKL uses half of each vector: families 25, and 26 or later."""
PRICED = Path(__file__).with_name("machine_rates.json")
"""Rates of kinds of machines, each with where and by which command they were measured, or that they are estimated: of
one thread, rounded to two digits. Of processors that are not named there, those of their vector instructions."""


@cache
def machine_rates() -> dict[str, Any]:
    """The content of `PRICED`."""
    return json.loads(PRICED.read_text("utf-8"))


@cache
def default_rates(device: str = "cpu", native_variant: str | None = None, machine: str | None = None) -> Rates:
    """Rates assumed for a kind of device that was not measured.

    device: as `torch.device.type`. native_variant: of the native code, None where there is none. machine: a key of
    `machine_rates`; without it the processor here.
    """
    if machine is None:
        machine = _machine_here() if device == "cpu" else "cuda"
    held = machine_rates()[machine]
    flash = {backend: by_dtype for backend, by_dtype in held["flash"].items() if backend != "cpu"}
    if own := held["flash"].get("cpu", {}).get(native_variant or ""):
        flash["cpu"] = own
    numbers = {name: held[name] for name in NUMBERS}
    return Rates(**numbers, flash={backend: _flash_rates(by_dtype) for backend, by_dtype in flash.items()})


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
    def here(cls, device: str = "cpu") -> Machine:
        """The current machine and number of threads; of a CUDA device the card, and Triton as its native code."""
        if device != "cpu":
            triton = f"Triton {version('triton')}" if find_spec("triton") else "none"
            return cls(torch.cuda.get_device_name(), 1, str(torch.__version__), triton)
        return cls(_processor(), torch.get_num_threads(), str(torch.__version__), native.variant_in_use() or "none")

    def differences(self, other: Machine) -> str:
        """The properties that differ from another machine's, as text; empty if none does."""
        own, others = asdict(self), asdict(other)
        return ", ".join(f"{name} {others[name]}, now {own[name]}" for name in own if own[name] != others[name])


@dataclass(frozen=True, slots=True)
class RatesInUse:
    """The rates that kernels are chosen by, a description of their origin, and whether they were measured."""

    rates: Rates
    origin: str
    measured: bool = False


def cache_file(device: str = "cpu") -> Path:
    """Path of the measured rates: calibration.json in regard's folder of the user's cache directory.

    device: as `torch.device.type`; that of another than the CPU has its name in it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "regard" / ("calibration.json" if device == "cpu" else f"calibration-{device}.json")


def predicted_seconds(cost: Cost, problem: Problem) -> float:
    """Predicted seconds on the problem's device: of the forward pass, and of the backward if a gradient is required."""
    value = problem.value
    return seconds_on(value.device.type, cost, value.dtype, training=problem.inputs_require_grad())


def seconds_on(device: str, cost: Cost, dtype: torch.dtype, *, training: bool = False) -> float:
    """Predicted seconds of this cost on a kind of device, `torch.device.type`; in training, forward and backward."""
    threads = None if device == "cpu" else 1
    return rates_in_use(device).rates.seconds(cost, dtype, threads, training=training)


def rates_in_use(device: str = "cpu") -> RatesInUse:
    """The rates of a kind of device in use, measured or default, and their origin; read once for a `rates_key`."""
    return _rates_in_use(*rates_key(), device)


times_saved = 0
"""How often `save_rates` has saved rates."""


def rates_key() -> tuple[int, str | None, int]:
    """Number of threads, variant of the native code, and how often rates were saved: memo key of predicted times."""
    return torch.get_num_threads(), native.variant_in_use(), times_saved


@cache
def _rates_in_use(threads: int, native_variant: str | None, times_saved: int, device: str) -> RatesInUse:
    defaults, on_cpu = default_rates(device, native_variant), device == "cpu"
    of, command = ("", CALIBRATE) if on_cpu else (" of a data-centre GPU", f"{CALIBRATE} --device {device}")
    by = f"`{command}` measures them"
    try:
        path = cache_file(device)
        measured, machine = load_rates(path)
    except FileNotFoundError:
        return RatesInUse(defaults, f"defaults{of}: nothing was measured here; {by}")
    except (OSError, RuntimeError, ConfigurationError) as error:  # damaged, closed to us, no home: never in the way
        return RatesInUse(defaults, f"defaults{of}: {error}")
    if not on_cpu and not torch.cuda.is_available():
        return RatesInUse(measured, f"measured on {machine.processor}, from {path}", True)
    if changed := Machine.here(device).differences(machine):
        return RatesInUse(defaults, f"defaults{of}: {path} was measured on another machine ({changed}); {by} anew")
    return RatesInUse(measured, f"measured here, from {path}", True)


def load_rates(path: Path) -> tuple[Rates, Machine]:
    """Load the rates in a file, and the machine that they were measured on.

    Raises:
        ConfigurationError: the file does not hold one number above 0 for each rate, and the machine.
        OSError: it cannot be read.
    """
    try:
        held = json.loads(path.read_text("utf-8"))
        flash = {backend: _flash_rates(by_dtype) for backend, by_dtype in held["rates"]["flash"].items()}
        numbers = {name: float(held["rates"][name]) for name in NUMBERS}
        measured = Rates(**numbers, flash={"torch": flash["torch"], **flash})
        stored = held["machine"]
        machine = Machine(str(stored["processor"]), int(stored["threads"]), str(stored["torch"]), str(stored["native"]))
    except (KeyError, TypeError, ValueError, AttributeError):
        measured = machine = None
    if measured is None or machine is None or not all(0 < rate < float("inf") for rate in measured.numbers()):
        raise ConfigurationError(
            f"{path} holds no calibration: it needs a number above 0 for each of {', '.join(NUMBERS)}, those of the "
            "flash kernel of torch, and of other backends, in each dtype, and the machine that they were measured on; "
            "`regard bench --calibrate` writes it anew"
        )
    return measured, machine


def _flash_rates(by_dtype: dict[str, dict[str, float]]) -> dict[str, FlashRates]:
    """The rates of a flash kernel from a file; those of float32 have to be among them."""
    names = {field.name for field in fields(FlashRates)}
    found = {
        dtype: FlashRates(**{name: float(rate) for name, rate in rates.items() if name in names})
        for dtype, rates in by_dtype.items()
    }
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


def save_rates(measured: Rates, path: Path, device: str = "cpu") -> None:
    """Save rates of this machine to a file, atomically; kernels are chosen by them from the next call on.

    device: as `torch.device.type`, whose rates they are.

    Raises:
        ConfigurationError: the file cannot be written.
    """
    global times_saved
    make_folder(path)
    text = json.dumps({"machine": asdict(Machine.here(device)), "rates": asdict(measured)}, indent=2) + "\n"
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
def _machine_here() -> str:
    """The key of `machine_rates` for this processor: by the vector instructions that torch uses, and AMD's families."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return "ARM"
    capability = torch.backends.cpu.get_cpu_capability()
    with contextlib.suppress(OSError):  # only Linux has it
        processor = Path("/proc/cpuinfo").read_text("utf-8", "replace")
        if capability == "AVX512" and "AuthenticAMD" in processor:
            return ZEN_4 if re.search(r"^cpu family\s*: 25$", processor, re.MULTILINE) else ZEN_5
    return capability if capability in machine_rates() else "AVX2"


def _processor() -> str:
    """The processor's name, the vector instructions that torch uses, and the number of CPUs."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):  # only Linux has it
        lines = Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    return f"{name}, {torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} CPUs"
