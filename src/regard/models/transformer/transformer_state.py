"""What a decoder carries: the memory of the source, and its own state from step to step.

Letters: B sentences, S source positions, T target positions, V target vocabulary, L layers, H heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from ...masks import Mask, padding
from ...nn import BlockObservation, Cache, ProjectedMemory
from ...nn.caches.base import check_rows


@dataclass(frozen=True, eq=False)
class Memory:
    """A source as a decoder sees it, made once: keys and values for each layer of the decoder, lengths [B], padding."""

    layers: tuple[ProjectedMemory, ...]
    lengths: Tensor
    mask: Mask

    def reorder(self, rows: Tensor) -> Memory:
        """The memory of these rows of the batch, in this order; a row may come more than once.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        check_rows(rows, len(self.lengths))
        lengths = self.lengths[rows]
        return Memory(tuple(layer.reorder(rows) for layer in self.layers), lengths, padding(lengths=lengths))


@dataclass(frozen=True, eq=False)
class State:
    """A decoder between two steps: what each layer keeps of the target so far, and how many tokens that is."""

    caches: tuple[Cache, ...]
    length: int = 0

    def reorder(self, rows: Tensor) -> State:
        """The state of these rows of the batch, in this order; a row may come more than once.

        Raises:
            ShapeError, DtypeError: rows are not rows of the batch.
        """
        return replace(self, caches=tuple(cache.reorder(rows) for cache in self.caches))


@dataclass(frozen=True, eq=False)
class Step:
    """One target token further: logits [B, V], and the state after it."""

    logits: Tensor
    state: State


@dataclass(frozen=True, eq=False)
class SeenStep:
    """A `Step`, and where it looked: `weights` [B, L, H, S] at the source, `self_weights` [B, L, H, T] at the target.

    The T columns are the tokens that went in so far, this step's own the last; a cache that drops has the latest.
    """

    logits: Tensor
    state: State
    weights: Tensor
    self_weights: Tensor


@dataclass(frozen=True, eq=False)
class SeenTransformer:
    """What a Transformer gives where it is observed: logits [B, T, V], and what lenses show of each layer."""

    logits: Tensor
    encoder: tuple[BlockObservation, ...]
    decoder: tuple[BlockObservation, ...]
