"""What a request asks to see of the attention, and how that is told in JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from ..attention import Observation
from ..lenses import Entropy, Lens, TopK


class AttentionAsked(BaseModel):
    """`"attention"` of a request: the keys of the largest weights, the entropy of the weights, in which layers."""

    model_config = ConfigDict(extra="forbid", strict=True)

    top: int = Field(default=5, ge=0, le=64)
    entropy: bool = True
    layers: list[int] | None = Field(default=None, min_length=1)

    @property
    def lenses(self) -> tuple[Lens, ...]:
        """The lenses that see it."""
        found: list[Lens] = [TopK(self.top)] if self.top else []
        return (*found, Entropy()) if self.entropy else tuple(found)

    def report(self, layers: Sequence[Observation]) -> list[dict[str, Any]]:
        """What the layers attended to when a token was predicted, each head by itself.

        top: [position, weight] of each head, the largest weight first; positions count the tokens from 0. entropy: in
        nats, of each head.
        """
        chosen = range(len(layers)) if self.layers is None else self.layers
        return [self._of_layer(number, layers[number]) for number in chosen]

    def _of_layer(self, number: int, seen: Observation) -> dict[str, Any]:
        told: dict[str, Any] = {"layer": number}
        if self.top:
            top = seen[TopK(self.top)]
            weights, columns = (tensor[0, :, -1].tolist() for tensor in (top.weights.float(), top.columns))
            told["top"] = [
                [[column, round(weight, 6)] for column, weight in zip(*head, strict=True) if column >= 0]
                for head in zip(columns, weights, strict=True)
            ]
        if self.entropy:
            entropies = seen[Entropy()][0, :, -1].float().tolist()
            told["entropy"] = [round(entropy, 6) if math.isfinite(entropy) else None for entropy in entropies]
        return told
