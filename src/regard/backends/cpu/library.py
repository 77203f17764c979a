"""Loading of the compiled C library at first use; checks of the tensors that it reads, and new ones that it writes."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_double, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import Parameter

from ...core.finite import register_reader
from ...errors import ConfigurationError, DeviceError, DtypeError, KernelError
from . import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""The dtypes that the code for dot products reads, numbered as in typed_rows.h."""
DTYPE_NAMES = "float32, bfloat16 or float16"
FOLDER = build.SOURCES
SETTING = "REGARD_NATIVE"
MAX_NUMBERS = 2**16
"""Above so many of float32 torch's sum, on all threads, is faster than one thread; halves it would first widen."""
WORTHWHILE_PAIRS = 1.2
"""From so many products of bfloat16 for one of float32 on, the variant that multiplies them in pairs is in use.

Measured when the library is loaded, in 40 µs: 2.0 on AMD's Zen 5; on Intel's Emerald Rapids it would be 0.5.
"""
MEND = "install regard again where there is a C compiler: cc, or what $CC names"


class Library:
    """The C functions of one variant; pointers go in as whole numbers or by `ctypes.byref`."""

    def __init__(self, opened: ctypes.CDLL, variant: str) -> None:
        def function(name: str, *arguments: type, returns: type | None = None) -> Callable:
            # The C function regard_NAME_VARIANT: regard_flash_avx512 of `flash`, EXPORTED(regard_flash) in C.
            own = getattr(opened, f"regard_{name}_{variant}", None)
            symbol = own or getattr(opened, f"regard_{name}_{build.without_pairs(variant)}")
            symbol.argtypes, symbol.restype = arguments, returns
            return symbol

        self.variant = variant
        self.runs = opened.regard_runs  # whether this processor runs a variant, compiled or not
        self.additive_weight = function("additive_weight", c_void_p, c_void_p, c_void_p)
        self.additive_form = function("additive_form", c_void_p)
        self.additive_bounds = function("additive_bounds", c_void_p)
        self.additive_prepare = function("additive_prepare", c_void_p)
        self.additive_scores = function("additive_scores", c_void_p, c_void_p)
        self.additive_forward = function("additive_forward", c_void_p)
        self.additive_backward = function("additive_backward", c_void_p, c_void_p, c_void_p)
        self.additive_tile_gradients = function("additive_tile_gradients", c_void_p)
        self.additive_scratch = function("additive_scratch", c_int64, returns=c_int64)
        self.added_vectors = function("added_vectors", c_void_p)
        self.code_writing = function("code_writing", c_void_p)
        self.counted_positions = function("counted_positions", c_void_p, c_void_p, *(c_int64,) * 3, c_void_p)
        self.decode = function("decode", c_void_p)
        self.equal_ids = function("equal_ids", c_void_p, c_void_p, *(c_int64,) * 9, c_void_p)
        self.finite = function("finite", c_void_p, c_int64, c_int64, returns=c_int64)
        self.fire = function("fire", c_void_p, c_double)
        self.finite_strided = function("finite_strided", c_void_p, *(c_int64,) * 9, returns=c_int64)
        self.gathered = function("gathered", c_void_p)
        self.gathered_backward = function("gathered_backward", c_void_p)
        self.gemv = function("gemv", c_void_p)
        self.gru_decoder = function("gru_decoder", c_void_p)
        self.gru_decoder_backward = function("gru_decoder_backward", c_void_p)
        self.flash = function("flash", c_void_p)
        self.flash_backward = function("flash_backward", c_void_p)
        self.flash_reductions = function("flash_reductions", c_void_p)
        self.flash_weights = function("flash_weights", c_void_p)
        self.listed_pairs = function("listed_pairs", c_void_p, *(c_int64,) * 7, c_void_p)
        self.looked_up = function("looked_up", c_void_p, c_double)
        self.mixed_heads = function("mixed_heads", c_void_p)
        self.mixed_heads_backward = function("mixed_heads_backward", c_void_p)
        self.monotonic = function("monotonic", c_void_p, c_void_p, *(c_int64,) * 3, c_void_p, c_void_p)
        self.monotonic_backward = function("monotonic_backward", *(c_void_p,) * 4, *(c_int64,) * 3, c_void_p)
        self.paged = function("paged", c_void_p)
        self.packed_decode = function("packed_decode", c_void_p)
        self.multiplies_bytes = function("multiplies_bytes", returns=c_int64)
        self.pack_bytes = function("pack_bytes", c_void_p, *(c_int64,) * 3, c_void_p, c_void_p)
        self.pack_panels = function("pack_panels", c_void_p, *(c_int64,) * 3, c_void_p)
        self.pair_speed = function("pair_speed", returns=c_double)
        self.recurrence = function("recurrence", c_void_p)
        self.recurrence_backward = function("recurrence_backward", c_void_p)
        self.short = function("short", c_void_p)
        self.short_backward = function("short_backward", c_void_p)
        self.threshold = function("threshold", c_void_p)
        self.threshold_backward = function("threshold_backward", c_void_p)
        self.top_entries = function("top_entries", c_void_p)
        self.top_products = function("top_products", c_void_p)
        self.transformer_step = function("transformer_step", c_void_p)
        step = c_void_p, c_void_p, c_int64, *(c_void_p,) * 8, c_int64, c_void_p, c_void_p
        self.recurrence_step = function("recurrence_step", *step, returns=c_int64)


