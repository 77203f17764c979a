"""`examine` over every decoder and encoder-decoder class of transformers, each in a process with a time limit."""

from __future__ import annotations

import json
import multiprocessing
import signal
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigurationError, require
from .examination import examine
from .model_source import random_batch
from .tiny_models import class_names, tiny_model
from .zoo_report import ZooEntry, ZooReport

CHECKED = ("random", "future", "documents", "padding", "source", "batch", "rows", "cache", "backends", "training")
"""Checks that random weights say something about."""
TOKENS, ROWS = 72, 2
MOST_WAITING = 30
"""A process is killed after so many times its limit on the clock, when it waits for something that does not come."""


def examine_class(name: str) -> dict[str, Any]:
    """The examination of one class of transformers with a tiny random configuration."""
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


def _work(connection: Connection, name: str, seconds: float) -> None:
    """Examine a class, and send it as the fields of a ZooEntry; a timer ends the process after so many seconds."""
    import transformers

    transformers.logging.set_verbosity_error()
    examination = failure = None
    start = time.process_time()
    if hasattr(signal, "ITIMER_PROF"):
        signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        examination = examine_class(name)
    except Exception as error:
        failure = (str(error).strip().splitlines() or [""])[0][:200] or type(error).__name__
    connection.send((name, examination, failure, time.process_time() - start))


def _examined(name: str, seconds: float) -> ZooEntry:
    """A class, examined in a process of its own, or why it could not be."""
    context, start = _processes(), time.monotonic()
    connection, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(theirs, name, seconds), daemon=True)
    process.start()
    theirs.close()
    failure = f"does not end in {seconds:g} s"
    try:
        if connection.poll(MOST_WAITING * seconds):
            return ZooEntry(*connection.recv())
    except (EOFError, OSError):
        process.join(1)
        failure = f"its process ended with code {process.exitcode}"
        if hasattr(signal, "SIGPROF") and process.exitcode == -signal.SIGPROF:
            failure = f"longer than {seconds:g} s of processor time"
    finally:
        process.kill()
        process.join()
        connection.close()
    return ZooEntry(name, None, failure, time.monotonic() - start)


def _processes() -> Any:
    """The way to start processes: copies of one that has loaded transformers, where the system has them."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "regard.huggingface"])
    return context


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
        seconds: processor time that a class may take.
        folder: where each class is stored as JSON when it is done; those in it are not examined again.
        on_done: called with a line for each class that is done.

    Raises:
        ConfigurationError: no class has `only` in its name, no workers, or a file in the folder is something else.
        MissingExtra: transformers is not installed.
    """
    version = require("transformers", extra="huggingface").__version__
    names = [name for name in class_names() if only is None or only.lower() in name.lower()]
    if not names or workers < 1 or seconds <= 0:
        raise ConfigurationError(f"nothing to examine: {len(names)} classes, {workers} workers, {seconds} seconds")
    start = time.monotonic()
    stored = _stored(folder, version)
    entries = [stored[name] for name in names if name in stored]
    waiting = [name for name in names if name not in stored]
    with ThreadPool(workers) as threads:
        for entry in threads.imap_unordered(partial(_examined, seconds=seconds), waiting):
            entries.append(entry)
            _store(folder, entry, version)
            _tell(on_done, entry, len(entries), len(names))
    entries.sort(key=lambda entry: entry.name)
    return ZooReport(tuple(entries), version, time.monotonic() - start)


def _tell(on_done: Callable[[str], object] | None, entry: ZooEntry, done: int, count: int) -> None:
    if on_done is None:
        return
    words = entry.failure or ", ".join(sorted({one["code"] for one in entry.findings})) or "nothing"
    on_done(f"{done}/{count} {entry.name} ({entry.seconds:.1f} s): {words}")
