"""The progress of a training on standard output: a bar in a terminal, lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, TextIO

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.text import Text

from regard.translation.callbacks import as_training
from regard.translation.lightning_module import Training

SECONDS_BETWEEN_DRAWINGS = 0.25
SECONDS_BETWEEN_LINES = 30.0


def first_line(training: Training) -> str:
    """Whether a training begins, resumes, or has ended already."""
    position, settings = training.progress.position, training.settings
    if training.progress.has_ended(settings):
        return (
            f"this training has ended already, after {position.update:,} updates; it goes on with larger "
            "training.max_epochs, training.max_updates or training.patience"
        )
    if position.update:
        return f"resuming after update {position.update:,}, in epoch {position.epoch + 1} of {settings.max_epochs}"
    return f"training: {len(training.plan):,} updates an epoch, {settings.max_epochs:,} epochs at most"


def metrics(training: Training) -> str:
    """The latest loss, speed and learning rate, and the scores of the last validation."""
    shown = {**training.latest, **training.progress.scores}
    return ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items())


def place_in_epoch(training: Training) -> tuple[int, int]:
    """The epoch, counted from 1, and the batches done in it; after its last batch it counts as the current one."""
    position = training.progress.position
    ended = position.batch == 0 and position.epoch > 0
    return position.epoch + (not ended), len(training.plan) if ended else position.batch


class ProgressBar(Callback):
    """A bar for the current epoch, and the metrics in lines of their own, however narrow the terminal is."""

    def __init__(self, console: Console):
        self._bar = _BarOverMetrics(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            auto_refresh=False,
        )
        self._task = TaskID(0)
        self._drawn = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = as_training(pl_module)
        self._bar.console.print(first_line(training), highlight=False)
        self._task = self._bar.add_task("", total=len(training.plan), epoch="")
        self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw(as_training(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(as_training(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(as_training(pl_module))
        self._bar.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._bar.stop()

    def _draw(self, training: Training) -> None:
        epoch, batches = place_in_epoch(training)
        self._drawn = time.monotonic()
        self._bar.metrics = metrics(training)
        self._bar.update(self._task, completed=batches, epoch=f"{epoch}/{training.settings.max_epochs}")
        self._bar.refresh()


class _BarOverMetrics(Progress):
    """rich's progress bar with a text below it, which wraps where a column would be cut."""

    metrics = ""

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.metrics:
            yield Text(self.metrics)


class ProgressLines(Callback):
    """A line at the start, at each validation, and every half minute: for files, pipes and the logs of a cluster."""

    def __init__(self, stream: TextIO):
        self._stream = stream
        self._written = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write(first_line(as_training(pl_module)))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if time.monotonic() - self._written > SECONDS_BETWEEN_LINES:
            self._write_progress(as_training(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._write_progress(as_training(pl_module))

    def _write_progress(self, training: Training) -> None:
        epoch, batches = place_in_epoch(training)
        place = f"epoch {epoch}/{training.settings.max_epochs}, {batches:,} of {len(training.plan):,} updates"
        self._write(f"{place}: {metrics(training)}".removesuffix(": "))

    def _write(self, line: str) -> None:
        self._written = time.monotonic()
        self._stream.write(f"{line}\n")
        self._stream.flush()
