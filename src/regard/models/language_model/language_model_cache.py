"""The cache of a language model, and what a model that continues from one has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...masks import Mask
from ...nn import BlockCache


@dataclass(frozen=True, eq=False)
class LanguageModelCache:
    """The cache of every layer: keys and values, as many as its mask needs, or the state of its linear attention.

    A layer that reads the keys of another one stores nothing and has none: `layers` are those of the others, in order.

    A value, as `regard.nn.KVCache` is: a step returns another one, and the old one stays as it was.
    """

    layers: tuple[BlockCache, ...]

    @property
    def next_position(self) -> int | Tensor:
        """The default position of the next token: a number, or one for each sequence, (batch,)."""
        return self.layers[0].attention.next_position

    @property
    def is_used(self) -> bool:
        """Whether there are tokens in it, or were."""
        return isinstance(self.next_position, Tensor) or self.next_position > 0

    @property
    def nbytes(self) -> int:
        """The memory of all layers in bytes."""
        return sum(layer.nbytes for layer in self.layers)

    def next_positions(self, count: int, device: torch.device) -> Tensor:
        """The positions of the next `count` tokens: (count,) or (batch, count)."""
        return self.layers[0].attention.next_positions(count, device)

    def reorder(self, rows: Tensor) -> LanguageModelCache:
        """The cache for these rows of the batch, in this order; rows may repeat."""
        return LanguageModelCache(tuple(layer.reorder(rows) for layer in self.layers))


class Steps(Protocol):
    """A model that continues from a cache."""

    def make_cache(self) -> LanguageModelCache: ...

    def next_features(
        self,
        tokens: Tensor,
        cache: LanguageModelCache,
        *,
        mask: Mask | Tensor | None = None,
        positions: Tensor | None = None,
    ) -> tuple[Tensor, LanguageModelCache]: ...

    def logits(self, features: Tensor) -> Tensor: ...
