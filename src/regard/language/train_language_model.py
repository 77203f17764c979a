"""Train a language model: from an experiment to a run folder, in one process or in those that torchrun started."""

from __future__ import annotations

import os
import sys
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, Timer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.seed import isolate_rng

from regard.errors import CheckpointError, ConfigurationError
from regard.language.language_experiment import MAY_CHANGE_LATER, MAY_CHANGE_WITHOUT_DECAY, LanguageExperiment
from regard.language.long_text import LongText
from regard.language.sequence_training import SequenceTraining, rate_of_update
from regard.models import LanguageModel
from regard.translation.callbacks import Interrupted, SignalHandler
from regard.translation.lightning_module import SafetensorsIO
from regard.translation.run_folder import RunFolder
from regard.translation.training import quiet_lightning

MODEL = "model"
"""The folder of the model within that of its run."""


@dataclass(frozen=True)
class LanguageTrainingResult:
    """Result of a run, over all the times it was resumed."""

    folder: Path
    updates: int
    seconds: float
    """Spent on updates: without validating and saving."""
    bits_per_byte: float | None
    """Of the latest validation; None without held-out text."""
    tokens_per_second: float


def train_language_model(
    experiment: LanguageExperiment, folder: str | Path, *, verbose: bool = True
) -> LanguageTrainingResult:
    """Train the model of an experiment, and save the run in a folder; every process that torchrun started calls it.

    A run that was interrupted goes on with the same call and comes to the same weights; one that has ended stays as it
    is. With `verbose` rank 0 writes lines of progress to standard output.

    Raises:
        ConfigurationError: the folder holds a run of other settings (their keys are named), a ring has no processes or
            more than the sequences have tokens, rings do not divide the processes, or the text is too short.
        CorpusError: the text cannot be read.
        CheckpointError: the state or the weights to start from are damaged or of another model; another process trains
            in the folder.
        KeyboardInterrupt, SystemExit: Ctrl-C, SIGTERM; the state after the last update has been saved.
    """
    run = RunFolder(Path(folder))
    processes = _processes()
    _check_ring(experiment, processes)
    text = LongText.read(experiment.data)
    _refuse_other_run(run, experiment)
    with run.locked() if rank_zero_only.rank == 0 else nullcontext():
        with isolate_rng():
            torch.manual_seed(experiment.seed)
            model = LanguageModel(experiment.model.config())
        if experiment.training.start_from is not None and not run.state.exists():
            _start_from(model, experiment.training.start_from)
        if rank_zero_only.rank == 0:
            experiment.save(run.experiment)
        return _fit_sequences(model, text, experiment, run, processes, verbose=verbose)


def _processes() -> tuple[int, int]:
    """Processes of this machine, and machines, as torchrun started them."""
    if not TorchElasticEnvironment.detect():
        return 1, 1
    local = int(os.environ["LOCAL_WORLD_SIZE"])
    return local, int(os.environ["WORLD_SIZE"]) // local


def _check_ring(experiment: LanguageExperiment, processes: tuple[int, int]) -> None:
    """Check that a ring has several processes, and each of them tokens.

    Raises:
        ConfigurationError: it has not.
    """
    settings, length, world = experiment.training, experiment.data.length, processes[0] * processes[1]
    ring, size = settings.ring, settings.ring_size or world
    if ring is None:
        return
    if world == 1:
        raise ConfigurationError(
            f"training.ring: {ring} shards each sequence over several processes, and there is one: start them with "
            "`torchrun --nproc-per-node 2 --no-python regard train ...`, or leave training.ring out"
        )
    if world % size:
        raise ConfigurationError(
            f"training.ring_size: has {size}, and torchrun started {world} processes, which rings of {size} do not "
            f"divide: start a multiple of {size}, or write one of {[n for n in range(2, world + 1) if not world % n]}"
        )
    if length < size:
        raise ConfigurationError(
            f"data.length: has {length}, and training.ring shards a sequence over {size} processes, each of which "
            f"needs a token: write a length of at least {size}, or take fewer processes for a ring"
        )


def _refuse_other_run(run: RunFolder, experiment: LanguageExperiment) -> None:
    """Check that the folder contains this run or none.

    Raises:
        ConfigurationError: it holds a run of other settings.
    """
    if not run.experiment.exists():
        return
    differences = LanguageExperiment.load(run.experiment).differences(experiment)
    free = MAY_CHANGE_LATER + (MAY_CHANGE_WITHOUT_DECAY if experiment.training.decay == "constant" else ())
    if changed := [key for key in differences if key not in free]:
        raise ConfigurationError(
            f"{run.path} holds a run with other settings: {', '.join(changed)}; give this one another folder, or the "
            "settings that the run began with"
        )


def _start_from(model: LanguageModel, folder: Path) -> None:
    """Copy the weights of another run into a model.

    Raises:
        CheckpointError: there are none, or they are of another model.
    """
    other = LanguageModel.load(folder / MODEL)
    if other.config != model.config:
        raise CheckpointError(
            f"training.start_from: the model of {folder} has another configuration than this one: write the section "
            f"model as it is in {folder / 'experiment.yaml'}"
        )
    model.load_state_dict(other.state_dict())


