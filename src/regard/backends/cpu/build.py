"""Compiling the C sources of this folder into one library, with the compiler of the system.

Runs while regard is being installed, so it needs Python's own modules alone. `python build.py` in this folder builds
anew. A compiler that is missing or fails stops nothing: what it said is written where the library would be.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
LIBRARY = "libregard.so"  # whatever the system calls such files: it is opened by its name
REASON = "not_built.txt"

SOURCES_PER_VARIANT = (
    "additive_scores.c",
    "additive_backward.c",
    "additive_forward.c",
    "additive_tile_gradients.c",
    "decode.c",
    "finite.c",
    "flash.c",
    "flash_backward.c",
    "flash_reductions.c",
    "flash_weights.c",
    "gemv.c",
    "gru_decoder_backward.c",
    "gru_decoder_forward.c",
    "pair_products.c",
    "recurrence_backward.c",
    "recurrence_forward.c",
    "recurrence_step.c",
    "short.c",
    "top_entries.c",
)
CPU_SUPPORT = "cpu_support.c"
HEADERS = (
    "additive.h",
    "additive_scores.h",
    "decode.h",
    "flash.h",
    "gemv.h",
    "gru_decoder.h",
    "gru_steps.h",
    "microkernel.h",
    "narrow.h",
    "narrow_backward.h",
    "narrow_forward.h",
    "prefetch.h",
    "recurrence.h",
    "recurrence_chunk.h",
    "reduce_tile.h",
    "reductions.h",
    "row_lanes.h",
    "short.h",
    "simd.h",
    "tile.h",
    "top_entries.h",
    "topk.h",
    "transpose.h",
    "typed_rows.h",
    "variants.h",
)

# -fwrapv: whole numbers are bits here. contract: x * y + z may be one instruction, rounded once.
FLAGS = ("-std=gnu11", "-O3", "-fPIC", "-fvisibility=hidden", "-fwrapv", "-ffp-contract=fast", "-Wall", "-Wextra")

MACHINE = platform.machine().lower()
FOR_ARM = {"neonbf16": ("-march=armv8.2-a+bf16",)}
AVX512 = "-mavx512f", "-mavx512bw", "-mavx512vl", "-mfma"
FOR_X86 = {
    "avx512bf16": (*AVX512, "-mavx512bf16"),
    "avx512": AVX512,
    "avx2": ("-mavx2", "-mfma", "-mf16c"),
}


class BuildError(Exception):
    """The library could not be built; the message is the reason."""


def compiler_flags() -> dict[str, tuple[str, ...]]:
    """The compiler flags of each variant for a processor of this family, the fastest first; the last runs anywhere.

    >>> list(compiler_flags())[-1] == baseline()
    True
    """
    return {**(FOR_X86 if MACHINE in ("x86_64", "amd64") else FOR_ARM if baseline() == "neon" else {}), baseline(): ()}


def baseline() -> str:
    """The variant that every processor of this family can run: "neon" or "plain"."""
    return "neon" if MACHINE in ("aarch64", "arm64") else "plain"


def digest() -> str:
    """Hash of the C sources; a library built from sources with another hash is not used."""
    content = b"".join((SOURCES / name).read_bytes() for name in (*SOURCES_PER_VARIANT, CPU_SUPPORT, *HEADERS))
    return hashlib.sha256(content).hexdigest()[:16]


def build(folder: Path = SOURCES) -> str | None:
    """Compile the library into `folder`; return None, or the reason for a failure, which is written there instead."""
    library, note = folder / LIBRARY, folder / REASON
    try:
        with tempfile.TemporaryDirectory() as scratch:
            built = compiled(Path(scratch))
            fresh = (
                folder / f"{LIBRARY}.{os.getpid()}"
            )  # renamed when complete: another process may have the old one open
            fresh.write_bytes(built.read_bytes())
            fresh.replace(library)
    except BuildError as error:
        library.unlink(missing_ok=True)
        note.write_text(str(error), "utf-8")
        return str(error)
    note.unlink(missing_ok=True)
    return None


def compiled(scratch: Path) -> Path:
    """Compile the library in `scratch`; variants that the compiler does not support are omitted.

    Raises:
        BuildError: there is no compiler, or it fails on what every processor runs.
    """
    objects = []
    for variant, flags in compiler_flags().items():
        try:
            with ThreadPoolExecutor(os.cpu_count()) as pool:  # each waits for a compiler of its own
                compiling = (
                    pool.submit(one_object, scratch, source, variant, (*flags, f"-DVARIANT={variant}"))
                    for source in SOURCES_PER_VARIANT
                )
                parts = [each.result() for each in list(compiling)]
        except BuildError:
            if variant == baseline():
                raise
            continue
        objects += parts
    objects.append(one_object(scratch, CPU_SUPPORT, "any", (f'-DDIGEST="{digest()}"', f'-DBASELINE="{baseline()}"')))
    library = scratch / LIBRARY
    call("-shared", "-fPIC", "-o", str(library), *objects, "-lm")
    return library


def one_object(scratch: Path, source: str, variant: str, flags: tuple[str, ...]) -> str:
    """Compile one source for one variant, and return the path of the object file."""
    target = scratch / f"{Path(source).stem}_{variant}.o"
    call(*FLAGS, *flags, "-c", str(SOURCES / source), "-o", str(target))
    return str(target)


def call(*arguments: str) -> None:
    """Run the compiler: $CC, or cc."""
    compiler = shlex.split(os.environ.get("CC", "")) or ["cc"]
    try:
        done = subprocess.run([*compiler, *arguments], capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BuildError(f"no C compiler was found: {compiler[0]}: {error.strerror}") from None
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines() or ["nothing"]
        raise BuildError(f"the C compiler {compiler[0]} failed: {said[0].strip()}")


if __name__ == "__main__":
    sys.exit(build())
