"""What a GPU computes and how fast: agreement, waits, tests marked `cuda`, and each row of work beside its peer.

    python benchmarks/gpu.py [--only card,decode] [--budget 480] [--out docs/gpu.md]

It needs a CUDA device, torch from 2.11 on with Triton, and this checkout. pytest, flash-linear-attention and
transformers are left out where they are missing. It ends after eight minutes at most: each section has a share, the
smallest come first, each row is printed and kept as soon as it is measured, and a row that fails is printed with its
error. What follows a section that crashes or hangs runs in a new process.
Ratios are the peer's time over ours, medians of both sides in turn in one run; memory is the peak above the inputs.
`make gpu` calls it.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "benchmarks")]

import torch  # noqa: E402  # regard and this folder are found from here on
from _gpu_checks import Left, agreement, calls, explained, waits  # noqa: E402
from _gpu_report import Budget, OutOfTimeError, Report, at_most, chosen, described  # noqa: E402
from _gpu_rows import PARTS  # noqa: E402
from _gpu_tests import run_marked  # noqa: E402
from _gpu_timing import COLUMNS, measured, milliseconds  # noqa: E402
from _gpu_watch import run_watched  # noqa: E402

SECONDS, ROW_SECONDS = 480.0, 60
"""The most that all of it takes, and a row with what is compiled for it."""


def card(report: Report, left: Left) -> None:
    """The card, the driver, the versions, and what it copies and multiplies."""
    report.columns("", "")
    properties = torch.cuda.get_device_properties(0)
    report.row("card", f"{properties.name}, compute capability {properties.major}.{properties.minor}")
    report.row(
        "memory", f"{properties.total_memory / 2**30:.0f} GiB, {properties.multi_processor_count} multiprocessors"
    )
    report.row("driver", asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"))
    report.row("versions", f"Python {sys.version.split()[0]}, torch {torch.__version__}, Triton {triton_version()}")
    report.row("commit", asked("git", "-C", str(ROOT), "log", "-1", "--format=%h of %cs"))
    both = torch.empty(2, 2**29, dtype=torch.uint8, device="cuda")
    spent = milliseconds(lambda: both[0].copy_(both[1]))
    report.row("copies", f"{2 * both[0].nbytes / spent / 1e6:,.0f} GB/s, read and written")
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16)
    report.row("multiplies", f"{2 * 8192**3 / milliseconds(lambda: a @ b) / 1e9:,.0f} TFLOP/s in bfloat16")


def asked(*command: str) -> str:
    """The first line that a command prints."""
    try:
        printed = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return printed.strip().split("\n")[0] or "unknown"


def triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "missing"
    return triton.__version__


def marked_tests(report: Report, left: Left) -> None:
    """The tests marked `cuda`, by pytest in this process; a bare machine need not have what other tests import."""
    report.columns("failed", "error")
    with at_most(left()):
        counts = run_marked(ROOT, "cuda", left, report.row)
    report.line(f"\n{', '.join(f'{number} {name}' for name, number in counts.items()) or 'no test was run'}")


def part(name: str) -> Callable[[Report, Left], None]:
    """The section that measures the rows of a part."""

    def section(report: Report, left: Left) -> None:
        report.columns(*COLUMNS)
        for row in PARTS[name]():
            try:
                with at_most(min(left(), ROW_SECONDS)):
                    cells = measured(row)
            except (Exception, OutOfTimeError) as error:
                cells = [described(error)]
            report.row(row.work, row.peer, *cells, *[""] * (len(COLUMNS) - 2 - len(cells)))
            torch.cuda.empty_cache()

    return section


Section = Callable[[Report, Left], None]
PART_SECONDS = {
    "small": 12,
    "decode": 12,
    "dense": 20,
    "lenses": 20,
    "additive": 20,
    "dropout": 10,
    "bias": 50,
    "masks": 70,
    "model": 35,
    "linear": 40,
}
"""The seconds of each part of the table."""
SECTIONS: dict[str, tuple[str, float, Section]] = {
    "card": ("Card", 8, card),
    "agreement": ("Agreement with float64", 60, agreement),
    "waits": ("Waits for the device", 15, waits),
    "calls": ("Small calls", 8, calls),
    **{name: (f"Rows: {name}", seconds, part(name)) for name, seconds in PART_SECONDS.items()},
    "tests": ("Tests marked `cuda`", 80, marked_tests),
    "explain": ("Plans", 5, explained),
}
"""The title of each section, the seconds that it has of 480 or so, and what it is."""


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help=f"sections, with commas between them: {', '.join(SECTIONS)}")
    parser.add_argument("--budget", type=float, default=SECONDS, help="seconds in all; 480 without it")
    parser.add_argument("--out", type=Path, help="a file for the Markdown")
    parser.add_argument("--here", action="store_true", help="in this process, in which no section outlives a crash")
    found = parser.parse_args(given)
    try:
        found.sections = chosen(found.only, list(SECTIONS))
    except ValueError as error:
        parser.error(str(error))
    if not 0 < found.budget < math.inf:
        parser.error(f"--budget is {found.budget:g}; it needs seconds, more than 0")
    if found.out is not None and not found.out.parent.is_dir():
        parser.error(f"--out {found.out}: there is no folder {found.out.parent}")
    return found


LOST = 3
"""What a process ends with whose device computes nothing any more."""


def run(sections: list[str], budget: float, report: Report) -> None:
    """Each section in its time; one that fails is said to have failed, and the next one begins.

    Raises:
        SystemExit: the device is lost to this process.
    """
    times = Budget({name: SECTIONS[name][1] for name in sections}, budget)
    for name in sections:
        title, _, section = SECTIONS[name]
        report.section(title)
        times.open(name)
        try:
            section(report, times.left)
        except (Exception, OutOfTimeError) as error:
            report.line(f"\nThis section failed: {described(error)}")
        if is_lost():
            raise SystemExit(LOST)


def is_lost() -> bool:
    """Whether CUDA refuses all further calls of this process."""
    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def command(sections: Sequence[str], seconds: float) -> list[str]:
    """What runs some sections in a process of its own."""
    options = ["--here", "--only", ",".join(sections), "--budget", f"{seconds:.1f}"]
    return [sys.executable, str(Path(__file__).resolve()), *options]


def main(given: list[str] | None = None) -> None:
    found = arguments(given)
    if not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        print(
            f"benchmarks/gpu.py needs a CUDA device: torch {torch.__version__}, built for {built}, finds none",
            file=sys.stderr,
        )
        raise SystemExit(2)
    began, report = time.monotonic(), Report()
    if found.here:
        run(found.sections, found.budget, report)
        return

    def keep() -> None:
        if found.out is not None:
            report.write(found.out)

    titles = {name: SECTIONS[name][0] for name in found.sections}
    run_watched(command, titles, found.budget, report, keep)
    report.line(f"\nMeasured in {time.monotonic() - began:.0f} s.")
    keep()


if __name__ == "__main__":
    main()
