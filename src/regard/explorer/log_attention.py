"""A Lightning callback that logs what the heads of a model attend to while it is trained."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn

from ..errors import ConfigurationError
from ..heads import text_roles
from ..utils.numbers import whole_number
from .atlas import Atlas, AttentionMap
from .preview import heads_picture
from .recording import Tokens, record

SHARDED = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)
"""Strategies under which no process has all weights, so that none can run the model by itself."""


class LogAttention(Callback):
    """Logs pictures, entropies and roles of a model's heads to TensorBoard, and keeps an atlas of each time.

    Every `every` updates the model reads one text in evaluation mode: `run` is called, and what it attends to is
    recorded. To TensorBoard go, of each map, a picture of its heads, `attention/MAP`, and the entropy of each head, in
    nats, `entropy of MAP/head H`; of the model how many heads have each role, `heads with a role/ROLE`, and a table of
    roles with their scores. The atlas is saved as `step-00001000.atlas` into a folder that `regard explore FOLDER`
    opens, with a slider through the training.

    Weights, optimizer, random numbers and the modes of all modules are as they would be without it, to the bit. It
    takes at most `share` of the time of the training: the first look is before the first update; any later one is left
    out if all of them would then have taken more.

    Args:
        run: runs the model on the text: it is called with the LightningModule. Its result is not used.
        tokens: of the text, as for `Recording.atlas`; without them no roles are detected.
        maps: the names of the attention modules within the LightningModule that are logged to TensorBoard; all of them
            by default. The atlas has all of them.
        every: updates between two looks, counted as `trainer.global_step`.
        share: the largest part of the time, above 0 and at most 1.
        folder: of the atlases; by default `attention` in the folder of the logger, or in that of the trainer.

    Raises:
        ConfigurationError: another `every` or `share`; when training starts, names that are no attention, or a
            strategy that shards the weights: a process by itself cannot run such a model.
        AtlasError: when training starts, nothing was recorded, or tokens that do not fit.

    >>> import lightning.pytorch as lightning, torch, regard
    >>> class Training(lightning.LightningModule):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.layer = regard.nn.Attention(regard.nn.Projections(8, num_heads=2), mask=regard.masks.causal())
    ...     def training_step(self, batch):
    ...         return self.layer(batch).square().mean()
    ...     def configure_optimizers(self):
    ...         return torch.optim.SGD(self.parameters(), 0.1)
    >>> text = torch.randn(1, 4, 8)
    >>> log = LogAttention(lambda module: module.layer(text), tokens="the cat sat down".split(), every=100)
    >>> trainer = lightning.Trainer(callbacks=[log], max_steps=1000)  # doctest: +SKIP
    """

    def __init__(
        self,
        run: Callable[[Any], object],
        *,
        tokens: Tokens | None = None,
        maps: Sequence[str] | None = None,
        every: int = 1000,
        share: float = 0.01,
        folder: str | Path | None = None,
    ) -> None:
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
            raise ConfigurationError(f"share is {share!r}; it needs to be above 0 and at most 1, such as 0.01")
        self.run, self.tokens, self.maps = run, tokens, maps
        self.every, self.share = whole_number("every", every, least=1), share
        self.folder = None if folder is None else Path(folder)
        self.seconds = 0.0
        """What all looks took so far."""
        self._began = self._latest = 0.0
        self._last_step = -1

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if isinstance(trainer.strategy, SHARDED):
            raise ConfigurationError(
                f"LogAttention runs the model in one process, and with {type(trainer.strategy).__name__} none has all "
                "of its weights: train with DDP or on one device, or leave LogAttention out"
            )
        self.seconds, self._latest, self._last_step = 0.0, 0.0, -1
        self._began = time.perf_counter()
        self._look(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step % self.every == 0:
            self._look_if_time(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._look_if_time(trainer, pl_module)

    def _look_if_time(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look, unless this step has been looked at, or it would be more than the share of the time."""
        allowed = self.share * (time.perf_counter() - self._began)
        if trainer.global_step != self._last_step and self.seconds + self._latest <= allowed:
            self._look(trainer, pl_module)

    def _look(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Record, log and save, in the first process alone."""
        if not trainer.is_global_zero:
            return
        began, step = time.perf_counter(), trainer.global_step
        with leaving_no_trace(pl_module), record(pl_module) as recording:
            self.run(pl_module)
        atlas = recording.atlas(tokens=self.tokens, title=f"step {step}")
        for logger in trainer.loggers:
            if isinstance(logger, TensorBoardLogger):
                _write(logger.experiment, self._chosen(atlas), atlas, step)
        atlas.save(self._series(trainer) / f"step-{step:08}.atlas")
        spent = time.perf_counter() - began
        self.seconds, self._latest, self._last_step = self.seconds + spent, spent, step

    def _chosen(self, atlas: Atlas) -> list[AttentionMap]:
        """The maps to log."""
        known = dict.fromkeys(of.name for of in atlas.maps)
        missing = [name for name in self.maps or () if name not in known]
        if missing:
            raise ConfigurationError(f"maps has {missing[0]!r}; the model has the attention modules {', '.join(known)}")
        return [of for of in atlas.maps if self.maps is None or of.name in self.maps]

    def _series(self, trainer: Trainer) -> Path:
        """The folder of the atlases, which is made."""
        folder = self.folder or Path(trainer.log_dir or trainer.default_root_dir) / "attention"
        folder.mkdir(parents=True, exist_ok=True)
        return folder


@contextmanager
def leaving_no_trace(model: nn.Module) -> Iterator[None]:
    """Run the block in evaluation mode without gradients; modes and random numbers are as before after it."""
    modes = {module: module.training for module in model.modules()}
    devices = {parameter.device for parameter in model.parameters() if parameter.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    try:
        model.eval()
        with (
            torch.no_grad(),
            torch.random.fork_rng([device for device in devices if device.type == kind], device_type=kind),
        ):
            yield
    finally:
        for module, training in modes.items():
            module.training = training


def _write(writer: Any, maps: Sequence[AttentionMap], atlas: Atlas, step: int) -> None:
    """Pictures and numbers of one look, to TensorBoard."""
    for of in maps:
        name = _tag(of)
        writer.add_image(f"attention/{name}", heads_picture(of), step, dataformats="HWC")
        for head, entropy in enumerate(of.metrics["entropy"].tolist()):
            writer.add_scalar(f"entropy of {name}/head {head}", entropy, step)
    for role, count in _role_counts(atlas).items():
        writer.add_scalar(f"heads with a role/{role}", count, step)
    writer.add_text("roles", _role_table(maps), step)


def _tag(of: AttentionMap) -> str:
    """The name of a map: that of its module, with call and sequence where there are several."""
    return of.name + f", call {of.call}" * bool(of.call) + f", sequence {of.sequence}" * bool(of.sequence)


def _role_counts(atlas: Atlas) -> dict[str, int]:
    """By role, how many heads have it; 0 where none does, so that each step has a number."""
    counts = dict.fromkeys((role.name for role in text_roles()), 0)
    for role in (role for of in atlas.maps for roles in of.roles for role in roles):
        counts[role["name"]] = counts.get(role["name"], 0) + 1
    return counts


def _role_table(maps: Sequence[AttentionMap]) -> str:
    """A table in Markdown of the heads with roles."""
    rows = [
        f"| {_tag(of)} | {head} | {role['name']} | {role['score']:.2f} | {role['n']} |"
        for of in maps
        for head, roles in enumerate(of.roles)
        for role in roles
    ]
    return "\n".join(["| map | head | role | score | n |", "| --- | --- | --- | --- | --- |", *rows])
