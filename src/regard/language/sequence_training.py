"""Training of a language model as a LightningModule: each update reads one long sequence, which a ring may shard."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from regard.errors import ConfigurationError
from regard.language.language_experiment import LongTrainingSettings
from regard.language.long_text import LongText
from regard.models import LanguageModel
from regard.ring import RingLayout, shard, sharded
from regard.ring.peers import Group
from regard.translation.lightning_module import seed_generators
from regard.translation.training_loss import projected_cross_entropy


def sequence_loss(
    model: LanguageModel,
    sequence: Tensor,
    layout: RingLayout | None = None,
    group: Group = None,
    *,
    checkpointing: bool = False,
) -> Tensor:
    """-Σ log p(token t + 1 | tokens 0..t), in nats, over this process's positions of a sequence.

    sequence: int64 (length + 1,), the same in all processes of a ring. layout, group: how its processes share it;
    without a layout this process has all positions. checkpointing: whether activations within a block are computed
    again in the backward pass, by messages in a ring too. Of the logits, some rows at a time are in memory. Gradients
    of parameters are this process's part.
    """

    def attention() -> AbstractContextManager[None]:
        return nullcontext() if layout is None else sharded(layout, group=group)

    tokens, following, positions = sequence[:-1], sequence[1:], None
    if layout is not None:
        positions = shard(torch.arange(len(tokens), device=sequence.device), 0, layout, group)
        tokens, following = shard(tokens, 0, layout, group), shard(following, 0, layout, group)
    call_block = None
    if checkpointing:  # what is computed again is in a ring too, whatever thread runs the backward pass
        call_block = partial(checkpoint, use_reentrant=False, context_fn=lambda: (nullcontext(), attention()))
    with attention():
        features = model.features(tokens[None], positions=positions, call_block=call_block)[0]
    weight = model.embedding.weight if model.output is None else model.output.weight
    return projected_cross_entropy(features, weight, None, following, 0.0)[0]


class SequencesToNextStop:
    """Iterates over the sequences of the updates from the current one to the next stop, where the state is saved.

    It has no length: lengths differ, and the Trainer would take the first for all.
    """

    def __init__(
        self, sequence: Callable[[int, int], Tensor], settings: LongTrainingSettings, updates: Callable[[], int]
    ) -> None:
        self._sequence, self._settings, self._updates = sequence, settings, updates

    def __iter__(self) -> Iterator[Tensor]:
        update = self._updates()
        while update < self._settings.max_updates:
            for number in range(self._settings.accumulate):
                yield self._sequence(update, number)
            update += 1
            if update % self._settings.validate_every == 0:
                return


class SequenceTraining(LightningModule):
    """Trains a language model by the mean cross entropy of its next token, over all sequences that an update reads.

    With a layout processes form rings: those of a ring have shards of the same sequences, and other rings read others;
    without one each process reads sequences of its own. Each of these readers reads `accumulate` sequences an update.
    The gradient is the sum over processes, over the tokens of all. An update is a function of the weights, the
    optimiser's state, the seed and the update's number, so that a run resumes exactly.
    """

    def __init__(self, model: LanguageModel, text: LongText, settings: LongTrainingSettings, *, seed: int) -> None:
        super().__init__()
        self.model, self.settings, self.seed = model, settings, seed
        self.updates, self.seconds = 0, 0.0
        self.validated: float | None = None
        """Bits per byte of the latest validation."""
        self._text = text
        self._group: Group = None  # the ring of this process
        self._window: list[Tensor] = []  # cross entropies of this process since they were last reported
        self._validation: list[Tensor] = []
        self._lap = 0.0

    def setup(self, stage: str) -> None:
        if self.settings.layout is not None:  # neighbouring ranks, which share a machine, are a ring
            sizes = self._readers, self._processes_per_reader
            kind = self.trainer.strategy.root_device.type
            self._group = init_device_mesh(kind, sizes, mesh_dim_names=("data", "ring"))["ring"]

    def train_dataloader(self) -> SequencesToNextStop:
        return SequencesToNextStop(self._sequence, self.settings, lambda: self.updates)

    def val_dataloader(self) -> DataLoader:
        sequences = self._text.validation()
        own = sequences[self._reader :: self._readers]
        # As many everywhere, or Lightning would skip the end of the validation in some processes; empty ones count 0.
        own += [torch.empty(0, dtype=torch.int64)] * (-(-len(sequences) // self._readers) - len(own))
        return DataLoader(own, batch_size=None)  # type: ignore[arg-type]  # a list is a dataset of its elements

    @property
    def _processes_per_reader(self) -> int:
        if self.settings.layout is None:
            return 1
        return self.settings.ring_size or self.trainer.world_size

    @property
    def _readers(self) -> int:
        """Rings, or processes without a ring."""
        return self.trainer.world_size // self._processes_per_reader

    @property
    def _reader(self) -> int:
        return self.trainer.global_rank // self._processes_per_reader

    @property
    def tokens_per_update(self) -> int:
        """Tokens that all processes read for an update."""
        return self._text.length * self._readers * self.settings.accumulate

    def _sequence(self, update: int, number: int) -> Tensor:
        return self._text.sequence(self.seed, update, self._reader * self.settings.accumulate + number)

    def completes_update(self, batch_idx: int) -> bool:
        """Whether the optimiser steps after a batch, counted since the last stop."""
        return (batch_idx + 1) % self.settings.accumulate == 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        settings = self.settings
        return torch.optim.AdamW(
            self.model.parameters(),
            lr=settings.learning_rate,
            betas=settings.betas,
            weight_decay=settings.weight_decay,
            # Lightning clips no gradients for a fused optimiser under mixed precision, because it could unscale them.
            fused=settings.precision == "32-true" and self.device.type in ("cpu", "cuda"),
        )

    def on_train_start(self) -> None:
        self._stop_if_ended()

    def on_train_epoch_start(self) -> None:
        self._lap = time.perf_counter()

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        sequences = self.updates * self.settings.accumulate + batch_idx % self.settings.accumulate
        seed_generators(self.device, self.seed, self.trainer.global_rank, sequences)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = rate_of_update(self.settings, self.updates)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        settings = self.settings
        loss = sequence_loss(self.model, batch, settings.layout, self._group, checkpointing=settings.checkpointing)
        self._window.append(loss.detach())
        # Gradients are averaged over processes and sequences; this makes it the sum, divided by the tokens of all.
        return loss * (self.trainer.world_size * settings.accumulate / self.tokens_per_update)

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
        updates = len(self._window) // self.settings.accumulate
        total = float(torch.stack(self._window).double().sum())
        self._window.clear()
        return {"updates": updates, "bits_per_byte": self._bits(total, updates * self.tokens_per_update)}

    def on_validation_epoch_start(self) -> None:
        self._validation.clear()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if len(batch):
            self._validation.append(sequence_loss(self.model, batch, self.settings.layout, self._group))

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
        return {"bytes of text": len(self._text.train), "tokens of an update": self.tokens_per_update}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore the progress.

        Raises:
            ConfigurationError: the text or the number of sequences of an update is not that of the state's run.
        """
        before, now = state["read"], self._what_is_read()
        changed = [f"{name} were {before[name]:,} and are {now[name]:,}" for name in now if before[name] != now[name]]
        if changed:
            raise ConfigurationError(
                f"the run cannot go on where it was: {', '.join(changed)}; resume with the files that it began with, "
                "and with as many sequences an update: training.accumulate for each ring, or each process without one"
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
