"""Train a translator: `train` from an experiment to a run folder, `fit` from a model and text in memory.

The LightningModule, `Training`, is in lightning_module.py: what an update does, and what of it is saved.
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng
from rich.console import Console
from torch import nn

from regard.errors import ConfigurationError
from regard.translation.batches import EncodedText
from regard.translation.callbacks import EndOnSignal, Interrupted, LogMetrics, SaveRun, SignalHandler, SpinningThreads
from regard.translation.experiment import Experiment
from regard.translation.lightning_module import SafetensorsIO, Training
from regard.translation.run_folder import RunFolder
from regard.translation.run_setup import Resume, prepare, refuse_other_run
from regard.translation.settings import TrainingSettings
from regard.translation.terminal import ProgressBar, ProgressLines


@dataclass(frozen=True)
class TrainingResult:
    """Result of a run, over all the times it was resumed."""

    folder: Path | None
    best_score: float | None
    """Cross entropy per target token of the best validation; None without validation text."""
    epochs: int
    """Epochs completed."""
    updates: int
    seconds: float
    """Spent on updates: without validating and saving."""
    target_tokens_per_second: float


def train(
    experiment: Experiment, folder: str | Path, *, resume: Resume = "auto", verbose: bool | None = None
) -> TrainingResult:
    """Train the model of an experiment, and save the run in a folder.

    The folder gets experiment.yaml, both vocabularies (learned from the training text), best.safetensors and
    last.safetensors (weights alone), state/ (all that resuming needs) and logs/ (TensorBoard). A run that was killed
    goes on with the same call and comes to the same weights, bit for bit, as one that was not; a run that has ended
    stays as it is, unless it is given more epochs, minutes or patience. `resume="never"` refuses a folder that holds
    a run, `"must"` one that has no state to go on from. One process at a time trains in a folder.

    Progress goes to standard output: a bar if that is a terminal; otherwise a line at each validation, and every
    half minute, if `verbose` is true. With `verbose=False` there is neither.

    Raises:
        ConfigurationError: the folder holds a run of other settings (their keys are named), or the settings cannot be
            met on this machine.
        CorpusError, VocabularyError: the text cannot be read or used.
        CheckpointError: there is nothing to resume or to start from, the state is damaged or of other text, another
            process trains in the folder, or the disk is full.
        KeyboardInterrupt: Ctrl-C; the state after the last update has been saved.
        SystemExit: the same for SIGTERM, which clusters send before they take a machine away; its code is 143.
    """
    run = RunFolder(Path(folder))
    with ExitStack() as held:
        found = run.path.is_dir()
        if found:
            held.enter_context(_only_training_in(run))  # now, and not after minutes spent on the text
        prepared = prepare(experiment, run, resume)
        if not found:
            held.enter_context(_only_training_in(run))
            refuse_other_run(run, experiment, resume)  # which may have begun in the meantime
        prepared.write(run, experiment)
        return _fit(
            prepared.model,
            prepared.text,
            experiment.training,
            validation=prepared.validation,
            seed=experiment.seed,
            run=run,
            about=prepared.about,
            callbacks=_displays(verbose),
        )


def _only_training_in(run: RunFolder) -> AbstractContextManager[None]:
    """Lock the folder of a run; of several processes the first locks it for all."""
    return run.locked() if rank_zero_only.rank == 0 else nullcontext()


def _displays(verbose: bool | None) -> list[Callback]:
    """The callback that shows the progress, if any: a bar in a terminal, lines elsewhere."""
    if rank_zero_only.rank != 0 or verbose is False:
        return []
    if sys.stdout.isatty():
        return [ProgressBar(Console(file=sys.stdout))]
    return [ProgressLines(sys.stdout)] if verbose else []


def fit(
    model: nn.Module,
    text: EncodedText,
    settings: TrainingSettings,
    *,
    validation: EncodedText | None = None,
    seed: int = 1,
    folder: str | Path | None = None,
    about: Mapping[str, Any] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainingResult:
    """Train a model on text in memory; afterwards it has the last weights.

    `model(source [B, S], source_lengths [B], target_input [B, T])` gives logits [B, T, V]. With a `folder` the run
    saves there, and goes on from there if it has a state; without one nothing is written. `about` goes into the
    header of the saved weights. The state of the random generators is as before when it returns.

    Raises:
        ConfigurationError: the folder's state is of other settings (their keys are named), or the settings cannot be
            met on this machine.
        CheckpointError, KeyboardInterrupt, SystemExit: as for `train`.
    """
    if folder is None:
        return _fit(model, text, settings, validation, seed, None, about, callbacks)
    run = RunFolder(Path(folder))
    with _only_training_in(run):
        return _fit(model, text, settings, validation, seed, run, about, callbacks)


def _fit(
    model: nn.Module,
    text: EncodedText,
    settings: TrainingSettings,
    validation: EncodedText | None,
    seed: int,
    run: RunFolder | None,
    about: Mapping[str, Any] | None,
    callbacks: Sequence[Callback],
) -> TrainingResult:
    """Train in a folder that is locked, or without one."""
    training = Training(model, text, validation, settings, seed=seed)
    saving = SaveRun(run, settings.save_every, about or {}) if run else None
    with quiet_lightning(), isolate_rng(), SignalHandler() as interrupt:
        limit = timedelta(minutes=settings.max_minutes) if settings.max_minutes else None
        # The timer is there without a limit too: a run that is resumed can be given one, and its time counts from 0.
        timer = Timer(limit, verbose=False)
        parts = [
            *callbacks,
            timer,
            LogMetrics(),
            SpinningThreads(),
            EndOnSignal(interrupt, saving),
            *([saving] if saving else []),
        ]
        trainer = _build_trainer(settings, run, parts, validates=validation is not None)
        state = str(run.state) if run and run.state.exists() else None
        with suppress(Interrupted):
            trainer.fit(training, ckpt_path=state)
        if interrupt.received:  # also while the last of a run was saved: the wish was that the caller ends
            raise interrupt.error()
    progress = training.progress
    return TrainingResult(
        folder=run.path if run else None,
        best_score=progress.best_score,
        epochs=progress.position.epoch,
        updates=progress.position.update,
        seconds=progress.seconds,
        target_tokens_per_second=progress.target_tokens / progress.seconds if progress.seconds else 0.0,
    )


def _build_trainer(
    settings: TrainingSettings, run: RunFolder | None, callbacks: list[Callback], *, validates: bool
) -> Trainer:
    try:
        return Trainer(
            accelerator=settings.accelerator,
            devices=settings.devices,
            num_nodes=settings.num_nodes,
            strategy=settings.strategy,
            precision=settings.precision,
            gradient_clip_val=settings.clip_norm,
            max_epochs=-1,  # the module ends the run by its own count of epochs
            limit_val_batches=1.0 if validates else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # the batches are shared out already
            callbacks=callbacks,
            plugins=[SafetensorsIO()],
            logger=TensorBoardLogger(run.path, name="", version=run.logs.name) if run else False,
            default_root_dir=run.path if run else None,
            enable_checkpointing=run is not None,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (
        MisconfigurationException,
        ValueError,
        RuntimeError,
        TypeError,
    ) as error:  # Lightning's own words for what this machine lacks
        named = ", ".join(
            f"{key} {getattr(settings, key)!r}" for key in ("accelerator", "devices", "strategy", "precision")
        )
        raise ConfigurationError(f"training cannot start with {named}: {error}") from error


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Suppress Lightning's messages about the machine, and a warning about its own code."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning asks torch for tree specs in a way that torch will drop; it is theirs to mend.
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
