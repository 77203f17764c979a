"""Training as a LightningModule: one update, one validation, the learning rate, and checkpoints as safetensors."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.io import CheckpointIO
from torch import Tensor, nn

from regard.errors import CheckpointError, ConfigurationError
from regard.translation.batches import Batch, EncodedText, OrderedBatches, TokenBatches
from regard.translation.checkpoint import load_state, save_state
from regard.translation.progress import AllBatches, BatchesToNextStop, StopSchedule, TrainingProgress
from regard.translation.settings import MAY_CHANGE, InverseSquareRootDecay, PlateauDecay, TrainingSettings
from regard.translation.training_loss import Projecting, training_loss
from regard.translation.weight_losses import WeightLosses


class SafetensorsIO(CheckpointIO):
    """Checkpoint IO plugin that saves and loads through `save_state` and `load_state`, without pickle."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None) -> None:
        if storage_options is not None:
            raise CheckpointError("checkpoints are files on a disk here and take no storage_options")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        save_state(checkpoint, path)

    def load_checkpoint(
        self, path: str | Path, map_location: Callable | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        # Lightning moves the tensors where they belong; a state that cannot run code needs no weights_only.
        return load_state(path)

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink(missing_ok=True)


def learning_rate(settings: TrainingSettings, update: int, reductions: int = 0) -> float:
    """The rate of the next update, after `update` updates and `reductions` reductions on a plateau.

    With warm-up over W updates, update n = 1, 2, ... has lr · min(1, n/W), times √(W/n) behind the warm-up for
    `inverse-sqrt` (W = 1 without one), or times factor^reductions for `plateau`.

    Source: Vaswani et al. (2017), section 5.3, equation 3, with its peak given instead of d_model.

    >>> settings = TrainingSettings(learning_rate=0.1, warmup_steps=4, decay=InverseSquareRootDecay())
    >>> [round(learning_rate(settings, update), 3) for update in (0, 1, 3, 15)]
    [0.025, 0.05, 0.1, 0.05]
    """
    number, warmup = update + 1, max(1, settings.warmup_steps)
    rate = settings.learning_rate * min(1.0, number / warmup)
    if isinstance(settings.decay, InverseSquareRootDecay):
        return rate * (warmup / max(number, warmup)) ** 0.5
    if isinstance(settings.decay, PlateauDecay):
        return rate * settings.decay.factor**reductions
    return rate


class Training(LightningModule):
    """Trains a model (source, source_lengths, target) -> logits with label-smoothed cross entropy.

    What an update does is a function of text, settings and seed, of the process's rank, and of what is saved: weights,
    the optimiser's state, and `progress`, which has the update's number, the position in the text and the reductions
    of the learning rate. The generators are seeded anew for each update. So there is no generator whose state has to be
    saved, whatever drew from it in between, and each of several processes goes on as exactly as one alone. The
    Trainer's own counters begin at 0 in every process and decide nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        text: EncodedText,
        validation: EncodedText | None,
        settings: TrainingSettings,
        *,
        seed: int,
    ):
        super().__init__()
        self.model = model
        self.settings, self.seed = settings, seed
        self._weight_losses = _weight_losses(model, text, settings)
        self.progress = TrainingProgress()
        self.latest: dict[str, float] = {}
        """What was last logged."""
        self._text, self._validation = text, validation
        self._plan: TokenBatches | None = None
        self._window: list[tuple[Tensor, Tensor, int]] = []  # loss, cross entropy and tokens since they were last told
        self._validated: list[tuple[Tensor, int]] = []  # cross entropy and tokens
        self._update_tokens = 0
        self._lap_began = 0.0

    def setup(self, stage: str) -> None:
        self._plan = TokenBatches(self._text, self.settings.batch_tokens, self.seed, *self._place())
        self.stops = StopSchedule(
            self.settings.validate_every, len(self._plan), self.settings.max_epochs, self.settings.max_updates
        )

    def train_dataloader(self) -> BatchesToNextStop:
        return BatchesToNextStop(self._text, self.plan, self.stops, lambda: self.progress.position)

    def val_dataloader(self) -> Any:
        if self._validation is None:
            return []
        return AllBatches(
            self._validation, OrderedBatches(self._validation, self.settings.batch_tokens, *self._place())
        )

    def transfer_batch_to_device(self, batch: Batch, device: torch.device, dataloader_idx: int) -> Batch:
        return batch if batch.source.device == device else batch.to(device, non_blocking=True)

    @property
    def plan(self) -> TokenBatches:
        """The plan of the training batches."""
        if self._plan is None:
            raise RuntimeError("the batches are planned when the Trainer calls setup")
        return self._plan

    def _place(self) -> tuple[int, int]:
        return self.trainer.global_rank, self.trainer.world_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        # Lightning clips no gradients for a fused optimiser under mixed precision, because it could unscale them.
        fused = self.settings.precision == "32-true" and self.device.type in ("cpu", "cuda")
        return torch.optim.Adam(
            self.model.parameters(), lr=self.settings.learning_rate, betas=self.settings.betas, fused=fused
        )

    def on_train_start(self) -> None:
        self._stop_if_ended()

    def on_train_epoch_start(self) -> None:
        self.begin_lap()

    def on_train_batch_start(self, batch: Batch, batch_idx: int) -> None:
        """Seed all generators by (seed, process, update), so that no earlier draw matters; set the learning rate."""
        update = self.progress.position.update
        seed_generators(self.device, self.seed, self.trainer.global_rank, update)
        rate = learning_rate(self.settings, update, self.progress.reductions)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, entropy = training_loss(self.model, batch, self.settings.label_smoothing, self._weight_losses)
        self._window.append((loss.detach(), entropy, batch.target_tokens))
        (self._update_tokens,) = map(int, self._summed(batch.target_tokens))
        # Several processes average their gradients; this makes it the mean over all tokens, wherever they are.
        return loss * (self.trainer.world_size / self._update_tokens)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        self.progress.position = self.progress.position.after_update(len(self.plan))
        self.progress.target_tokens += self._update_tokens
        self.progress.seconds += time.perf_counter() - self._lap_began
        self.begin_lap()

    def on_train_epoch_end(self) -> None:
        self._stop_if_ended()

    def begin_lap(self) -> None:
        """Start counting time as training time."""
        self._lap_began = time.perf_counter()

    def take_window(self) -> dict[str, float]:
        """Loss and perplexity per token of the updates since the last call, over all processes."""
        loss, entropy, tokens = (sum(map(float, values)) for values in zip(*self._window, strict=True))
        self._window.clear()
        loss, entropy, tokens = self._summed(loss, entropy, tokens)
        return {"loss": loss / tokens, "perplexity": _perplexity(entropy / tokens)}

    def _stop_if_ended(self) -> None:
        if self.progress.has_ended(self.settings):
            self.trainer.should_stop = True

    def _summed(self, *numbers: float) -> list[float]:
        """The sum of each number over all processes."""
        if self.trainer.world_size == 1:
            return list(numbers)
        on_device = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        return self.trainer.strategy.reduce(on_device, reduce_op="sum").tolist()  # type: ignore[union-attr]

    def on_validation_epoch_start(self) -> None:
        self._validated.clear()

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        _, entropy = training_loss(self.model, batch, smoothing=0.0)
        self._validated.append((entropy, batch.target_tokens))

    def on_validation_epoch_end(self) -> None:
        """Score the weights: cross entropy per target token, without smoothing, of the whole text; lower is better."""
        entropies, tokens = [float(entropy) for entropy, _ in self._validated], [count for _, count in self._validated]
        entropy, count = self._summed(sum(entropies), sum(tokens))
        scores = {"validation_loss": entropy / count, "validation_perplexity": _perplexity(entropy / count)}
        self.progress.record(scores, scores["validation_loss"], self.settings)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # These are the Trainer's own counters, which begin at 0 in every process; `progress` says where the run is.
        del checkpoint["loops"]

    def get_extra_state(self) -> dict[str, Any]:
        """State saved with the weights: the progress of the run, the fingerprint of its batches, and its settings."""
        values = {f"training.{key}": value for key, value in self.settings.values_by_key().items()}
        return {
            "progress": self.progress.state(),
            "batches": self._plan.fingerprint() if self._plan else {},
            "settings": {key: value for key, value in values.items() if key not in MAY_CHANGE},
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the progress; a state with other batches or settings is refused.

        Raises:
            CheckpointError: the batches have changed, so that the run cannot continue.
            ConfigurationError: settings have changed that an update depends on.
        """
        here, there = self.get_extra_state()["batches"], state["batches"]
        differences = [
            f"{name} was {there.get(name)} and is {value}" for name, value in here.items() if there.get(name) != value
        ]
        if differences:
            raise CheckpointError(
                f"the run cannot go on where it was, because its batches have changed: {', '.join(differences)}; "
                "resume with the text, the settings and the number of processes that it began with"
            )
        # A state may be older than a setting, and is then of its default.
        defaults = {f"training.{key}": value for key, value in TrainingSettings().values_by_key().items()}
        here = self.get_extra_state()["settings"]
        there = {**{key: value for key, value in defaults.items() if key in here}, **state["settings"]}
        if changed := [key for key in here | there if here.get(key, ...) != there.get(key, ...)]:
            raise ConfigurationError(
                f"the state to resume from is of a run with other settings: {', '.join(changed)}; "
                "give this one another folder, or the settings that the run began with"
            )
        self.progress = TrainingProgress.from_state(state["progress"])


def _weight_losses(model: nn.Module, text: EncodedText, settings: TrainingSettings) -> WeightLosses:
    """The losses of attention weights that the settings ask for."""
    losses = WeightLosses.of_settings(settings)
    if losses.observed is not None and not isinstance(model, Projecting):
        raise ConfigurationError(
            f"training.coverage_loss and training.guided_alignment read attention weights, and a "
            f"{type(model).__name__} has no decode_target that shows them: leave them out"
        )
    if losses.alignment and text.links is None:
        raise ConfigurationError(
            "training.guided_alignment learns links of words, and the text has none: data.alignments"
        )
    return losses


def seed_generators(device: torch.device, *numbers: int) -> None:
    """Seed every generator that a model on the device may draw from, by a hash of the numbers."""
    seeds = [int(seed) for seed in np.random.SeedSequence(numbers).generate_state(3, np.uint64)]
    # torch.manual_seed would note down, for good, a stack trace per call for each backend that is not in use.
    torch.default_generator.manual_seed(seeds[0])
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seeds[0])
    random.seed(seeds[1])
    np.random.seed(seeds[2] % 2**32)


def _perplexity(entropy: float) -> float:
    return math.exp(min(entropy, 700.0))  # the largest that a float holds
