"""Launches of kernels in Triton, recorded from the code that makes them, and what their machine code takes of a card.

The kernel is not run: of a launch the types of its arguments, its constants and its options are those of a real call,
and Triton's compiler gives the machine code for any card. No GPU is needed.
"""

from __future__ import annotations

import functools
import importlib
import pkgutil
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from regard.backends import triton as package
from regard.backends.triton import jit_runtime, score_tile

SHARED_MEMORY = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most bytes of shared memory of a block, by compute capability: the cards that are compiled for."""
CAPABILITIES = tuple(SHARED_MEMORY)


class Launch(NamedTuple):
    """A kernel with the arguments and options of one launch."""

    kernel: Any
    arguments: tuple
    options: dict[str, Any]


SPILLED = {
    ("chunk_inverses", 80): 128,
    ("chunk_states", 80): 120,
    ("chunk_states", 90): 88,
    ("chunk_states", 100): 120,
    ("attend_pages", 80): 24,
    ("attend_part", 80): 8,
    ("flash_forward", 90): 8,
    ("gathered_backward", 80): 24,
    ("gathered_backward", 90): 16,
    ("gathered_backward", 100): 16,
    ("key_and_gate_gradients", 80): 24,
    ("key_and_gate_gradients", 90): 16,
    ("key_gradient", 80): 8,
    ("key_gradient", 90): 24,
    ("key_gradient", 100): 8,
    ("query_gradient", 90): 64,
    ("reduce_rows", 90): 8,
    ("row_thresholds", 80): 8,
    ("value_gradients", 80): 8,
    ("value_gradients", 100): 16,
}
"""Bytes of local memory a thread where no tile was found without: of kernels and cards, the most over the problems.

Of the delta rule over all features of a head, for which there is no smaller block; of queries of 128 features with
softcap, dropout and a bias with gradient together; up to 24 bytes are the compiler's choice, which leaves registers
free beside them.
"""


class Usage(NamedTuple):
    """What a compiled kernel takes: registers of a thread, bytes of local memory of a thread, of shared memory."""

    registers: int
    local: int
    shared: int


@contextmanager
def recorded(capability: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The launches of a block over CPU tensors, for which kernels are chosen as for a card of that capability."""
    launches: list[Launch] = []

    def record(self: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launches.append(Launch(self, arguments, options))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        patch.setattr(jit_runtime, "DEVICE", "cpu")
        patch.setattr(torch.version, "cuda", "13.0")
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: divmod(capability, 10))
        forget_cards()
        yield launches
    forget_cards()


def forget_cards() -> None:
    """Forget what the code of the backend remembers of cards."""
    for module in modules():
        for each in vars(module).values():
            if isinstance(each, functools._lru_cache_wrapper):
                each.cache_clear()


def modules() -> list[Any]:
    """All modules of the backend."""
    found = pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    return [importlib.import_module(each.name) for each in found]


def compiled(launch: Launch, capability: int) -> Usage:
    """Compile a launch, as Triton does before the first one of its kind; kept in Triton's cache on disk."""
    target = GPUTarget("cuda", capability, 32)
    chosen, signature, constants, attributes = specialized(launch, capability)
    source = ASTSource(launch.kernel, signature, constants, attributes)
    found = triton.compile(source, target=target, options=chosen.__dict__)
    return Usage(*registers_and_local(found.asm["cubin"]), found.metadata.shared)


def specialized(launch: Launch, capability: int) -> tuple[Any, dict, dict, dict]:
    """Options, types, constants and known divisors of the arguments, by Triton's own rules for a launch."""
    kernel, arguments, options = launch
    backend = make_backend(GPUTarget("cuda", capability, 32))
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, kinds, rest = bind(*arguments, **options)
    return kernel._pack_args(backend, options, bound, kinds, rest)


