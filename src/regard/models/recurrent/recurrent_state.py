"""What a decoder carries: the memory of the source, and its own state from step to step.

Letters: B sentences, S source positions, T target positions, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...masks import Mask, padding
from ...nn.caches.base import check_rows


@dataclass(frozen=True, eq=False)
class Encoded:
    """What an encoder gives: annotations [B, S, A], lengths [B], and its last states, forward then backward, [B, A]."""

    annotations: Tensor
    lengths: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class Memory:
    """A source as a decoder sees it, made once: keys [B, S, ·] are the annotations as the score wants them."""

    encoded: Encoded
    keys: Tensor
    mask: Mask

    @classmethod
    def of(cls, encoded: Encoded, keys: Tensor) -> Memory:
        """The memory over projected keys, with the padding of the batch masked."""
        return cls(encoded, keys, padding(lengths=encoded.lengths))

    @property
    def values(self) -> Tensor:
        """What attention reads: the annotations."""
        return self.encoded.annotations

    @property
    def lengths(self) -> Tensor:
        """Source lengths, [B]."""
        return self.encoded.lengths

    def reorder(self, rows: Tensor) -> Memory:
        """The memory of these rows of the batch, in this order; a row may come more than once.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths))
        encoded = self.encoded
        chosen = Encoded(encoded.annotations[rows], encoded.lengths[rows], encoded.last[rows])
        return Memory.of(chosen, self.keys[rows])


@dataclass(frozen=True, eq=False)
class State:
    """A decoder between two steps.

    `hidden` holds the recurrent state, batch first: (h,) of a GRU, (h, c) of an LSTM, each [B, layers, H]. `fed` is
    the attentional vector that input feeding hands on, [B, F]. `step` counts the target words so far.
    """

    hidden: tuple[Tensor, ...]
    fed: Tensor | None = None
    step: int = 0

    def reorder(self, rows: Tensor) -> State:
        """The state of these rows of the batch, in this order; a row may come more than once.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.hidden[0]))
        fed = None if self.fed is None else self.fed[rows]
        return replace(self, hidden=tuple(part[rows] for part in self.hidden), fed=fed)


@dataclass(frozen=True, eq=False)
class Step:
    """One target word further: logits [B, V], the state after it, and the weights [B, S] that it looked with."""

    logits: Tensor
    state: State
    weights: Tensor
    self_weights: None = None
    """It has no attention to its own words."""


@dataclass(frozen=True, eq=False)
class Unrolled:
    """A whole target at once: the queries [B, T, H] that asked, and the features [B, T, F] that predict each word."""

    queries: Tensor
    features: Tensor
