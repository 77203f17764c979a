"""`examine` over every decoder and encoder-decoder class of transformers, each in a process with a time limit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from ..errors import ConfigurationError
from .examination_report import KINDS
from .finding import Severity

COLUMNS = {
    "future": ("RUN101",),
    "documents": ("RUN102",),
    "padding": ("RUN103",),
    "left padding": ("RUN104",),
    "NaN": ("RUN110",),
    "right padding": ("RUN105",),
    "cache": ("RUN120",),
    "backends": ("RUN121",),
    "training": ("RUN122", "RUN123"),
    "batch": ("RUN107",),
}
"""Columns of the table, and the codes in each."""
TOKENS, ROWS = 72, 2
MOST_WAITING = 30
"""A process is killed after so many times its limit, when it neither ends nor can be interrupted."""


@dataclass(frozen=True)
class ZooEntry:
    """One class: its examination as `Examination.as_dict`, or why it could not be examined, and the seconds it took."""

    name: str
    examination: dict[str, Any] | None
    failure: str | None
    seconds: float

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings that are errors or warnings."""
        found = self.examination["findings"] if self.examination is not None else []
        return [one for one in found if one["severity"] != Severity.HINT.value]


@dataclass(frozen=True)
class ZooReport:
    """All classes, in alphabetic order."""

    entries: tuple[ZooEntry, ...]
    version: str
    seconds: float

    def as_dict(self) -> dict[str, Any]:
        """All fields, of plain types."""
        return asdict(self)

    @property
    def examined(self) -> tuple[ZooEntry, ...]:
        """The classes that ran."""
        return tuple(entry for entry in self.entries if entry.examination is not None)

    def counts(self) -> dict[str, tuple[int, int, int]]:
        """By column: classes with a finding, those that `regard.huggingface.swap` mends, and classes checked."""
        checked_by = {"future": "future", "documents": "documents", "cache": "cache", "backends": "backends"}
        checked_by |= {"training": "training", "batch": "batch"}
        result = {}
        for column, codes in COLUMNS.items():
            check = checked_by.get(column, "padding")
            having = [[one for one in entry.findings if one["code"] in codes] for entry in self.examined]
            mended = [all(one["mended_by_swap"] for one in found) for found in having if found]
            checked = [entry for entry in self.examined if entry.examination and check in entry.examination["checked"]]
            result[column] = (len(mended), sum(mended), len(checked))
        return result

    def summary(self) -> str:
        """One line for each column, and for the classes that did not run."""
        lines = [
            f"transformers {self.version}: {len(self.examined)} of {len(self.entries)} classes examined in "
            f"{self.seconds:.0f} s"
        ]
        for column, (found, mended, checked) in self.counts().items():
            lines.append(f"  {column}: {found} of {checked}" + (f", swap mends {mended}" if mended else ""))
        reasons = Counter((entry.failure or "").split(":")[0] for entry in self.entries if entry.examination is None)
        lines += [f"  not examined, {reason}: {count}" for reason, count in reasons.most_common()]
        return "\n".join(lines)

    def markdown(self) -> str:
        """The table of `docs/zoo.md`: a row for each class, and the evidence of each finding below."""
        lines = [
            "| class | " + " | ".join(COLUMNS) + " |",
            "| --- |" + " --- |" * len(COLUMNS),
        ]
        for entry in self.examined:
            cells = [self._cell(entry, codes) for codes in COLUMNS.values()]
            lines.append(f"| {entry.name} | " + " | ".join(cells) + " |")
        lines += ["", "## Evidence", ""]
        for entry in self.examined:
            if entry.findings:
                lines.append(f"- {entry.name}")
                lines += [f"    - {_words(one)}" for one in entry.findings]
        lines += ["", "## Not examined", ""]
        lines += [f"- {entry.name}: {entry.failure}" for entry in self.entries if entry.examination is None]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _cell(entry: ZooEntry, codes: tuple[str, ...]) -> str:
        found = [one for one in entry.findings if one["code"] in codes]
        if not found:
            return ""
        return "swap mends" if all(one["mended_by_swap"] for one in found) else "✗"


def _words(found: dict[str, Any]) -> str:
    evidence = found["evidence"]
    words = f"{found['code']} {KINDS[found['code']][0]}: {found['message']}"
    if evidence["by"] is not None:
        words += f" (output {evidence['moved']}, by {evidence['by']:.2g}, rounding {evidence['tolerance'] or 0:.1g})"
    if evidence["module"] is not None:
        file = (evidence["file"] or "").split("site-packages/")[-1]
        words += f", in `{evidence['module']}`, {file}:{evidence['line']}"
    if found["mended_by_swap"] is not None:
        words += "; swap mends it" if found["mended_by_swap"] else "; swap does not mend it"
    return words