class LibraryUnusable(Exception):
    """The compiled library is missing or does not fit this processor; the message is the reason."""


# The result of `_state`: the variants that run here, the fastest first, and the one in use; or why there are none.
_found: tuple[dict[str, Library], str] | str | None = None


def available() -> bool:
    """Whether the native code can be called."""
    return why_not() is None


def why_not() -> str | None:
    """The reason why the native code cannot be called, and the fix; None where it can."""
    found = _state()
    return found if isinstance(found, str) else None


def variants() -> tuple[str, ...]:
    """The variants that were built and run on this processor, the fastest first; empty without native code."""
    found = _state()
    return () if isinstance(found, str) else tuple(found[0])


def variant() -> str:
    """The variant in use: "avx512bf16", "avx512", "avx2", "neonbf16", "neon" or "plain".

    Raises:
        KernelError: there is no native code to call.
    """
    return current().variant


def variant_in_use() -> str | None:
    """The `variant` in use, None without native code; quick enough for every call of attention."""
    found = _found or _state()
    return None if isinstance(found, str) else found[1]


def multiplies_in_pairs(native_variant: str | None, dtype: torch.dtype) -> bool:
    """Whether a variant of the native code multiplies numbers of a dtype in pairs."""
    return dtype == torch.bfloat16 and (native_variant or "").endswith(build.PAIRED)


def current() -> Library:
    """The functions of the variant in use.

    Raises:
        KernelError: there is no native code to call.
    """
    found = _state()
    if isinstance(found, str):
        raise KernelError(f"native code cannot be called: {found}")
    libraries, name = found
    return libraries[name]


@contextmanager
def using(name: str) -> Iterator[None]:
    """Use another of `variants()` within the block, in all threads.

    Raises:
        ConfigurationError: it is not one of them.
    """
    global _found
    before = _state()
    if isinstance(before, str) or name not in before[0]:
        raise ConfigurationError(f"the variant {name!r} of the native code does not run here; these do: {variants()}")
    _found = before[0], name
    try:
        yield
    finally:
        _found = before


