"""Where a run is in its text, and the stretches of updates between two stops.

A run stops to validate. What lies between two stops is one epoch to Lightning's Trainer, however it lies in the epochs
of the text. So the Trainer never has to take up an epoch in the middle: a resumed run begins with a shorter stretch.

What a run has come to so far: the part of its state that is neither weights nor optimiser.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any

from regard.translation.batches import Batch, BatchPlan, EncodedText, collate
from regard.translation.settings import PlateauDecay, TrainingSettings


@dataclass(frozen=True)
class Position:
    """How far a run has come: epochs done, batches done in the epoch begun, updates done in all."""

    epoch: int = 0
    batch: int = 0
    update: int = 0

    def after_update(self, batches_per_epoch: int) -> Position:
        """The position one update on.

        >>> Position(epoch=0, batch=2, update=2).after_update(batches_per_epoch=3)
        Position(epoch=1, batch=0, update=3)
        """
        ends_epoch = self.batch + 1 >= batches_per_epoch
        batch = 0 if ends_epoch else self.batch + 1
        return Position(self.epoch + ends_epoch, batch, self.update + 1)


@dataclass(frozen=True)
class Stops:
    """After which updates a run stops: every so many, or every such part of an epoch, and at its very end.

    >>> stops = Stops(every=0.5, batches_per_epoch=5, max_epochs=2)
    >>> [batch for batch in range(5) if stops.at(Position(epoch=0, batch=batch, update=batch))]
    [3]
    """

    every: int | float
    batches_per_epoch: int
    max_epochs: int
    max_updates: int | None = None

    def ends(self, position: Position) -> bool:
        """Whether a run that has come here has nothing left to do."""
        within = self.max_updates is None or position.update < self.max_updates
        return position.epoch >= self.max_epochs or not within

    def at(self, position: Position) -> bool:
        """Whether a run that has just arrived here stops."""
        if position.update == 0:
            return False
        if self.ends(position):
            return True
        if isinstance(self.every, int):
            return position.update % self.every == 0
        parts = range(ceil(1 / self.every))
        return position.batch in {
            min(self.batches_per_epoch, ceil(self.every * part * self.batches_per_epoch)) for part in parts
        }


class Stretches:
    """Each iteration gives the batches from where the run is then to its next stop.

    It has no length: stretches differ, and the Trainer would take the first for all.
    """

    def __init__(self, text: EncodedText, plan: BatchPlan, stops: Stops, position: Callable[[], Position]):
        self._text, self._plan, self._stops, self._position = text, plan, stops, position

    def __iter__(self) -> Iterator[Batch]:
        position = self._position()
        batches = len(self._plan)
        while not self._stops.ends(position):
            for rows in self._plan.epoch(position.epoch)[position.batch :]:
                yield collate(self._text, rows)
                position = position.after_update(batches)
                if self._stops.at(position):
                    return


class Sweep:
    """Each iteration gives all batches of a plan, in order; there may be none for one of several processes."""

    def __init__(self, text: EncodedText, plan: BatchPlan):
        self._text, self._plan = text, plan

    def __iter__(self) -> Iterator[Batch]:
        return (collate(self._text, rows) for rows in self._plan.epoch(0))


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
        if isinstance(settings.decay, PlateauDecay) and self.stale_on_plateau > settings.decay.patience:
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
