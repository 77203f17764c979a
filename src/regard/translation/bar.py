"""A bar in the terminal for the person who waits."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from regard.translation.callbacks import ours
from regard.translation.module import Training

SECONDS_BETWEEN_DRAWINGS = 0.25


class Bar(Callback):
    """A bar per epoch of the text, with what Logging has to tell."""

    def __init__(self, console: Console):
        self._bar = Progress(
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
        )
        self._task = TaskID(0)
        self._drawn = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = ours(pl_module)
        self._task = self._bar.add_task("", total=len(training.plan), epoch="")
        self._bar.start()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if time.monotonic() - self._drawn > SECONDS_BETWEEN_DRAWINGS:
            self._draw(ours(pl_module))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(ours(pl_module))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._draw(ours(pl_module))
        self._bar.stop()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._bar.stop()

    def _draw(self, training: Training) -> None:
        progress, position = training.progress, training.progress.position
        at_end = position.batch == 0 and position.epoch > 0  # of an epoch: show it full, not the next one empty
        shown = {**training.latest, **progress.scores}
        self._drawn = time.monotonic()
        self._bar.update(
            self._task,
            completed=len(training.plan) if at_end else position.batch,
            epoch=f"{position.epoch + (not at_end)}/{training.settings.max_epochs}",
            description="  ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in shown.items()),
        )
        self._bar.refresh()
