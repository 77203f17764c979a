"""Where the parts of a run lie in its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Which = Literal["best", "last", "average"]
"""Weights of a run: those that validated best, those of the last save, those that `regard average` made."""


@dataclass(frozen=True)
class RunFolder:
    """The folder of one training run, by the names that everything reads and writes it under."""

    path: Path

    @property
    def experiment(self) -> Path:
        """The settings in effect."""
        return self.path / "experiment.yaml"

    @property
    def source_vocabulary(self) -> Path:
        return self.path / "source.vocabulary.json"

    @property
    def target_vocabulary(self) -> Path:
        return self.path / "target.vocabulary.json"

    @property
    def best(self) -> Path:
        """The weights with the best validation score."""
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        """The latest weights that were saved."""
        return self.path / "last.safetensors"

    @property
    def average(self) -> Path:
        """The mean of several weights."""
        return self.path / "average.safetensors"

    @property
    def kept(self) -> Path:
        """The folder of the weights of single stops."""
        return self.path / "weights"

    def kept_after(self, update: int) -> Path:
        """The weights of the stop after an update."""
        return self.kept / f"update-{update:08}.safetensors"

    @property
    def state(self) -> Path:
        """All that is needed to go on."""
        return self.path / "state" / "last.safetensors"

    @property
    def logs(self) -> Path:
        """What TensorBoard shows."""
        return self.path / "logs"
