"""Sections that run in a process of their own: one that crashes, or hangs, takes no other section with it.

After an illegal memory access CUDA refuses all further calls of a process, and a kernel that never ends cannot be
stopped from Python. So what is left begins in a new process then.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from _gpu_report import Report

SILENT, GRACE = 100.0, 15.0
"""Seconds without a line after which a process hangs, and those that it may take beyond its time."""
LEAST = 5.0
"""Seconds that are worth a new process."""
Command = Callable[[Sequence[str], float], list[str]]
"""The command that runs some sections in so many seconds."""


def run_watched(
    command: Command, titles: Mapping[str, str], budget: float, report: Report, kept: Callable[[], None]
) -> None:
    """Run the sections that have titles, in a process, and those after one that ends badly in a new one.

    kept: called after each line of the report.
    """
    ends, left = time.monotonic() + budget, list(titles)
    while left and ends - time.monotonic() > LEAST:
        begun, fault = _follow(command(left, ends - time.monotonic()), ends, titles, report, kept)
        if fault is None:
            return
        report.line(f"\nThis section ended: {fault}. What is after it runs in a new process.")
        kept()
        left = left[left.index(begun) + 1 if begun in left else 1 :]


def _follow(
    command: list[str], ends: float, titles: Mapping[str, str], report: Report, kept: Callable[[], None]
) -> tuple[str | None, str | None]:
    """The section that a process began last, and how it ended badly; None if well."""
    names, lines, begun = {f"### {title}": name for name, title in titles.items()}, queue.Queue[str | None](), None
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, errors="replace", start_new_session=True)
    assert process.stdout is not None
    reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
    reader.start()
    try:
        while (line := lines.get(timeout=max(min(SILENT, ends + GRACE - time.monotonic()), 0.0))) is not None:
            begun = names.get(line.strip(), begun)
            report.line(line)
            kept()
        code = process.wait()
        return begun, None if code == 0 else f"its process ended with {code}"
    except queue.Empty:
        return begun, "it neither printed nor ended any more, and was killed"
    finally:
        _end(process)
        reader.join()


def _end(process: subprocess.Popen[str]) -> None:
    """Kill a process and those that it has begun, which may be compiling."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _read(printed: IO[str], lines: queue.Queue[str | None]) -> None:
    with printed:
        for line in printed:
            lines.put(line.rstrip("\n"))
    lines.put(None)
