"""Policies of a key-value cache: how many positions it has memory for, and by which mask a rolling one evicts keys.

No policy evicts: `KVCache.evict` in kv_cache.py does, by `keys_to_retain` in eviction.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigurationError, ShapeError
from ...masks import Mask

SPARE = 32
"""The number of positions allocated in advance, in addition to half of the current length."""


@dataclass(frozen=True)
class Growing:
    """No limit and no eviction: memory grows by half whenever it is full, so the copies are O(1) a token on average."""

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        """Any length fits."""

    def capacity(self, length: int) -> int:
        """Positions to allocate for a cache of this length."""
        return with_spare(length)


@dataclass(frozen=True)
class Static:
    """No eviction, and memory for `max_length` positions that is allocated once."""

    max_length: int

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        """Refuse a length above `max_length`, of which the last `added` positions are new.

        Raises:
            ShapeError: the cache is full.
        """
        if length > self.max_length:
            raise ShapeError(
                f"the cache is full: it was made for max_length={self.max_length} positions, has {length - added} "
                f"and got {added} more. Make it longer, or let it grow with KVCache()"
            )

    def capacity(self, length: int) -> int:
        """Positions to allocate, whatever the length."""
        return self.max_length


@dataclass(frozen=True)
class Rolling:
    """The mask by which `KVCache.evict` finds keys that no future query can attend to.

    max_length: bounds the positions to come; None for no bound.
    """

    mask: Mask
    max_length: int | None = None

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        """Refuse positions that are not below `max_length`.

        Raises:
            ConfigurationError: the next position would be beyond it.
        """
        if self.max_length is not None and bool((torch.as_tensor(next_position) > self.max_length).any()):
            raise ConfigurationError(
                f"the cache was made for positions below max_length={self.max_length}, and got positions up to "
                f"{int(torch.as_tensor(next_position).max()) - 1}: make it with a larger max_length"
            )

    def capacity(self, length: int) -> int:
        """Positions to allocate for a cache of this length."""
        return with_spare(length)


Policy = Growing | Static | Rolling


def with_spare(length: int) -> int:
    """A length plus space to grow by half.

    >>> with_spare(100)
    182
    """
    return length + length // 2 + SPARE
