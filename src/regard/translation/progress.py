"""What a run has come to so far: the part of its state that is neither weights nor optimiser."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from regard.translation.settings import Plateau, TrainingSettings
from regard.translation.stretches import Position


@dataclass
class Progress:
    """How far a run is and how good it has been; `state` and `from_state` turn it to plain values and back."""

    position: Position = field(default_factory=Position)
    target_tokens: int = 0
    seconds: float = 0.0
    """Spent on updates; validating and saving do not count."""
    scores: dict[str, float] = field(default_factory=dict)
    """Of the latest validation."""
    best_score: float | None = None
    best_update: int = 0
    stale_validations: int = 0
    """Validations since the best one: what patience counts."""
    stale_on_plateau: int = 0
    """The same, counted anew after each reduction of the learning rate."""
    reductions: int = 0

    def record(self, scores: dict[str, float], score: float, settings: TrainingSettings) -> None:
        """Take the outcome of a validation; a lower `score` is better."""
        self.scores = scores
        if not math.isnan(score) and (self.best_score is None or score < self.best_score):
            self.best_score, self.best_update = score, self.position.update
            self.stale_validations = self.stale_on_plateau = 0
            return
        self.stale_validations += 1
        self.stale_on_plateau += 1
        if isinstance(settings.decay, Plateau) and self.stale_on_plateau > settings.decay.patience:
            self.reductions += 1
            self.stale_on_plateau = 0

    def has_ended(self, settings: TrainingSettings) -> bool:
        """Whether there is nothing left to do, or no hope that more would help."""
        out_of_patience = settings.patience is not None and self.stale_validations >= settings.patience
        most = settings.max_updates
        return (
            out_of_patience
            or self.position.epoch >= settings.max_epochs
            or (most is not None and self.position.update >= most)
        )

    def state(self) -> dict[str, Any]:
        """Nested dicts of plain values."""
        return asdict(self)

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Progress:
        """The progress that a `state` describes."""
        progress = cls(**state)
        progress.position = Position(**state["position"])
        return progress
