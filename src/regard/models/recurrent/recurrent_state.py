"""Values of a recurrent translator: the encoded source, the decoder's state, and the output of a step.

Letters: B sentences, S source positions, T target positions, V target vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
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

    packed: the decoder's weights for steps in native code, without gradients. tokens: the source [B, S] itself, of a
    translator that copies from it.
    """

    encoded: Encoded
    keys: Tensor
    packed: PackedWeights | None = None
    tokens: Tensor | None = None

    @cached_property
    def mask(self) -> Mask:
        """The mask of the batch's padding, by the lengths."""
        return padding(lengths=self.lengths)

    @cached_property
    def present_keys(self) -> Tensor:
        """The keys with zeros behind the end of each source, where anything may stand: NaN times 0 would be NaN."""
        return self._present(self.keys)

    @cached_property
    def present_values(self) -> Tensor:
        """The annotations, likewise."""
        return self._present(self.values)

    @property
    def values(self) -> Tensor:
        """The values of the attention: the annotations."""
        return self.encoded.annotations

    @property
    def lengths(self) -> Tensor:
        """Source lengths, [B]."""
        return self.encoded.lengths

    def _present(self, tensor: Tensor) -> Tensor:
        absent = torch.arange(tensor.shape[1], device=tensor.device) >= self.lengths.unsqueeze(1)  # [B, S]
        return tensor.masked_fill(absent.unsqueeze(-1), 0.0)

    def reorder(self, rows: Tensor) -> RecurrentMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths))
        encoded = self.encoded
        chosen = Encoded(encoded.annotations[rows], encoded.lengths[rows], encoded.last[rows])
        tokens = None if self.tokens is None else self.tokens[rows]
        return RecurrentMemory(chosen, self.keys[rows], self.packed, tokens)


@dataclass(frozen=True, eq=False)
class RecurrentState:
    """The state of a decoder between two steps.

    `hidden` is the recurrent state, batch first: (h,) of a GRU, (h, c) of an LSTM, each [B, layers, H]. `attentional`
    is the attentional vector [B, F] of input feeding, which the next step reads. `step` counts the target words so far.
    `coverage` is what the score reads of the attention weights of all steps so far: their sum [B, S], or the vectors
    [B, S, ·] of a GRU.
    """

    hidden: tuple[Tensor, ...]
    attentional: Tensor | None = None
    step: int = 0
    coverage: Tensor | None = None

    def reorder(self, rows: Tensor) -> RecurrentState:
        """The state for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.hidden[0]))
        attentional, coverage = (None if part is None else part[rows] for part in (self.attentional, self.coverage))
        hidden = tuple(part[rows] for part in self.hidden)
        return replace(self, hidden=hidden, attentional=attentional, coverage=coverage)


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
    """The decoder over T words of a target, or over one: of each the query of its attention, and what follows.

    Shapes: queries [B, T, H], contexts [B, T, A], outputs of the cell [B, T, H], features [B, T, F] that predict the
    word; weights [B, T, S] where they were computed.
    """

    queries: Tensor
    contexts: Tensor
    outputs: Tensor
    features: Tensor
    weights: Tensor | None = None


def join_steps(parts: Sequence[Tensor | None]) -> Tensor | None:
    """The tensors [B, 1, ...] of T steps as one, [B, T, ...]; None if there is none at the first."""
    present = [part for part in parts if part is not None]
    return torch.cat(present, 1) if present else None