def supports(*tensors: Tensor) -> bool:
    """Whether native code computes dot products of these tensors: on the CPU, of one dtype of `DTYPES`."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(t.is_cpu and t.dtype == dtype for t in tensors) and available()


def read_finite(tensor: Tensor) -> bool | None:
    """Whether no entry of a tensor is NaN or infinite; None of a tensor that torch reads faster, or alone."""
    # Subclasses, and what outlived its transform, are left to torch's operators: some have no numbers in memory.
    if (
        not tensor.is_cpu
        or type(tensor) not in (Tensor, Parameter)
        or not torch._C._has_storage(tensor)
        or tensor.dtype not in DTYPES
        or (tensor.numel() > MAX_NUMBERS and tensor.dtype is torch.float32)
        or not available()
    ):
        return None
    code, dtype = current(), DTYPES.index(tensor.dtype)
    if tensor.is_contiguous():
        return bool(code.finite(tensor.data_ptr(), dtype, tensor.numel()))
    if tensor.ndim == 4:
        return bool(code.finite_strided(tensor.data_ptr(), dtype, *tensor.shape, *tensor.stride()))
    return bool(tensor.isfinite().all())


register_reader(read_finite)


def check_cpu(name: str, tensor: Tensor) -> None:
    """Raise DeviceError for a tensor that is not on the CPU."""
    if tensor.device.type != "cpu":
        raise DeviceError(f"{name} is on {tensor.device}; native code runs on the CPU: pass {name}.cpu()")


def check_float32(name: str, tensor: Tensor) -> None:
    """Raise DtypeError or DeviceError for a tensor that is not float32 on the CPU."""
    if tensor.dtype != torch.float32:
        raise DtypeError(f"{name} is {tensor.dtype}; native code takes torch.float32: pass {name}.float()")
    check_cpu(name, tensor)


def last_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, copied if its last axis is not contiguous."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()


def places_of(structure: type[ctypes.Structure], *fields: str) -> tuple[int, ...]:
    """Where a structure has fields, in 64-bit numbers: an array is written in a third of the time of a structure."""
    return tuple(getattr(structure, field).offset // 8 for field in fields)


def _state() -> tuple[dict[str, Library], str] | str:
    """The variants that run here and the one in use, found at the first call; or why there are none.

    Raises:
        ConfigurationError: REGARD_NATIVE names a variant that cannot be used.
    """
    global _found
    if _found is None:
        setting = _setting()
        if setting == "off":
            _found = f"the environment variable {SETTING} is 'off'; unset it"
            return _found
        try:
            libraries = _open(FOLDER)
        except LibraryUnusable as error:
            if setting:
                raise _not_usable(setting, str(error)) from None
            _found = str(error)
        else:
            _found = libraries, _chosen(libraries, setting)
    return _found


def _setting() -> str:
    """The variant that the environment variable REGARD_NATIVE names, "off" for none, or "" where it names nothing."""
    setting, names = os.environ.get(SETTING, ""), [*build.compiler_flags()]
    if setting not in ("", "off", *names):
        raise _not_usable(setting, f"no variant of that name; there are {', '.join(names)}, and off for none of them")
    return setting


def _chosen(libraries: dict[str, Library], setting: str) -> str:
    """The variant that the setting names, or the fastest one."""
    fastest = next(iter(libraries))
    if setting in libraries:
        return setting
    if not setting:
        return fastest
    if libraries[fastest].runs(setting.encode()):
        why = f"it was not compiled: install regard again with {build.SETTING}=all, which compiles every variant"
    else:
        why = "this processor does not run it"
    raise _not_usable(setting, f"{why}; {', '.join(libraries)} can be used")


def _not_usable(setting: str, why: str) -> ConfigurationError:
    """The environment asks for a variant that there is not."""
    return ConfigurationError(f"the environment variable {SETTING} is {setting!r}: {why}; or unset it for the fastest")


def _open(folder: Path) -> dict[str, Library]:
    """The variants in the library of a folder that run on this processor, the fastest first.

    Where the first multiplies bfloat16 in pairs and `pair_speed` measures that this gains too little, the second comes
    first.
    """
    opened = _load(folder)
    runs = opened.regard_runs
    libraries = {
        name: Library(opened, name)
        for name in build.compiler_flags()
        if runs(name.encode()) and hasattr(opened, f"regard_flash_{name}")
    }
    if not libraries:
        raise LibraryUnusable(f"it was built for another processor; {MEND}")
    first = next(iter(libraries))
    if 0 < libraries[first].pair_speed() < WORTHWHILE_PAIRS:
        libraries = {name: libraries[name] for name in [*libraries][1:2]} | libraries
    return libraries


def _load(folder: Path) -> ctypes.CDLL:
    """The library of a folder, built from the sources that are there; a wheel has none."""
    path, note = folder / build.LIBRARY, folder / build.REASON
    if not path.exists():
        if note.exists():
            raise LibraryUnusable(f"when regard was installed, {note.read_text('utf-8')}; {MEND}")
        raise LibraryUnusable(f"it was never built; {MEND}")
    try:
        damage = build.damage(folder)  # of which the system would end the process at some later call
        opened = None if damage else ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryUnusable(f"it was built for another system or processor ({error}); {MEND}") from None
    if opened is None:
        raise LibraryUnusable(f"{path} is damaged: {damage}; {MEND}")
    if not hasattr(opened, "regard_digest"):
        raise LibraryUnusable(f"{path} is not regard's; {MEND}")
    opened.regard_digest.restype = ctypes.c_char_p
    if (build.SOURCES / build.CPU_SUPPORT).exists() and opened.regard_digest().decode() != build.digest():
        raise LibraryUnusable(f"it was built from other sources than these; {MEND}")
    return opened
