"""`examine` over every decoder and encoder-decoder class of transformers, each in a process with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from ..errors import ConfigurationError
from .zoo_report import ZooEntry, ZooReport

CHECKED = ("random", "future", "documents", "padding", "source", "batch", "rows", "cache", "backends", "training")
"""Checks that random weights say something about."""
TOKENS, ROWS = 72, 2
MOST_WAITING = 30
"""A process is killed after so many times its limit, when it neither ends nor can be interrupted."""


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
    """Examines one class at a time in a process of its own, and in another one when that is lost."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(theirs, self.seconds), daemon=True)
        self.process.start()
        theirs.close()

    def examine(self, name: str) -> ZooEntry:
        """A class, or why it could not be examined."""
        start = time.monotonic()
        try:
            self.connection.send(name)
            if self.connection.poll(MOST_WAITING * self.seconds):
                return ZooEntry(*self.connection.recv())
            failure = f"does not end in {self.seconds:g} s"
        except (EOFError, OSError):
            self.process.join(1)
            failure = f"its process ended with code {self.process.exitcode}"
        self.end()
        self._start()
        return ZooEntry(name, None, failure, time.monotonic() - start)

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
    waiting = [name for name in names if name not in stored]
    pool = [Worker(seconds) for _ in range(min(workers, len(waiting)))]
    free: SimpleQueue[Worker] = SimpleQueue()
    for worker in pool:
        free.put(worker)

    def examined(name: str) -> ZooEntry:
        worker = free.get()
        try:
            return worker.examine(name)
        finally:
            free.put(worker)

    try:
        with ThreadPool(max(len(pool), 1)) as threads:
            for entry in threads.imap_unordered(examined, waiting):
                entries.append(entry)
                _store(folder, entry, transformers.__version__)
                _tell(on_done, entry, len(entries), len(names))
    finally:
        for worker in pool:
            worker.end()
    entries.sort(key=lambda entry: entry.name)
    return ZooReport(tuple(entries), transformers.__version__, time.monotonic() - start)


def _tell(on_done: Callable[[str], object] | None, entry: ZooEntry, done: int, count: int) -> None:
    if on_done is None:
        return
    words = entry.failure or ", ".join(sorted({one["code"] for one in entry.findings})) or "nothing"
    on_done(f"{done}/{count} {entry.name} ({entry.seconds:.1f} s): {words}")
