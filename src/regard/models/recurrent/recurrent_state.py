"""Values of a recurrent translator: the encoded source, the decoder's state, and the output of a step.

Letters: B sentences, S source positions, T target positions, V target vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from ...backends.cpu.gru_decoder import PackedWeights
from ...masks import Mask, padding
from ...nn.caches.base import check_rows


@dataclass(frozen=True, eq=False)
class Encoded:
    """The output of the encoder: annotations [B, S, A], lengths [B], and last states, forward then backward, [B, A]."""

    annotations: Tensor
    lengths: Tensor
    last: Tensor


@dataclass(frozen=True, eq=False)
class RecurrentMemory:
    """The source for the decoder's attention: annotations, and keys [B, S, ·] projected for the score.

    packed: the decoder's weights for steps in native code, without gradients.
    """

    encoded: Encoded
    keys: Tensor
    packed: PackedWeights | None = None

    @cached_property
    def mask(self) -> Mask:
        """The mask of the batch's padding, by the lengths."""
        return padding(lengths=self.lengths)

    @property
    def values(self) -> Tensor:
        """The values of the attention: the annotations."""
        return self.encoded.annotations

    @property
    def lengths(self) -> Tensor:
        """Source lengths, [B]."""
        return self.encoded.lengths

    def reorder(self, rows: Tensor) -> RecurrentMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths))
        encoded = self.encoded
        chosen = Encoded(encoded.annotations[rows], encoded.lengths[rows], encoded.last[rows])
        return RecurrentMemory(chosen, self.keys[rows], self.packed)


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The state of a decoder between two steps.

    `hidden` is the recurrent state, batch first: (h,) of a GRU, (h, c) of an LSTM, each [B, layers, H]. `attentional`
    is the attentional vector [B, F] of input feeding, which the next step reads. `step` counts the target words so far.
    """

    hidden: tuple[Tensor, ...]
    attentional: Tensor | None = None
    step: int = 0

    def reorder(self, rows: Tensor) -> RecurrentState:
        """The state for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.hidden[0]))
        attentional = None if self.attentional is None else self.attentional[rows]
        return replace(self, hidden=tuple(part[rows] for part in self.hidden), attentional=attentional)


@dataclass(frozen=True, eq=False)
class RecurrentStep:
    """The output of one decoding step: logits [B, V], and the next state."""

    logits: Tensor
    state: RecurrentState


@dataclass(frozen=True, eq=False)
class ObservedRecurrentStep:
    """A `RecurrentStep` with attention weights [B, S] over the source."""

    logits: Tensor
    state: RecurrentState
    weights: Tensor
    self_weights: None = None
    """None: the decoder has no self-attention."""


@dataclass(frozen=True, eq=False)
class Unrolled:
    """The decoder over a whole target: queries [B, T, H] of its attention, and features [B, T, F] of each word."""

    queries: Tensor
    features: Tensor
