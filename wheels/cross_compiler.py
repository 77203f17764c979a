"""A C compiler for another system: clang, as the package ziglang has it with every system's headers.

    python wheels/cross_compiler.py x86_64-linux-gnu.2.17 ...    what follows is what any C compiler is told

What clang and this one say differently is translated. Loops are unrolled where the source says so, and vectors are
those that it is written in: what clang chooses makes the code for AVX-512 up to six times slower, and a sixth larger.
What runs on any x86-64, which is for processors that are rarely met, is made small.
"""

from __future__ import annotations

import subprocess
import sys

TRANSLATED = {
    "-O3": (
        *("-O3", "-fno-unroll-loops", "-fno-vectorize", "-fno-slp-vectorize"),
        *("-fno-asynchronous-unwind-tables", "-fno-unwind-tables"),
    ),
    "-DVARIANT=plain": ("-DVARIANT=plain", "-Os"),
    "-march=armv8.2-a+bf16": ("-mcpu=generic+v8_2a+bf16",),
    "-shared": ("-shared", "-s", "-Wl,--gc-sections"),
}


def translated(target: str, arguments: list[str]) -> list[str]:
    """The arguments for ziglang's compiler.

    >>> translated("aarch64-linux-musl", ["-march=armv8.2-a+bf16", "-c", "flash.c"])
    ['-target', 'aarch64-linux-musl', '-g0', '-mcpu=generic+v8_2a+bf16', '-c', 'flash.c']
    """
    words = [word for argument in arguments for word in TRANSLATED.get(argument, (argument,))]
    return ["-target", target, "-g0", *words]


if __name__ == "__main__":
    if sys.argv[2:] == ["-v"]:  # which says what a compiler is: objects that another compiled are not used again
        print(TRANSLATED)
    command = [sys.executable, "-m", "ziglang", "cc", *translated(sys.argv[1], sys.argv[2:])]
    sys.exit(subprocess.run(command, check=False).returncode)
