"""Values of a Transformer: the encoded source, the decoder's state, and the outputs of a step.

Letters: B sentences, S source positions, T target positions, V target vocabulary, L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...masks import Mask, padding
from ...nn import BlockObservation, Cache, ProjectedMemory
from ...nn.caches.base import check_rows


@dataclass(frozen=True, eq=False)
class TransformerMemory:
    """The source for cross-attention: keys and values of each decoder layer, lengths [B], and the padding mask."""

    layers: tuple[ProjectedMemory, ...]
    lengths: Tensor
    mask: Mask

    def reorder(self, rows: Tensor) -> TransformerMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths))
        lengths = self.lengths[rows]
        return TransformerMemory(tuple(layer.reorder(rows) for layer in self.layers), lengths, padding(lengths=lengths))


@dataclass(frozen=True, eq=False)
class TransformerState:
    """The state of a decoder between two steps: a cache of each layer, and the number of target tokens so far."""

    caches: tuple[Cache, ...]
    length: int = 0

    def reorder(self, rows: Tensor) -> TransformerState:
        """The state for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        return replace(self, caches=tuple(cache.reorder(rows) for cache in self.caches))


@dataclass(frozen=True, eq=False)
class TransformerStep:
    """The output of one decoding step: logits [B, V], and the next state."""

    logits: Tensor
    state: TransformerState


@dataclass(frozen=True, eq=False)
class ObservedTransformerStep:
    """A `TransformerStep` with attention weights: `weights` [B, L, H, S] to the source, `self_weights` [B, L, H, T].

    The T columns are the target tokens so far, this step's own the last; a cache that evicts tokens has the latest.
    """

    logits: Tensor
    state: TransformerState
    weights: Tensor
    self_weights: Tensor


@dataclass(frozen=True, eq=False)
class TransformerObservation:
    """The output of `Transformer.observe`: logits [B, T, V], and the lenses' results for each layer."""

    logits: Tensor
    encoder: tuple[BlockObservation, ...]
    decoder: tuple[BlockObservation, ...]
