"""`examine` over every decoder and encoder-decoder class of transformers, each in a process with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import platform
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from regard_doctor.finding import Severity

from ..errors import ConfigurationError
from .examination_report import KINDS

COLUMNS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "future": ("future", ("RUN101",), ""),
    "documents": ("documents", ("RUN102",), "without a mask"),
    "documents, ones": ("documents", ("RUN102",), "with a mask of ones"),
    "padding": ("padding", ("RUN103",), ""),
    "left padding": ("padding", ("RUN104",), ""),
    "right padding": ("padding", ("RUN105",), ""),
    "NaN": ("padding", ("RUN110",), ""),
    "cache": ("cache", ("RUN120",), ""),
    "backends": ("backends", ("RUN121",), ""),
    "training": ("training", ("RUN122", "RUN123"), ""),
    "batch": ("batch", ("RUN107",), ""),
}
"""Columns of the table: the check that they come from, the codes in them, and words of their messages."""
MEANINGS = {
    "future": "outputs depend on later tokens",
    "documents": "two documents packed by `position_ids` that start again depend on each other, without a mask",
    "documents, ones": "the same with the mask of ones that tokenizers return",
    "padding": "outputs of tokens depend on which token the masked padding is",
    "left padding": "masked padding on the left changes the outputs of tokens",
    "right padding": "masked padding on the right changes the outputs of tokens",
    "NaN": "masked padding makes outputs of tokens NaN",
    "cache": "chunks, or single tokens, with a cache give other outputs than the sequence at once, or raise",
    "backends": "eager attention, SDPA and regard disagree, or regard raises",
    "training": "without dropout, `train()` and `eval()` disagree, or evaluation is random",
    "batch": "a row depends on another row",
}
"""The finding that each column counts."""
LEGEND = """\
Each class has two layers, a dim of 32 and random weights. ✗: a finding that `regard.huggingface.swap` does not remove,
or that it cannot be tried on; "swap mends": one that it removes; –: not checked, the model takes no such argument, or
its configuration is that of an encoder. A finding is a fact about a call, not always a fault: it may be made so."""
LEFT = """\
Attention modules that `regard.huggingface.swap` leaves as they are, and why. A class with no others is compared by
eager attention and SDPA alone."""
"""What the page says above the modules that swap leaves."""
CHECKED = ("random", "future", "documents", "padding", "source", "batch", "rows", "cache", "backends", "training")
"""Checks that random weights say something about."""
TOKENS, ROWS = 72, 2
MOST_WAITING = 30
"""A process is killed after so many times its limit, when it neither ends nor can be interrupted."""


@dataclass(frozen=True)
class ZooEntry:
    """One class: its examination as `Examination.as_dict`, or why it could not be examined, and its seconds.

    The examination also has `left`: by reason, how many attention modules `regard.huggingface.swap` leaves as they are.
    seconds: of processor time; of a process that was lost, on the clock.
    """

    name: str
    examination: dict[str, Any] | None
    failure: str | None
    seconds: float

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Findings that are errors or warnings."""
        found = self.examination["findings"] if self.examination is not None else []
        return [one for one in found if one["severity"] != Severity.HINT.value]

    @property
    def left(self) -> dict[str, int]:
        """By reason, the attention modules that swap leaves as they are."""
        return self.examination.get("left", {}) if self.examination is not None else {}


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
        result = {}
        for column, (check, _, _) in COLUMNS.items():
            having = [self._found(entry, column) for entry in self.examined]
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
        """The page `docs/zoo.md`: counts, a row for each class, and the evidence of each finding."""
        seconds = sum(entry.seconds for entry in self.entries)
        lines = [
            "# What examine finds in the models of transformers",
            "",
            f"`regard examine --zoo` on transformers {self.version}, torch {torch_version()}, {processor()}: "
            f"{len(self.examined)} of {len(self.entries)} classes run, in {seconds:.0f} seconds of processor time.",
            "",
            LEGEND,
            "",
            "| column | the finding |",
            "| --- | --- |",
            *(f"| {column} | {words} |" for column, words in MEANINGS.items()),
            "",
            "| column | classes checked | with a finding | of these mended by swap |",
            "| --- | --- | --- | --- |",
            *(f"| {name} | {checked} | {found} | {fine} |" for name, (found, fine, checked) in self.counts().items()),
            "",
            "## By class",
            "",
            "| class | " + " | ".join(COLUMNS) + " |",
            "| --- |" + " --- |" * len(COLUMNS),
        ]
        for entry in self.examined:
            cells = [self.cell(entry, column) for column in COLUMNS]
            lines.append(f"| {entry.name} | " + " | ".join(cells) + " |")
        lines += ["", "## Evidence", ""]
        for entry in self.examined:
            if entry.findings:
                lines.append(f"- {entry.name}")
                lines += [f"    - {_words(one)}" for one in entry.findings]
        lines += ["", "## What swap leaves to transformers", "", LEFT, ""]
        for entry in self.examined:
            lines += [f"- {entry.name}, {_modules(count)}: {reason}" for reason, count in entry.left.items()]
        lines += ["", "## Not examined", ""]
        lines += [f"- {entry.name}: {entry.failure}" for entry in self.entries if entry.examination is None]
        return "\n".join(lines) + "\n"

    @staticmethod
    def _found(entry: ZooEntry, column: str) -> list[dict[str, Any]]:
        _, codes, words = COLUMNS[column]
        return [one for one in entry.findings if one["code"] in codes and words in one["message"]]

    def cell(self, entry: ZooEntry, column: str) -> str:
        """What the table has for a class: ✗ for a finding, "swap mends", – where the check did not run, or nothing."""
        check, _, _ = COLUMNS[column]
        found = self._found(entry, column)
        if not found:
            return "" if entry.examination and check in entry.examination["checked"] else "–"
        return "swap mends" if all(one["mended_by_swap"] for one in found) else "✗"


