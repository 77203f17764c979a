"""The runs of a comparison: which are done, and the others, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from regard.comparison.comparison_report import ComparisonReport, VariantRuns
from regard.comparison.recipe import Recipe
from regard.comparison.run_record import RunKey, RunRecord, file_checksums
from regard.comparison.single_run import Job, run_job
from regard.comparison.variants import Variant, make_variants
from regard.errors import ConfigurationError, RegardError
from regard.translation.settings import RecurrentSettings

RUNS = "runs"
"""The folder of runs within that of a comparison: a folder and a file of JSON for each."""

Progress = Callable[[str], None]


def compare(
    recipe: Recipe, folder: str | Path, *, workers: int = 1, progress: Progress | None = None
) -> ComparisonReport:
    """Train and measure every variant of a recipe with every seed; runs that are done already are not done again.

    Each run has a file in `folder`/runs with its settings: one of other settings, or on other text, is not used. What
    is killed loses the updates of its runs since they were last saved. Runs are in processes of their own, each on one
    thread.

    Args:
        recipe: returned by `load_recipe`.
        folder: of the comparison; made if it is not there.
        workers: runs at once. Their times are then not those of a quiet machine.
        progress: gets a line for each run.

    Raises:
        ConfigurationError: as for `make_variants`; fewer than one worker; gradients of models without projections.
        CorpusError: the text cannot be read.
        CheckpointError: the folder cannot be written.
    """
    folder = Path(folder)
    say = progress or (lambda line: None)
    if workers < 1:
        raise ConfigurationError(f"workers is {workers}; it needs at least 1")
    recipe = recipe.with_corpus(folder)
    variants = make_variants(recipe)
    results = {variant.name: VariantRuns(variant.name, dict(variant.values), variant.reason) for variant in variants}
    for variant in variants:
        if variant.reason is not None:
            say(f"{variant.name} cannot be trained: {variant.reason}")
    waiting: list[Job] = []
    for job in [job for seed in recipe.compare.seeds for job in make_jobs(recipe, variants, seed, folder)]:
        if (done := RunRecord.load(job.record, job.key)) is not None:
            results[job.variant].records[job.seed] = done
        else:
            waiting.append(job)
    found = sum(len(one.records) for one in results.values())
    if found:
        say(f"{found} of {found + len(waiting)} runs are there already")
    report = ComparisonReport(recipe, list(results.values()), workers)
    for finished, (job, outcome) in enumerate(_run_all(waiting, workers), start=found + 1):
        if isinstance(outcome, RunRecord):
            results[job.variant].records[job.seed] = outcome
            say(f"run {finished} of {found + len(waiting)}: {report.line(job.variant, job.seed)}")
        elif results[job.variant].reason is None:
            results[job.variant].reason = outcome
            say(f"{job.variant} cannot be trained: {outcome}")
    return report


def make_jobs(recipe: Recipe, variants: Sequence[Variant], seed: int, folder: Path) -> Iterator[Job]:
    """The runs of all variants with one seed, but of those that cannot be trained.

    Raises:
        ConfigurationError: gradients are to be measured of models without projections.
        CorpusError: a file cannot be read.
    """
    settings = recipe.compare
    for variant in variants:
        if variant.experiment is None:
            continue
        if settings.gradients and isinstance(getattr(variant.experiment, "model", None), RecurrentSettings):
            raise ConfigurationError(
                f"{recipe.origin}: compare.gradients measures query and key projections, and the recurrent model of "
                f"the variant {variant.name!r} has none: leave it out, or compare models of kind transformer"
            )
        experiment = variant.experiment.model_copy(update={"seed": seed})
        dumped = experiment.model_dump(mode="json")
        del dumped["name"], dumped["data"]["folder"]
        measured = {
            "measure": recipe.measure,
            "lengths": bool(settings.lengths),
            "decode": settings.decode,
            "gradients": settings.gradients,
        }
        key = RunKey(dumped, measured, file_checksums(experiment))
        name = f"{re.sub(r'[^0-9A-Za-z.]+', '-', variant.name).strip('-.')[:60]}-{seed}-{key.digest}"
        runs = folder / RUNS
        yield Job(
            variant.name, seed, experiment, key, runs / name, runs / f"{name}.json", recipe.measure,
            bool(settings.lengths), settings.decode, settings.gradients,
        )  # fmt: skip


@dataclass(frozen=True)
class _Running:
    job: Job
    process: Any
    answers: Connection


def _run_all(jobs: Sequence[Job], workers: int) -> Iterator[tuple[Job, RunRecord | str]]:
    """Run jobs in processes, as many at once; yield each with its record, or with why there is none.

    A variant that cannot be trained with one seed is not tried with the others.
    """
    waiting, running, refused = deque(jobs), {}, set()
    try:
        while waiting or running:
            while waiting and len(running) < workers:
                job = waiting.popleft()
                if job.variant not in refused:
                    started = _start(job)
                    running[started.answers] = started
            for answers in wait(list(running)) if running else ():
                done = running.pop(answers)
                outcome = _outcome(done)
                if isinstance(outcome, str):
                    refused.add(done.job.variant)
                yield done.job, outcome
    finally:
        for left in running.values():
            left.process.terminate()  # its training saves its state
        for left in running.values():
            left.process.join(10)
            left.process.kill()


def _start(job: Job) -> _Running:
    """Start a process for a run: forked from one that has torch loaded and no threads, where that can be."""
    if "forkserver" in multiprocessing.get_all_start_methods():
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
    else:
        context = multiprocessing.get_context("spawn")
    answers, own = context.Pipe(duplex=False)
    process = context.Process(target=_run_in_process, args=(job, own), daemon=True)
    process.start()
    own.close()
    return _Running(job, process, answers)


def _outcome(done: _Running) -> RunRecord | str:
    try:
        refusal = done.answers.recv()
    except EOFError:
        done.process.join()
        return f"its process ended with code {done.process.exitcode}, which is a kill, or too little memory"
    done.process.join()
    if refusal is not None:
        return refusal
    record = RunRecord.load(done.job.record, done.job.key)
    return f"{done.job.record} cannot be read again" if record is None else record


def _run_in_process(job: Job, answers: Connection) -> None:
    """Run a job; send None when its record is written, else the message that says why it is not."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_job(job)
    except KeyboardInterrupt:  # the terminal sends it to the parent, too, which says so
        sys.exit(130)
    except RegardError as error:
        answers.send(" ".join(str(error).split()))
    except Exception as error:
        traceback.print_exc()
        answers.send(f"{type(error).__name__}: {error}")
    else:
        answers.send(None)


def _end_with_parent() -> None:
    """End this process when its parent is gone: a comparison that is killed leaves nothing running."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)  # the training saves its state
        threading.Event().wait(30)
        sys.stderr.flush()
        os._exit(1)
