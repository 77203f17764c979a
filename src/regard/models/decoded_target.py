"""A known target as a translator decodes it: what predicts each of its words, and what the losses of training read."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class SourceHead:
    """One attention of a decoder to the source: a layer and a head, both from 0.

    layer: None is the last but one of a Transformer, or its only one; a recurrent translator has no other.
    """

    layer: int | None = None
    head: int = 0


@dataclass(frozen=True, eq=False)
class DecodedTarget:
    """The decoder over a known target: features [B, T, F] of each word, and the attention weights [B, T, S] beside.

    weights: of one attention over the source, where they were asked for or are part of the prediction.
    gate: log p_gen / (1 - p_gen), [B, T, 1], of a translator that copies.
    """

    features: Tensor
    weights: Tensor | None = None
    gate: Tensor | None = None