def torch_version() -> str:
    """Version of torch."""
    import torch

    return torch.__version__


def processor() -> str:
    """The processor's name and how many there are, as the system says."""
    names = [line.partition(":")[2].strip() for line in _cpu_lines() if line.startswith("model name")]
    return f"{os.cpu_count()} × {names[0] if names else platform.processor() or platform.machine()}"


def _cpu_lines() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.is_file() else []


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


def _modules(count: int) -> str:
    return f"{count} module" + "s" * (count != 1)


def examine_class(name: str) -> dict[str, Any]:
    """The examination of one class of transformers with a tiny random configuration."""
    import warnings

    import torch

    from .examination import examine
    from .model_source import random_batch
    from .tiny_models import tiny_model

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model = tiny_model(name)
    causal = True if "is_decoder" in vars(getattr(model, "config", None) or object) else None
    found = examine(model, random_batch(model, ROWS, TOKENS), packed=True, causal=causal, checks=CHECKED)
    return found.as_dict() | {"left": left_by_swap(model)}


def left_by_swap(model: Any) -> dict[str, int]:
    """By reason, how many attention modules `regard.huggingface.swap` leaves as they are; it swaps the others."""
    from ..huggingface import swap

    return dict(Counter(swap(model).skipped.values()))


class OutOfTime(BaseException):
    """The limit of a class is reached; no Exception, which checks report as one of the model."""


def _limit_processor_time(seconds: float) -> None:
    """Raise OutOfTime in this process after so many seconds of processor time, where the system can; 0: never."""

    def stop(*_: object) -> None:
        raise OutOfTime(f"longer than {seconds:g} s of processor time")

    if hasattr(signal, "ITIMER_PROF"):
        signal.signal(signal.SIGPROF, stop)
        signal.setitimer(signal.ITIMER_PROF, seconds)


