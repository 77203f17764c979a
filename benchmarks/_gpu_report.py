"""A report that is printed as it is measured: lines of Markdown, tables row by row, and the time that sections have."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

MEASURED = "<!-- below: as benchmarks/gpu.py prints it -->"
"""The line of a page below which a report is put."""


class Report:
    """Prints each line at once, and keeps it for a file."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def line(self, text: str = "") -> None:
        self.lines.append(text)
        print(text, flush=True)

    def section(self, title: str) -> None:
        self.line(f"\n### {title}\n")

    def columns(self, *names: str) -> None:
        self.row(*names)
        self.row(*["---"] * len(names))

    def row(self, *cells: str) -> None:
        self.line(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |")

    def write(self, file: Path) -> None:
        """Write all lines so far; what stands in the file above `MEASURED` stays."""
        before, found, _ = (file.read_text("utf-8") if file.exists() else "").partition(MEASURED)
        text = "\n".join(self.lines).strip() + "\n"
        file.write_text(f"{before}{MEASURED}\n\n{text}" if found else text, "utf-8")


class OutOfTimeError(BaseException):
    """What is measured takes more time than is left; no handler of errors in it takes this for one of its own."""


class Budget:
    """The seconds of sections, as shares of a total; what one leaves goes to those after it.

    >>> budget = Budget({"a": 1, "b": 3}, total=8, now=lambda: 100.0)
    >>> budget.open("a"), budget.open("b")
    (2.0, 8.0)
    """

    def __init__(self, shares: Mapping[str, float], total: float, now: Callable[[], float] = time.monotonic) -> None:
        self.now, self.began, self.deadline = now, now(), now()
        self.seconds = {name: share * total / sum(shares.values()) for name, share in shares.items()}

    def open(self, name: str) -> float:
        """Begin a section; the seconds that it has."""
        before = list(self.seconds).index(name) + 1
        self.deadline = self.began + sum(list(self.seconds.values())[:before])
        return self.left()

    def left(self) -> float:
        """The seconds that are left of the section."""
        return self.deadline - self.now()


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raise OutOfTimeError in the block once it has taken so many seconds, where it returns to Python.

    Raises:
        OutOfTimeError: no time is left.
    """
    if seconds <= 0:
        raise OutOfTimeError("no time was left")

    def stop(number: int, frame: FrameType | None) -> None:
        raise OutOfTimeError(f"it took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def described(error: BaseException) -> str:
    """The kind of an error and the first line of its message, in the cell of a table."""
    lines = str(error).strip().splitlines()
    return f"**{type(error).__name__}**" + (f": {lines[0][:200]}" if lines else "")


def chosen(only: str | None, names: Sequence[str]) -> list[str]:
    """The sections that an argument names, with commas between them, in the order of the report; all without one.

    Raises:
        ValueError: a name that there is not; the message has all.
    """
    if only is None:
        return list(names)
    wanted = [name.strip() for name in only.split(",")]
    if unknown := [name for name in wanted if name not in names]:
        raise ValueError(f"there is no section {unknown[0]!r}: there are {', '.join(names)}")
    return [name for name in names if name in wanted]
