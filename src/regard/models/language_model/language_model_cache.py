"""The cache of a language model, and what a model that continues from one has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ConfigurationError
from ...masks import Mask
from ...nn import BlockCache, CacheFormat, KVCache


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

    def packed(self, formats: CacheFormat | Sequence[Sequence[CacheFormat]]) -> LanguageModelCache:
        """This empty cache, whose layers store keys and values as codes (`regard.nn.KVCache.packed`).

        formats: one for all heads of all layers; or of each layer one, or one for each key head, as
        `regard.approximations.choose_cache` finds them: `packed([*choice.formats.values()])`. Layers that store no keys
        and values, but a state or those with the largest weights, stay as they are.

        Raises:
            ConfigurationError: formats for another number of layers; as `KVCache.packed`.
        """
        of_layers = [[formats]] * len(self.layers) if isinstance(formats, CacheFormat) else [*formats]
        if len(of_layers) != len(self.layers):
            raise ConfigurationError(
                f"there are formats for {len(of_layers)} layers, and the cache has {len(self.layers)}: give one "
                "CacheFormat for all, or a list of them for each layer"
            )
        layers = []
        for layer, own in zip(self.layers, of_layers, strict=True):
            store = layer.attention
            layers.append(replace(layer, attention=store.packed(*own)) if isinstance(store, KVCache) else layer)
        return LanguageModelCache(tuple(layers))

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