def _work(connection: Connection, seconds: float) -> None:
    """Examine the classes whose names arrive, until None does."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import transformers  # not in the time of the first class

    transformers.logging.set_verbosity_error()
    while (name := connection.recv()) is not None:
        examination = failure = None
        start = time.process_time()
        try:
            _limit_processor_time(seconds)
            examination = examine_class(name)
            _limit_processor_time(0)
        except (Exception, OutOfTime) as error:
            _limit_processor_time(0)
            failure = (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
        connection.send((name, examination, failure, time.process_time() - start))


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


def _stored(folder: Path | None, version: str) -> dict[str, ZooEntry]:
    """The classes that an earlier run of this version of transformers has examined, by name."""
    found = {}
    for path in sorted(folder.glob("*.json")) if folder is not None and folder.is_dir() else ():
        try:
            stored = json.loads(path.read_text("utf-8"))
            if stored.pop("version") == version and stored["examination"] is not None:
                found[stored["name"]] = ZooEntry(**stored)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigurationError(f"{path} is not the result of a class of the zoo: {error}; remove it") from error
    return found


def _store(folder: Path | None, entry: ZooEntry, version: str) -> None:
    """Write one class to the folder, whole or not at all."""
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{entry.name}.json"
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps({**asdict(entry), "version": version}, indent=1), "utf-8")
    partial.replace(path)


def examine_zoo(
    *,
    only: str | None = None,
    workers: int = 2,
    seconds: float = 60.0,
    folder: Path | None = None,
    on_done: Callable[[str], object] | None = None,
) -> ZooReport:
    """Examine every class that transformers' automatic classes know as decoder or encoder-decoder.

    Args:
        only: text in the names of the classes to examine.
        workers: processes, each of one thread.
        seconds: processor time that a class may take; a process that cannot be interrupted is killed, and another
            started.
        folder: where each class is stored as JSON when it is done; those in it are not examined again.
        on_done: called with a line for each class that is done.

    Raises:
        ConfigurationError: no class has `only` in its name, no workers, or a file in the folder is something else.
        MissingExtra: transformers is not installed.
    """
    import transformers

    from .tiny_models import class_names

    names = [name for name in class_names() if only is None or only.lower() in name.lower()]
    if not names or workers < 1 or seconds <= 0:
        raise ConfigurationError(f"nothing to examine: {len(names)} classes, {workers} workers, {seconds} seconds")
    start = time.monotonic()
    stored = _stored(folder, transformers.__version__)
    entries = [stored[name] for name in names if name in stored]
    waiting = [name for name in reversed(names) if name not in stored]

    def done(entry: ZooEntry) -> None:
        entries.append(entry)
        _store(folder, entry, transformers.__version__)
        _tell(on_done, entry, len(entries), len(names))

    running = [Worker(seconds) for _ in range(min(workers, len(waiting)))]
    try:
        while waiting or any(worker.name for worker in running):
            for number, worker in enumerate(running):
                if worker.name is not None and time.monotonic() - worker.since > MOST_WAITING * seconds:
                    done(ZooEntry(worker.name, None, f"does not end in {seconds:g} s", seconds))
                    worker.end()
                    running[number] = worker = Worker(seconds)
                if worker.name is None and waiting:
                    worker.begin(waiting.pop())
            busy = {worker.connection: worker for worker in running if worker.name is not None}
            for connection in wait(list(busy), timeout=1.0):
                worker = busy[connection]  # type: ignore[index]
                done(_receive(worker))
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
        name, examination, failure, taken = worker.connection.recv()
    except (EOFError, OSError):
        worker.process.join(1)
        return ZooEntry(name, None, f"its process ended with code {worker.process.exitcode}", taken)
    return ZooEntry(name, examination, failure, taken)


def _tell(on_done: Callable[[str], object] | None, entry: ZooEntry, done: int, count: int) -> None:
    if on_done is None:
        return
    words = entry.failure or ", ".join(sorted({one["code"] for one in entry.findings})) or "nothing"
    on_done(f"{done}/{count} {entry.name} ({entry.seconds:.1f} s): {words}")
