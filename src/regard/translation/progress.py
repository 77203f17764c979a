"""Progress of a training run: its position in the text, its scores, and the checkpoint stops where it validates.

At a checkpoint stop a run validates, saves and goes on. "Epoch" means two things: here, in settings and in messages a
pass over the training text (`TextPosition.epoch`); for Lightning's Trainer, and in the names of its hooks
(`on_train_epoch_end`), what lies between two checkpoint stops. So the Trainer never has to resume within an epoch of
its own: a resumed run begins with a shorter one.
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
class TextPosition:
    """Completed epochs, batches completed in the current epoch, and completed updates."""

    epoch: int = 0
    batch: int = 0
    update: int = 0

    def after_update(self, batches_per_epoch: int) -> TextPosition:
        """The position after one more update.

        >>> TextPosition(epoch=0, batch=2, update=2).after_update(batches_per_epoch=3)
        TextPosition(epoch=1, batch=0, update=3)
        """
        ends_epoch = self.batch + 1 >= batches_per_epoch
        batch = 0 if ends_epoch else self.batch + 1
        return TextPosition(self.epoch + ends_epoch, batch, self.update + 1)


@dataclass(frozen=True)
class StopSchedule:
    """The checkpoint stops, where a run validates and saves: every `every` updates or part of an epoch, and its end.

    >>> stops = StopSchedule(every=0.5, batches_per_epoch=5, max_epochs=2)
    >>> [batch for batch in range(5) if stops.stops_at(TextPosition(epoch=0, batch=batch, update=batch))]
    [3]
    """

    every: int | float
    batches_per_epoch: int
    max_epochs: int
    max_updates: int | None = None

    def ends_at(self, position: TextPosition) -> bool:
        """Whether a run ends at a position."""
        within = self.max_updates is None or position.update < self.max_updates
        return position.epoch >= self.max_epochs or not within

    def stops_at(self, position: TextPosition) -> bool:
        """Whether a position is a checkpoint stop."""
        if position.update == 0:
            return False
        if self.ends_at(position):
            return True
        if isinstance(self.every, int):
            return position.update % self.every == 0
        parts = range(ceil(1 / self.every))
        return position.batch in {
            min(self.batches_per_epoch, ceil(self.every * part * self.batches_per_epoch)) for part in parts
        }


class BatchesToNextStop:
    """Iterates over the batches from the current position to the next checkpoint stop.

    It has no length: lengths differ, and the Trainer would take the first for all.
    """

    def __init__(self, text: EncodedText, plan: BatchPlan, stops: StopSchedule, position: Callable[[], TextPosition]):
        self._text, self._plan, self._stops, self._position = text, plan, stops, position

    def __iter__(self) -> Iterator[Batch]:
        position = self._position()
        batches = len(self._plan)
        while not self._stops.ends_at(position):
            for rows in self._plan.epoch(position.epoch)[position.batch :]:
                yield collate(self._text, rows)
                position = position.after_update(batches)
                if self._stops.stops_at(position):
                    return


class AllBatches:
    """Iterates over all batches of a plan, in order; one of several processes may have none."""

    def __init__(self, text: EncodedText, plan: BatchPlan):
        self._text, self._plan = text, plan

    def __iter__(self) -> Iterator[Batch]:
        return (collate(self._text, rows) for rows in self._plan.epoch(0))


@dataclass
class TrainingProgress:
    """Position, time and scores of a run; `state` and `from_state` convert it to plain values and back."""

    position: TextPosition = field(default_factory=TextPosition)
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
        """Record the result of a validation; a lower `score` is better."""
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
        """Whether the run is at its end, or out of patience."""
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
    def from_state(cls, state: dict[str, Any]) -> TrainingProgress:
        """Rebuild the progress from a `state`."""
        progress = cls(**state)
        progress.position = TextPosition(**state["position"])
        return progress