def registers_and_local(machine_code: bytes) -> tuple[int, int]:
    """Registers and bytes of local memory of a thread, read by NVIDIA's tool, which Triton brings."""
    with tempfile.TemporaryDirectory() as folder:
        (file := Path(folder, "kernel.cubin")).write_bytes(machine_code)
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", str(file)]
        printed = subprocess.run(command, capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", printed.stdout + printed.stderr)
    assert found, printed
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def described(launch: Launch, capability: int) -> str:
    """The kernel, the card and the configuration, for messages."""
    options, signature, constants, _ = specialized(launch, capability)
    given = [f"{field(launch, path)}={value}" for path, value in constants.items() if value is not None]
    off = list(dict.fromkeys(absent(launch, path) for path, value in constants.items() if value is None))
    types = sorted({kind for kind in flat(tuple(signature.values())) if kind.startswith("*")})
    parts = [f"{options.num_warps} warps", f"{options.num_stages} stages", *given, *types]
    return f"{launch.kernel.__name__} on sm_{capability}: {', '.join(parts)}" + f" without {', '.join(off)}" * bool(off)


def argument(launch: Launch, index: int) -> tuple[str, Any]:
    """The name and the value of an argument."""
    name = launch.kernel.arg_names[index]
    return name, launch.arguments[index] if index < len(launch.arguments) else launch.options.get(name)


def field(launch: Launch, path: tuple[int, ...]) -> str:
    """The name of an argument, or of a field of one that is a named tuple."""
    name, value = argument(launch, path[0])
    for index in path[1:]:
        name += f".{value._fields[index] if hasattr(value, '_fields') else index}"
        value = value[index]
    return name


def absent(launch: Launch, path: tuple[int, ...]) -> str:
    """The name of what is None: of the whole argument, where nothing of it is there but numbers."""
    name, value = argument(launch, path[0])
    numbers = isinstance(value, tuple) and all(each is None or isinstance(each, int | float) for each in value)
    return name if numbers else field(launch, path)


def flat(types: Any) -> Iterator[str]:
    """The types of arguments, some of which are tuples."""
    for each in types:
        yield from [each] if isinstance(each, str) else flat(each)


def distinct(launches: Sequence[Launch], capability: int) -> list[Launch]:
    """The launches that are compiled apart."""
    found = {}
    for each in launches:
        options, *types = specialized(each, capability)
        found.setdefault((each.kernel, str(types), options.hash()), each)
    return list(found.values())


def faults(launch: Launch, capability: int) -> list[str]:
    """What is wrong with a compiled launch; the figures are printed.

    A repair, which returns at once unless something is not finite, may spill.
    """
    what = described(launch, capability)
    try:
        used = compiled(launch, capability)
    except Exception as error:  # the compiler may raise anything; the other launches are looked at
        lines = str(error).strip().splitlines()
        first = next((line for line in lines if "fatal" in line), lines[0] if lines else "")
        return [f"{what}: it does not compile: {type(error).__name__}: {first}"]
    sys.stdout.write(
        f"{used.registers:4} registers, {used.local:5} bytes local, {used.shared:7} bytes shared  {what}\n"
    )
    found, most = [], SHARED_MEMORY[capability]
    spilled = SPILLED.get((launch.kernel.__name__, capability), 0)
    if used.local > spilled and not launch.options.get("REPAIR"):
        found.append(f"{what}: {used.local} bytes of local memory a thread, beside {used.registers} registers")
    if used.shared > most:
        found.append(f"{what}: {used.shared} bytes of shared memory; a block may have {most}")
    return found


def entries() -> set[Any]:
    """The kernels of the backend that are launched: all that no other function of Triton's calls.

    Of what kernels share nothing is launched, even where no kernel calls it yet.
    """
    found = [each for module in modules() for each in vars(module).values() if isinstance(each, JITFunction)]
    functions = {each for each in found if each.fn.__module__ != score_tile.__name__}
    called = {name for each in functions for name in each.fn.__code__.co_names}
    return {each for each in functions if each.fn.__name__ not in called}
