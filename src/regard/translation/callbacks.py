"""Lightning callbacks of a training: saving, logging, ending on a signal, a warning about spinning threads."""

from __future__ import annotations

import signal
import threading
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Self

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from torch import Tensor

from regard.translation.checkpoint import save_tensors
from regard.translation.lightning_module import Training
from regard.translation.run_folder import RunFolder, delete_old_weights
from regard.translation.spinning_threads import SpinningCheck

UPDATES_BETWEEN_LOGS = 50


class SaveRun(Checkpoint):
    """Saves the whole state every so many updates and at every checkpoint stop, and the best weights when found.

    A checkpoint stop (`StopSchedule`) is where Lightning ends what it calls an epoch: the run validates and goes on.
    It saves between two updates, or after the validation at such a stop. The state is written last: once it is there,
    the other files of that moment are there, too.
    """

    def __init__(self, folder: RunFolder, every: int, about: Mapping[str, Any]):
        self._folder, self._every, self._about = folder, every, about

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        training = as_training(pl_module)
        position = training.progress.position
        if position.update % self._every == 0 and not training.stops.stops_at(position):
            self.save(trainer, training)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = as_training(pl_module).progress
        if progress.best_update == progress.position.update:
            self._write(trainer, as_training(pl_module), self._folder.best)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.save_at_stop(trainer, as_training(pl_module))

    def save_at_stop(self, trainer: Trainer, training: Training) -> None:
        """Write the weights of a checkpoint stop, of which the latest and the best are kept, then `save`."""
        settings = training.settings
        if settings.keep_last or settings.keep_best:
            self._write(trainer, training, self._folder.weights_after(training.progress.position.update))
            if trainer.is_global_zero:
                delete_old_weights(self._folder, settings.keep_last, settings.keep_best)
        self.save(trainer, training)

    def save(self, trainer: Trainer, training: Training) -> None:
        """Write the last weights, then the state to resume from; each file replaces the old one atomically."""
        self._write(trainer, training, self._folder.last)
        trainer.save_checkpoint(self._folder.state, weights_only=False)
        training.begin_lap()

    def _write(self, trainer: Trainer, training: Training, path: Path) -> None:
        state: dict[str, Any] = trainer.strategy.lightning_module_state_dict()
        prefix = "model."
        weights: dict[str, Tensor] = {
            name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)
        }
        progress = training.progress
        header = {"update": progress.position.update, "epoch": progress.position.epoch, "scores": progress.scores}
        if trainer.is_global_zero:
            path.parent.mkdir(exist_ok=True)
            save_tensors(weights, path, {**self._about, **header})


class Interrupted(BaseException):
    """Raised after a signal, where the run can end without loss."""


class SignalHandler:
    """Handler of Ctrl-C and SIGTERM that lets the current update end; a second Ctrl-C raises at once.

    An exception in the middle of an optimiser's step would leave weights that no unbroken run ever has. A second
    SIGTERM changes nothing: launchers send it to a process and to its group, and SIGKILL to one that does not end.
    """

    SIGNALS = (signal.SIGINT, signal.SIGTERM)
    """Of Ctrl-C, and of a cluster that is about to take the machine away."""

    def __init__(self) -> None:
        self.received: int | None = None
        """The number of the signal, here or at another process of the run."""
        self._previous: dict[int, Any] = {}

    def error(self) -> BaseException:
        """The exception for the caller: SystemExit(143) for SIGTERM, else KeyboardInterrupt."""
        return SystemExit(128 + signal.SIGTERM) if self.received == signal.SIGTERM else KeyboardInterrupt()

    def __enter__(self) -> Self:
        # Python lets only the main thread handle signals, and a process in the background may be told to ignore them.
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in self.SIGNALS}
            self._previous = {
                number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)
            }
        self.install()
        return self

    def install(self) -> None:
        """Install the signal handlers, also over handlers that were installed since."""
        for number in self._previous:
            signal.signal(number, self._handle)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = number
        elif number == signal.SIGINT:
            raise Interrupted


class EndOnSignal(Callback):
    """Ends the run after the update or validation in which a signal arrived, with its state saved."""

    def __init__(self, interrupt: SignalHandler, saving: SaveRun | None):
        self._interrupt, self._saving = interrupt, saving

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning answers SIGTERM by leaving without a state, and with the exit status of success.
        self._interrupt.install()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        training = as_training(pl_module)
        if self._is_signalled(trainer) and not training.stops.stops_at(training.progress.position):
            if self._saving:
                self._saving.save(trainer, training)
            raise Interrupted

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning calls callbacks that save after all others: raised here, `Interrupted` would come before them.
        if self._is_signalled(trainer):
            if self._saving:
                self._saving.save_at_stop(trainer, as_training(pl_module))
            raise Interrupted

    def _is_signalled(self, trainer: Trainer) -> bool:
        # All processes have to end after the same update, and in the same way: the others would wait for ever.
        if not trainer.strategy.reduce_boolean_decision(self._interrupt.received is not None, all=False):
            return False
        here = torch.tensor(self._interrupt.received or 0, device=trainer.strategy.root_device)
        self._interrupt.received = int(trainer.strategy.reduce(here, reduce_op="max"))
        return True


class SpinningThreads(Callback):
    """Warns once if other processes make this one's OpenMP threads spin."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._spinning = SpinningCheck()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.is_global_zero:
            self._spinning.check()


class LogMetrics(Callback):
    """Logs metrics to TensorBoard by the number of updates, which continues when a run is resumed."""

    def __init__(self) -> None:
        self._tokens, self._seconds = 0, 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        progress = as_training(pl_module).progress
        self._tokens, self._seconds = progress.target_tokens, progress.seconds

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        training = as_training(pl_module)
        progress = training.progress
        if progress.position.update % UPDATES_BETWEEN_LOGS:
            return
        tokens, seconds = progress.target_tokens - self._tokens, progress.seconds - self._seconds
        self._tokens, self._seconds = progress.target_tokens, progress.seconds
        training.latest = {
            **training.take_window(),
            "target_tokens_per_second": tokens / seconds,
            "learning_rate": trainer.optimizers[0].param_groups[0]["lr"],
        }
        self._log(trainer, training, {f"training_{name}": value for name, value in training.latest.items()})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        training = as_training(pl_module)
        self._log(trainer, training, training.progress.scores)

    def _log(self, trainer: Trainer, training: Training, metrics: dict[str, float]) -> None:
        if trainer.logger:
            trainer.logger.log_metrics(metrics, step=training.progress.position.update)


def as_training(module: LightningModule) -> Training:
    """Cast the LightningModule that a hook gets to `Training`."""
    if not isinstance(module, Training):
        raise TypeError(f"these callbacks serve {Training.__name__}, not {type(module).__name__}")
    return module
