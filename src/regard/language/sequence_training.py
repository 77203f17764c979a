"""Training of a language model as a LightningModule: each update reads one long sequence, which a ring may shard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader

from regard.errors import ConfigurationError
from regard.language.language_experiment import LongTrainingSettings
from regard.language.long_text import LongText
from regard.models import LanguageModel
from regard.ring import RingLayout, shard, sharded
from regard.translation.lightning_module import seed_generators
from regard.translation.training_loss import projected_cross_entropy


def sequence_loss(model: LanguageModel, sequence: Tensor, layout: RingLayout | None = None) -> Tensor:
    """-Σ log p(token t + 1 | tokens 0..t), in nats, over this process's positions of a sequence.

    sequence: int64 (length + 1,), the same in all processes of a ring. Without a layout this process has all positions.
    Of the logits, some rows at a time are in memory. Gradients of parameters are this process's part.
    """
    tokens, following, positions = sequence[:-1], sequence[1:], None
    if layout is not None:
        positions = shard(torch.arange(len(tokens), device=sequence.device), 0, layout)
        tokens, following = shard(tokens, 0, layout), shard(following, 0, layout)
    with nullcontext() if layout is None else sharded(layout):
        features = model.features(tokens[None], positions=positions)[0]
    weight = model.embedding.weight if model.output is None else model.output.weight
    return projected_cross_entropy(features, weight, None, following, 0.0)[0]


class SequencesToNextStop:
    """Iterates over the sequences of the updates from the current one to the next stop, where the state is saved.

    It has no length: lengths differ, and the Trainer would take the first for all.
    """

    def __init__(self, sequence: Callable[[int], Tensor], settings: LongTrainingSettings, updates: Callable[[], int]):
        self._sequence, self._settings, self._updates = sequence, settings, updates

    def __iter__(self) -> Iterator[Tensor]:
        update = self._updates()
        while update < self._settings.max_updates:
            yield self._sequence(update)
            update += 1
            if update % self._settings.validate_every == 0:
                return


class SequenceTraining(LightningModule):
    """Trains a language model by the mean cross entropy of its next token; an update reads one sequence per ring.

    With a layout all processes are one ring: each has a shard of every sequence, and the gradient is the sum over
    processes, over the length of the whole. Without one each process reads a sequence of its own. An update is a
    function of the weights, the optimiser's state, the seed and the update's number, so that a run resumes exactly.
    """

    def __init__(self, model: LanguageModel, text: LongText, settings: LongTrainingSettings, *, seed: int) -> None:
        super().__init__()
        self.model, self.settings, self.seed = model, settings, seed
        self.updates, self.seconds = 0, 0.0
        self.validated: float | None = None
        """Bits per byte of the latest validation."""
        self._text = text
        self._window: list[Tensor] = []  # cross entropies of this process since they were last reported
        self._validation: list[Tensor] = []
        self._lap = 0.0

    def train_dataloader(self) -> SequencesToNextStop:
        return SequencesToNextStop(self._sequence, self.settings, lambda: self.updates)

    def val_dataloader(self) -> DataLoader:
        sequences = self._text.validation()
        own = sequences if self._is_ring else sequences[self.trainer.global_rank :: self.trainer.world_size]
        return DataLoader(own, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset of its elements

    @property
    def _is_ring(self) -> bool:
        return self.settings.layout is not None

    @property
    def _tokens_per_update(self) -> int:
        return self._text.length * (1 if self._is_ring else self.trainer.world_size)

    def _sequence(self, update: int) -> Tensor:
        reader = 0 if self._is_ring else self.trainer.global_rank
        return self._text.sequence(self.seed, update, reader)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = self.settings
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            fused=self.device.type in ("cpu", "cuda"),
        )

    def on_train_start(self) -> None:
        self._stop_if_ended()

    def on_train_epoch_start(self) -> None:
        self._lap = time.perf_counter()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        seed_generators(self.device, self.seed, self.trainer.global_rank, self.updates)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate_of_update(self.settings, self.updates)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = sequence_loss(self.model, batch, self.settings.layout)
        self._window.append(loss.detach())
        # Several processes average their gradients; this makes it the sum over all, divided by the tokens of all.
        return loss * (self.trainer.world_size / self._tokens_per_update)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)
        now = time.perf_counter()
        self.updates += 1
        self.seconds += now - self._lap
        self._lap = now

    def on_train_epoch_end(self) -> None:
        self._stop_if_ended()

    def take_window(self) -> dict[str, float]:
        """Bits per byte of the updates since the last call, over all processes, and how many updates these are."""
        updates, total = len(self._window), float(torch.stack(self._window).double().sum())
        self._window.clear()
        return {"updates": updates, "bits_per_byte": self._bits(total, updates * self._tokens_per_update)}

    def on_validation_epoch_start(self) -> None:
        self._validation.clear()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self._validation.append(sequence_loss(self.model, batch, self.settings.layout))

    def on_validation_epoch_end(self) -> None:
        tokens = len(self._text.validation()) * self._text.length
        self.validated = self._bits(float(sum(self._validation)), tokens)

    def _bits(self, nats: float, tokens: int) -> float:
        """Bits per byte from this process's part of a cross entropy over all processes' tokens."""
        total = torch.tensor(nats, dtype=torch.float64, device=self.device)
        if self.trainer.world_size > 1:
            total = self.trainer.strategy.reduce(total, reduce_op="sum")
        return float(total) / tokens / math.log(2)

    def _stop_if_ended(self) -> None:
        if self.updates >= self.settings.max_updates:
            self.trainer.should_stop = True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        # The Trainer begins each process anew, at its own update 0; `updates` says where the run is.
        del checkpoint["loops"]

    def get_extra_state(self) -> dict[str, Any]:
        """State saved with the weights: the number of updates, and the seconds spent on them."""
        return {"updates": self.updates, "seconds": self.seconds, "read": self._what_is_read()}

    def _what_is_read(self) -> dict[str, int]:
        return {"bytes of text": len(self._text.train), "tokens of an update": self._tokens_per_update}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the progress.

        Raises:
            ConfigurationError: the text or the number of sequences of an update is not that of the state's run.
        """
        before, now = state["read"], self._what_is_read()
        changed = [f"{name} were {before[name]:,} and are {now[name]:,}" for name in now if before[name] != now[name]]
        if changed:
            raise ConfigurationError(
                f"the run cannot go on where it was: {', '.join(changed)}; resume with the files and the number of "
                "processes that it began with, or with any number of them in a ring"
            )
        self.updates, self.seconds = state["updates"], state["seconds"]


def rate_of_update(settings: LongTrainingSettings, updates: int) -> float:
    """The learning rate of the next update: warm-up over W updates, then constant, or linear to 0 at max_updates.

    >>> settings = LongTrainingSettings(learning_rate=0.8, warmup_steps=2, decay="linear", max_updates=6)
    >>> [round(rate_of_update(settings, update), 2) for update in range(6)]
    [0.4, 0.8, 0.8, 0.6, 0.4, 0.2]
    """
    warmup, rate = max(settings.warmup_steps, 1), settings.learning_rate
    if updates < warmup or settings.decay == "constant":
        return rate * min(1.0, (updates + 1) / warmup)
    return rate * (settings.max_updates - updates) / max(settings.max_updates - warmup, 1)
