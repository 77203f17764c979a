"""Compiling the C sources of this folder into one library, with the compiler of the system.

Runs while regard is being installed, so it needs Python's own modules alone. A compiler that is missing or fails stops
nothing: what it said is written where the library would be.

    python build.py          for the variants that this processor runs
    python build.py --all    for all of its family

Each object file is kept, under the hash of all that it is made of: what was compiled once is only linked again.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import NamedTuple

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libregard.so"  # whatever the system calls such files: it is opened by its name
CHECKSUM = "libregard.so.sha256"  # of the library beside it, as sha256sum writes and checks it
REASON = "not_built.txt"
SETTING = "REGARD_VARIANTS"
"""The environment variable that says for which variants to compile: "all", or their names with commas between them."""

SOURCES_PER_VARIANT = (  # what takes longest to compile comes first
    "decode.c",
    "packed_decode.c",
    "short.c",
    "flash_backward.c",
    "flash.c",
    "gathered.c",
    "gemv.c",
    "additive_scores.c",
    "additive_backward.c",
    "additive_forward.c",
    "additive_tile_gradients.c",
    "call_bias.c",
    "code_writing.c",
    "counted_positions.c",
    "finite.c",
    "fire.c",
    "looked_up.c",
    "flash_reductions.c",
    "flash_weights.c",
    "gru_decoder_backward.c",
    "gru_decoder_forward.c",
    "mixed_heads.c",
    "monotonic.c",
    "paged.c",
    "pair_products.c",
    "panels.c",
    "recurrence_backward.c",
    "recurrence_forward.c",
    "recurrence_step.c",
    "threshold.c",
    "tile_packing.c",
    "top_entries.c",
    "top_products.c",
    "transformer_step.c",
    "written_pairs.c",
)
CPU_SUPPORT = "cpu_support.c"

PAIRED = "bf16"
"""How the names of the variants end that multiply bfloat16 in pairs; in all else they are as those without."""
PAIRED_SOURCES = (
    "decode.c",
    "packed_decode.c",
    "short.c",
    "flash_backward.c",
    "flash.c",
    "additive_forward.c",
    "additive_tile_gradients.c",
    "flash_reductions.c",
    "flash_weights.c",
    "paged.c",
    "pair_products.c",
    "panels.c",
    "top_products.c",
    "transformer_step.c",
)
"""The sources that do so, or multiply bytes: all other work such a variant leaves to the variant without."""

# -fwrapv: whole numbers are bits here. contract: x * y + z may be one instruction, rounded once.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-ffp-contract=fast", "-Wall", "-Wextra")

MACHINE = platform.machine().lower()
FOR_ARM = {"neonbf16": ("-march=armv8.2-a+bf16",)}
AVX512 = "-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"
FOR_X86 = {
    "avx512bf16": (*AVX512, "-mavx512bf16", "-mavx512vnni"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}

KEPT_SECONDS = 30 * 24 * 3600
"""Object files that no build has used for so long are removed."""


class BuildError(Exception):
    """The library could not be built; the message is the reason."""


def compiler_flags(machine: str = MACHINE) -> dict[str, tuple[str, ...]]:
    """The compiler flags of each variant for a processor of a family, the fastest first; the last runs anywhere.

    >>> list(compiler_flags())[-1] == baseline()
    True
    """
    always = baseline(machine)
    return {**(FOR_X86 if machine in ("x86_64", "amd64") else FOR_ARM if always == "neon" else {}), always: ()}


def baseline(machine: str = MACHINE) -> str:
    """The variant that every processor of a family can run: "neon" or "plain"."""
    return "neon" if machine in ("aarch64", "arm64") else "plain"


def without_pairs(variant: str) -> str:
    """The variant whose code one that multiplies in pairs calls where there is nothing to multiply so; else itself.

    >>> without_pairs("avx512bf16"), without_pairs("avx512")
    ('avx512', 'avx512')
    """
    return variant.removesuffix(PAIRED)


def sources_of(variant: str) -> tuple[str, ...]:
    """The sources that are compiled for a variant."""
    return SOURCES_PER_VARIANT if variant == without_pairs(variant) else PAIRED_SOURCES


def names_in_c(variant: str) -> tuple[str, ...]:
    """The compiler flags that tell the sources what they are compiled for.

    >>> names_in_c("avx512bf16")
    ('-DVARIANT=avx512bf16', '-DWITHOUT_PAIRS=avx512')
    """
    without = without_pairs(variant)
    return (f"-DVARIANT={variant}", *((f"-DWITHOUT_PAIRS={without}",) if variant != without else ()))


def digest() -> str:
    """Hash of the C sources; a library built from sources with another hash is not used."""
    return hash_of(files_of(*SOURCES_PER_VARIANT, CPU_SUPPORT).values())[:16]


def hash_of(parts: Iterable[str]) -> str:
    """SHA-256 of some texts, one after another."""
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def files_of(*names: str) -> dict[str, str]:
    """The text of some sources, and of the headers of this folder that they include, in the order of their names.

    >>> [*files_of("cpu_support.c")]
    ['cpu_support.c']
    >>> "simd.h" in files_of("gemv.c")
    True
    """
    found: dict[str, str] = {}
    left = [*names]
    while left:
        name = left.pop()
        if name not in found:
            found[name] = (SOURCES / name).read_text("utf-8")
            left += re.findall(r'^#include "(.+)"', found[name], re.MULTILINE)
    return dict(sorted(found.items()))


def build(
    folder: Path = SOURCES, *, all_variants: bool = False, keep: Path | None = None, machine: str = MACHINE
) -> str | None:
    """Compile the library into `folder`; return None, or the reason for a failure, which is written there instead.

    Args:
        folder: where the library goes.
        all_variants: for all processors of the family, not only for what this one runs; REGARD_VARIANTS comes first.
        keep: where object files are kept; by default `kept_folder()`.
        machine: the family of processors that $CC compiles for, as `platform.machine()` calls it there.
    """
    try:
        try:
            with tempfile.TemporaryDirectory() as scratch:
                library = Compiler(Path(scratch), keep or kept_folder(), machine).library(all_variants=all_variants)
        except BuildError as error:
            for name in (LIBRARY, CHECKSUM):
                (folder / name).unlink(missing_ok=True)
            write(folder / REASON, str(error).encode())
            return str(error)
        write(folder / LIBRARY, library)
        write(folder / CHECKSUM, f"{hashlib.sha256(library).hexdigest()}  {LIBRARY}\n".encode())
        (folder / REASON).unlink(missing_ok=True)
    except OSError as error:
        return f"{error.filename} cannot be written: {error.strerror}"
    return None


def damage(folder: Path) -> str | None:
    """What is wrong with the library in a folder; None where it is, byte by byte, what was built."""
    if not (folder / CHECKSUM).exists():
        return f"{CHECKSUM}, which is written with it, is not there"
    library = (folder / LIBRARY).read_bytes()
    if (folder / CHECKSUM).read_bytes().startswith(hashlib.sha256(library).hexdigest().encode()):
        return None
    return f"its {len(library):,} bytes are not those that were built: their sum is not that of {CHECKSUM}"


def write(path: Path, content: bytes) -> None:
    """Write a file as a whole, unless it is as it should be: another process may read it, or have it open."""
    if path.is_file() and path.read_bytes() == content:
        return
    fresh = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
    fresh.write_bytes(content)
    fresh.replace(path)


def kept_folder(*, editable: bool = True) -> Path | None:
    """Where object files are kept: in the checkout that this file is in, or in the user's cache; None: neither exists.

    editable: the checkout stays, as regard is imported from it. Another one may be a copy for a while, and is the place
    only if it has been so before.
    """
    for folder in SOURCES.parents:
        kept = folder / "build" / "native"
        if (folder / "hatch_build.py").is_file() and (editable or kept.is_dir()):
            return kept
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    except RuntimeError:  # the user has no home
        return None
    return cache / "regard" / "native"


def say(text: str) -> None:
    """Tell what takes so long."""
    sys.stderr.write(text)
    sys.stderr.flush()


class ObjectFile(NamedTuple):
    """One source, compiled for one variant. Its name has a hash of all that it is made from."""

    source: str
    flags: tuple[str, ...]
    name: str


class Compiler:
    """The C compiler of the system, $CC or cc, and the object files that it has compiled before."""

    def __init__(self, scratch: Path, keep: Path | None, machine: str) -> None:
        self.scratch, self.keep = scratch, keep
        self.variants, self.baseline = compiler_flags(machine), baseline(machine)
        self.command = shlex.split(os.environ.get("CC", "")) or ["cc"]
        about = self.run("-v")
        self.version = f"{self.command}{about.stdout}{about.stderr}"  # and the system that it compiles for

    def library(self, *, all_variants: bool) -> bytes:
        """The library; variants that the compiler does not support are omitted.

        Raises:
            BuildError: there is no compiler, or it fails on what every processor runs.
        """
        support = self.object_file(CPU_SUPPORT, "any", f'-DDIGEST="{digest()}"', f'-DBASELINE="{self.baseline}"')
        self.make(support)
        parts = {
            variant: [
                self.object_file(source, variant, *self.variants[variant], *names_in_c(variant))
                for source in sources_of(variant)
            ]
            for variant in self.chosen(support, all_variants=all_variants)
        }
        objects: dict[str, list[ObjectFile]] = {}
        with self.progress(parts), ThreadPoolExecutor(core_count()) as pool:  # each waits for a compiler of its own
            making = {variant: [pool.submit(self.make, part) for part in own] for variant, own in parts.items()}
            for variant, own in parts.items():
                try:
                    for each in making[variant]:
                        each.result()
                except BuildError:
                    if variant == self.baseline:
                        raise
                else:
                    objects[variant] = own
        self.forget()
        whole = [own for variant, own in objects.items() if without_pairs(variant) in objects]
        return self.linked([support, *chain.from_iterable(whole)])

    def chosen(self, support: ObjectFile, *, all_variants: bool) -> list[str]:
        """The variants to compile for: those of REGARD_VARIANTS, all, or what this processor runs; and the baseline."""
        names, setting = [*self.variants], os.environ.get(SETTING, "")
        if setting not in ("", "all"):
            for name in setting.split(","):
                if name not in names:
                    raise BuildError(
                        f"{SETTING} is {setting!r}, where {name!r} is no variant: name some of {names}, or 'all'"
                    )
            asked = {self.baseline, *setting.split(",")}
            asked |= {without_pairs(name) for name in asked}
            return [name for name in names if name in asked]
        if setting == "all" or all_variants:
            return names
        alone = self.scratch / "support.so"
        alone.write_bytes(self.linked([support]))
        try:
            runs = ctypes.CDLL(str(alone)).regard_runs
        except OSError:  # compiled for another system than this one
            return names
        return [name for name in names if runs(name.encode()) or name == self.baseline]

    @contextlib.contextmanager
    def progress(self, parts: dict[str, list[ObjectFile]]) -> Iterator[None]:
        """Say what is compiled, on one line, and how long it took; nothing if nothing is."""
        missing = sum(self.kept(part) is None for own in parts.values() for part in own)
        start = time.monotonic()
        if missing:
            say(f"regard: compiling native code for {', '.join(parts)}, {missing} files, on {core_count()} cores ...")
        try:
            yield
        finally:
            if missing:
                say(f" {time.monotonic() - start:.0f} s\n")

    def object_file(self, source: str, variant: str, *flags: str) -> ObjectFile:
        """What a source is compiled to for a variant."""
        flags = (*FLAGS, *flags)
        return ObjectFile(source, flags, f"{Path(source).stem}-{variant}-{self.made_from(source, flags)}.o")

    def made_from(self, source: str, flags: tuple[str, ...]) -> str:
        """Hash of a source, the headers that it includes, and the compiler with its flags."""
        return hash_of([self.version, *flags, *files_of(source).values()])[:32]

    def make(self, part: ObjectFile) -> None:
        """Put an object file into the scratch folder: the one that was kept, or a new one, which is kept then."""
        target = self.scratch / part.name
        kept = self.kept(part)
        if kept is not None:
            target.write_bytes(kept)
            return
        self.call(*part.flags, "-c", str(SOURCES / part.source), "-o", str(target))
        unchanged = self.made_from(part.source, part.flags) in part.name  # while it was compiled
        if self.keep is not None and unchanged:
            with contextlib.suppress(OSError):  # where nothing can be kept, the next build compiles again
                self.keep.mkdir(parents=True, exist_ok=True)
                content = target.read_bytes()
                write(self.keep / part.name, hashlib.sha256(content).digest() + content)

    def kept(self, part: ObjectFile) -> bytes | None:
        """An object file that was compiled before, if it is there and whole: its hash stands before it."""
        if self.keep is None:
            return None
        path = self.keep / part.name
        try:
            content = path.read_bytes()
        except OSError:
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        return content[32:] if hashlib.sha256(content[32:]).digest() == content[:32] else None

    def forget(self) -> None:
        """Remove what no build has used for long."""
        if self.keep is None:
            return
        for path in self.keep.glob("*.o*"):
            with contextlib.suppress(OSError):  # another process may have removed it
                if path.stat().st_mtime < time.time() - KEPT_SECONDS:
                    path.unlink()

    def linked(self, objects: list[ObjectFile]) -> bytes:
        """The shared library of some object files."""
        library = self.scratch / LIBRARY
        paths = (str(self.scratch / part.name) for part in objects)
        self.call("-shared", "-fPIC", "-o", str(library), *paths, "-lm")
        return library.read_bytes()

    def call(self, *arguments: str) -> None:
        """Run the compiler; BuildError if it fails."""
        done = self.run(*arguments)
        if done.returncode:
            lines = done.stderr.splitlines()
            said = [line for line in lines if "error" in line] or lines or ["nothing"]
            raise BuildError(f"the C compiler {self.command[0]} failed: {said[0].strip()}")

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run the compiler, whose messages are in English; BuildError if there is none."""
        command, english = [*self.command, *arguments], {**os.environ, "LC_ALL": "C"}
        try:
            return subprocess.run(command, env=english, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise BuildError(f"no C compiler was found: {command[0]}: {error.strerror}") from None


def core_count() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Compile the native code of regard.")
    parser.add_argument("--all", action="store_true", help="for all processors of this family, not only for this one")
    sys.exit(build(all_variants=parser.parse_args().all))
