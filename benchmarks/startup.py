"""CPU seconds of whole commands, beside `import torch` in a process of its own.

Goal: a sentence from the shell takes no more than `python -c "import torch"`. Then 200 sentences with one thread and
with two, while other processes keep every core busy: the waiting of threads must not cost CPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import _timing
from _report import met, table

SENTENCE = "The cat sleeps on the sofa."
COMMANDS = {
    "regard --version": ["--version"],
    "regard --help": ["--help"],
    "regard doctor FILE": ["doctor", __file__],
    "regard exercise write": ["exercise", "write", "causal-mask", "exercise.py"],
    "regard advise": ["advise", "--tokens", "1024"],
    "regard steps": ["steps", "I am tired."],
    "regard align": ["align", "--source", "source.txt", "--target", "target.txt", "--checkpoint", "english_french"],
    "regard explore --html": ["explore", "--translate", SENTENCE, "--html", "page.html"],
    "regard translate": ["translate", SENTENCE],
}
WITHIN = {"regard translate": 1.0}
"""The most that a command may take, as a share of `import torch`."""
PLACES = (
    "on the beach",
    "in front of a house",
    "in the park",
    "near the water",
    "on a street",
    "at home",
    "outside",
    "here",
)
LINES = [
    f"{who} {does} {where}."
    for who in ("A young woman", "An old man", "Two small dogs", "The boy in red", "A group of people")
    for does in ("is waiting", "is playing with a ball", "runs", "looks at a picture", "sits")
    for where in PLACES
]
"""200 lines of the kind that captions are."""


class Process(NamedTuple):
    """A process that is measured: its command line, what its standard input has, and its environment."""

    command: Sequence[str]
    lines: Sequence[str] = ()
    environment: Mapping[str, str] = {}

    def cpu_seconds(self, folder: Path) -> float:
        """CPU seconds of one run in a folder, by all its threads, start and exit included."""
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as said:
            given.write("".join(f"{line}\n" for line in self.lines).encode())
            given.seek(0)
            started = subprocess.Popen(
                self.command,
                stdin=given,
                stdout=subprocess.DEVNULL,
                stderr=said,
                cwd=folder,
                env=_environment(folder) | dict(self.environment),
            )
            _, status, used = os.wait4(started.pid, 0)
            started.returncode = os.waitstatus_to_exitcode(status)
            if started.returncode:
                said.seek(0)
                raise SystemExit(f"{self.command} failed: {said.read().decode()[-2000:]}")
        return used.ru_utime + used.ru_stime


def _environment(folder: Path) -> dict[str, str]:
    """With bytecode in the folder, as pip makes it where it installs: no source is compiled but in the first run."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return kept | {"PYTHONPYCACHEPREFIX": str(folder / "bytecode")}


def python(program: str) -> list[str]:
    return [sys.executable, "-c", program]


def regard(*arguments: str) -> list[str]:
    return [*python("from regard_command import main; main()"), *arguments]


def medians(processes: Mapping[str, Process], folder: Path, rounds: int) -> dict[str, float]:
    """Median CPU seconds of each: one round after another over all of them, each round in the other direction."""
    spent: dict[str, list[float]] = {name: [] for name in processes}
    for round_ in range(rounds + 1):
        for name in list(processes)[:: 1 if round_ % 2 else -1]:
            (folder / "exercise.py").unlink(missing_ok=True)
            seconds = processes[name].cpu_seconds(folder)
            if round_:  # the first one compiles the sources
                spent[name].append(seconds)
    return {name: statistics.median(each) for name, each in spent.items()}


@contextmanager
def busy_cores() -> Iterator[None]:
    """Keep every core busy with another process while the block runs."""
    others = [subprocess.Popen(python("while True: pass")) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


def commands(folder: Path, rounds: int) -> None:
    """One table of all commands."""
    processes = {
        "import torch": Process(python("import torch")),
        "import regard": Process(python("import regard")),
        **{name: Process(regard(*arguments)) for name, arguments in COMMANDS.items()},
    }
    found = medians(processes, folder, rounds)
    torch = found["import torch"]
    rows = [
        [name, f"{seconds:.2f} s", f"{seconds / torch:.2f}", met(round(seconds / torch, 2), WITHIN[name], most=True)]
        if name in WITHIN
        else [name, f"{seconds:.2f} s", f"{seconds / torch:.2f}", ""]
        for name, seconds in found.items()
    ]
    table("A process, start and exit included", ["process", "CPU", "of import torch", "goal"], rows)


def threads(folder: Path, rounds: int) -> None:
    """200 sentences with one thread and two, with cores that others use too."""
    processes = {
        "1 thread": Process(regard("translate"), LINES, {"OMP_NUM_THREADS": "1"}),
        "2 threads, asleep while they wait": Process(regard("translate"), LINES, {"OMP_NUM_THREADS": "2"}),
        "2 threads, awake": Process(regard("translate"), LINES, {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "ACTIVE"}),
    }
    with busy_cores():
        found = medians(processes, folder, rounds)
    rows = [[name, f"{seconds:.1f} s", f"{seconds / found['1 thread']:.2f}"] for name, seconds in found.items()]
    table("`regard translate` of 200 lines, every core busy", ["threads", "CPU", "of 1 thread"], rows)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    print(_timing.machine())
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "source.txt").write_text(f"{SENTENCE}\n", encoding="utf-8")
        (folder / "target.txt").write_text("Le chat dort sur le canapé.\n", encoding="utf-8")
        commands(folder, 3 if quick else 9)
        threads(folder, 1 if quick else 3)


if __name__ == "__main__":
    main()