def examine_class(name: str) -> dict[str, Any]:
    """The examination of one class of transformers with a tiny random configuration."""
    import warnings

    import torch

    from .examination import CHECKS, examine
    from .model_source import random_batch
    from .tiny_models import tiny_model

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = tiny_model(name)
    checks = [check for check in CHECKS if check not in ("heads", "sparse", "eager", "positions")]
    causal = True if "is_decoder" in vars(getattr(model, "config", None) or object) else None
    found = examine(model, random_batch(model, ROWS, TOKENS), packed=True, causal=causal, checks=checks)
    return found.as_dict()


def _limit_processor_time(seconds: float) -> None:
    """Raise TimeoutError in this process after so many seconds of processor time, where the system can; 0: never."""

    def stop(*_: object) -> None:
        raise TimeoutError(f"longer than {seconds:g} s of processor time")

    if hasattr(signal, "ITIMER_PROF"):
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _work(connection: Connection, seconds: float) -> None:
    """Examine the classes whose names arrive, until None does."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import transformers  # not in the time of the first class

    transformers.logging.set_verbosity_error()
    while (name := connection.recv()) is not None:
        try:
            _limit_processor_time(seconds)
            examination = examine_class(name)
            _limit_processor_time(0)
            connection.send((name, examination, None))
        except Exception as error:
            _limit_processor_time(0)
            first = (str(error).strip().splitlines() or [""])[0][:200]
            connection.send((name, None, first or type(error).__name__))


class Worker:
    """A process that examines one class at a time."""

    def __init__(self, seconds: float) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, seconds), daemon=True)
        self.process.start()
        theirs.close()
        self.name: str | None = None
        self.since = 0.0

    def begin(self, name: str) -> None:
        """Start on a class."""
        self.name, self.since = name, time.monotonic()
        self.connection.send(name)

    def end(self) -> None:
        """Stop the process."""
        self.process.kill()
        self.process.join()
        self.connection.close()


def examine_zoo(
    *, only: str | None = None, workers: int = 2, seconds: float = 60.0, on_done: Callable[[str], object] | None = None
) -> ZooReport:
    """Examine every class that transformers' automatic classes know as decoder or encoder-decoder.

    Args:
        only: text in the names of the classes to examine.
        workers: processes, each of one thread.
        seconds: processor time that a class may take; a process that cannot be interrupted is killed, and another
            started.
        on_done: called with a line for each class that is done.

    Raises:
        ConfigurationError: no class has `only` in its name, or no workers.
        MissingExtra: transformers is not installed.
    """
    import transformers

    from .tiny_models import class_names

    names = [name for name in class_names() if only is None or only.lower() in name.lower()]
    if not names or workers < 1 or seconds <= 0:
        raise ConfigurationError(f"nothing to examine: {len(names)} classes, {workers} workers, {seconds} seconds")
    start = time.monotonic()
    entries: list[ZooEntry] = []
    waiting, running = names[::-1], [Worker(seconds) for _ in range(min(workers, len(names)))]
    try:
        while waiting or any(worker.name for worker in running):
            for number, worker in enumerate(running):
                if worker.name is not None and time.monotonic() - worker.since > MOST_WAITING * seconds:
                    entries.append(ZooEntry(worker.name, None, f"does not end in {seconds:g} s", seconds))
                    _tell(on_done, entries[-1], len(entries), len(names))
                    worker.end()
                    running[number] = worker = Worker(seconds)
                if worker.name is None and waiting:
                    worker.begin(waiting.pop())
            busy = {worker.connection: worker for worker in running if worker.name is not None}
            for connection in wait(list(busy), timeout=1.0):
                worker = busy[connection]  # type: ignore[index]
                entries.append(_receive(worker))
                _tell(on_done, entries[-1], len(entries), len(names))
                if not worker.process.is_alive():
                    worker.end()
                    running[running.index(worker)] = Worker(seconds)
    finally:
        for worker in running:
            worker.end()
    entries.sort(key=lambda entry: entry.name)
    return ZooReport(tuple(entries), transformers.__version__, time.monotonic() - start)


def _receive(worker: Worker) -> ZooEntry:
    """What a worker sends, or that it is gone."""
    name, taken = worker.name or "", time.monotonic() - worker.since
    worker.name = None
    try:
        name, examination, failure = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(1)
        return ZooEntry(name, None, f"its process ended with code {worker.process.exitcode}", taken)
    return ZooEntry(name, examination, failure, taken)


def _tell(on_done: Callable[[str], object] | None, entry: ZooEntry, done: int, count: int) -> None:
    if on_done is None:
        return
    words = entry.failure or ", ".join(sorted({one["code"] for one in entry.findings})) or "nothing"
    on_done(f"{done}/{count} {entry.name} ({entry.seconds:.1f} s): {words}")