def _fit_sequences(
    model: LanguageModel,
    text: LongText,
    experiment: LanguageExperiment,
    run: RunFolder,
    processes: tuple[int, int],
    *,
    verbose: bool,
) -> LanguageTrainingResult:
    """Train in a folder that is locked."""
    settings = experiment.training
    training = SequenceTraining(model, text, settings, seed=experiment.seed)
    with quiet_lightning(), isolate_rng(), SignalHandler() as interrupt:
        limit = timedelta(minutes=settings.max_minutes) if settings.max_minutes else None
        callbacks = [
            Timer(limit, verbose=False),
            ReportUpdates(verbose=verbose and rank_zero_only.rank == 0),
            SaveSequenceRun(run, interrupt),
        ]
        trainer = _sequence_trainer(experiment, run, processes, callbacks, validates=len(text.held_out) > 0)
        with suppress(Interrupted):
            trainer.fit(training, ckpt_path=str(run.state) if run.state.exists() else None)
        if interrupt.received:
            raise interrupt.error()
    tokens = training.updates * training.tokens_per_update
    return LanguageTrainingResult(
        run.path,
        training.updates,
        training.seconds,
        training.validated,
        tokens / training.seconds if training.seconds else 0.0,
    )


def _sequence_trainer(
    experiment: LanguageExperiment,
    run: RunFolder,
    processes: tuple[int, int],
    callbacks: list[Callback],
    *,
    validates: bool,
) -> Trainer:
    local, machines = processes
    try:
        return Trainer(
            accelerator=experiment.training.accelerator,
            devices=local,
            num_nodes=machines,
            strategy="ddp" if local * machines > 1 else "auto",
            precision=experiment.training.precision,
            accumulate_grad_batches=experiment.training.accumulate,
            gradient_clip_val=experiment.training.clip_norm,
            max_epochs=-1,  # the module ends the run by its own count of updates
            limit_val_batches=1.0 if validates else 0,
            num_sanity_val_steps=0,
            use_distributed_sampler=False,  # a ring reads the same sequences in all processes
            callbacks=callbacks,
            plugins=[SafetensorsIO()],
            logger=TensorBoardLogger(run.path, name="", version=run.logs.name),
            default_root_dir=run.path,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
    except (ValueError, RuntimeError, TypeError) as error:  # Lightning's own words for what this machine lacks
        raise ConfigurationError(
            f"training cannot start with accelerator {experiment.training.accelerator!r} and {local} processes on "
            f"each of {machines} machines: {error}"
        ) from error


class SaveSequenceRun(Checkpoint):
    """Saves model and state at every stop and after a signal, which ends the run."""

    def __init__(self, run: RunFolder, interrupt: SignalHandler) -> None:
        self._run, self._interrupt = run, interrupt

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning answers SIGTERM by leaving without a state, and with the exit status of success.
        self._interrupt.install()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not _as_sequence_training(pl_module).completes_update(batch_idx):
            return
        # All processes have to end after the same update: the others would wait for ever.
        if trainer.strategy.reduce_boolean_decision(self._interrupt.received is not None, all=False):
            here = torch.tensor(self._interrupt.received or 0, device=trainer.strategy.root_device)
            self._interrupt.received = int(trainer.strategy.reduce(here, reduce_op="max"))
            self._save(trainer, pl_module)
            raise Interrupted

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, pl_module)

    def _save(self, trainer: Trainer, training: LightningModule) -> None:
        model = training.model
        if trainer.is_global_zero and isinstance(model, LanguageModel):
            model.save(self._run.path / MODEL)
        trainer.save_checkpoint(self._run.state, weights_only=False)


class ReportUpdates(Callback):
    """Logs loss, rate and speed every `report_every` updates and at each validation, as lines and to TensorBoard."""

    def __init__(self, *, verbose: bool) -> None:
        self._verbose, self._seconds = verbose, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = _as_sequence_training(pl_module)
        self._seconds = training.seconds
        if training.updates:
            self._write(f"goes on after update {training.updates:,}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        training = _as_sequence_training(pl_module)
        if not training.completes_update(batch_idx):
            return
        if training.updates % training.settings.report_every and training.updates != training.settings.max_updates:
            return
        window = training.take_window()
        seconds = (training.seconds - self._seconds) / window.pop("updates")
        self._seconds = training.seconds
        rate = rate_of_update(training.settings, training.updates - 1)
        self._log(trainer, training, {**window, "seconds_per_update": seconds, "learning_rate": rate})
        self._write(
            f"update {training.updates:6,}: {window['bits_per_byte']:.4f} bits a byte, {seconds:.2f} s an update, "
            f"learning rate {rate:.2g}"
        )

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = _as_sequence_training(pl_module)
        if training.validated is not None:
            self._log(trainer, training, {"validation_bits_per_byte": training.validated})
            self._write(f"update {training.updates:6,}: {training.validated:.4f} bits a byte of the held-out text")

    def _log(self, trainer: Trainer, training: SequenceTraining, metrics: dict[str, float]) -> None:
        if trainer.logger:
            trainer.logger.log_metrics(metrics, step=training.updates)

    def _write(self, line: str) -> None:
        if self._verbose:
            sys.stdout.write(line + "\n")
            sys.stdout.flush()


def _as_sequence_training(module: LightningModule) -> SequenceTraining:
    if not isinstance(module, SequenceTraining):
        raise TypeError(f"this callback serves {SequenceTraining.__name__}, not {type(module).__name__}")
    return module
