"""Peak memory of one piece of work above its inputs, measured in a process of its own."""

from __future__ import annotations

import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

Make = Callable[[int], Callable[[], object]]
"""Makes the inputs of a length, and gives the work on them."""

WARM = 256
"""The length of the inputs on which the work is done once before, for what is loaded when it is first used."""


def peak(name: str, length: int) -> float:
    """Bytes that the work `name` of the running benchmark takes above its inputs, at the most."""
    done = subprocess.run(
        [sys.executable, sys.argv[0], "--peak", name, str(length)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


def answer(works: Mapping[str, Make]) -> bool:
    """In a process that `peak` started: measure, print, and say so."""
    if sys.argv[1:2] != ["--peak"]:
        return False
    make, length = works[sys.argv[2]], int(sys.argv[3])
    make(min(WARM, length))()
    work = make(length)
    before = _from_now_on()
    work()
    print(_highest() - before)
    return True


def _from_now_on() -> int:
    """What is resident now, in bytes, and from now on the least that `_highest` says.

    Making the inputs may have taken more than the work on them will: Linux can be told to forget that.
    """
    forget = Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5")
    return _highest()


def _highest() -> int:
    """The most memory that was resident so far, in bytes.

    Linux hands getrusage's figure on from the process that started this one, and has its own elsewhere.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
