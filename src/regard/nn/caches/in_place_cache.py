"""A cache of fixed memory that is written in place, for decoding steps that are captured once and replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import ConfigurationError
from ...utils.numbers import whole_number
from .base import Cache, check_rows
from .buffers import check_fits
from .kv_cache import KVCache

UNWRITTEN = 2**62
"""The position of memory without a key: after every query, so that no causal mask reaches it."""


@dataclass(frozen=True, eq=False)
class InPlaceCache:
    """Keys and values in memory of a fixed size, whose length is a tensor: each step is the same calls of kernels.

    `append` writes after the last key and returns the cache itself: what another variable holds changes too, unlike a
    `KVCache`. Attention is over all of the memory, under a causal mask: what is not written has a position after every
    query, and zeros. Beyond its memory it must not be written; who appends counts.

    Shapes: keys (batch, key heads, C, key dim), values (batch, key heads, C, value dim), positions (C,) or (batch, C),
    filled (), the keys that are written, next_position () or (batch,), both int64 on the device of the keys.

    >>> import torch, regard
    >>> cache = regard.nn.KVCache()
    >>> with torch.no_grad():
    ...     cache = cache.append(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4))
    ...     fixed = InPlaceCache.after(cache, 2)
    ...     fixed.append(torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)) is fixed
    True
    >>> fixed.keys.shape, fixed.filled, fixed.next_position
    (torch.Size([1, 2, 5, 4]), tensor(4), tensor(4))
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    filled: Tensor
    next_position: Tensor

    has_default_positions = False
    mask = None
    next_positions = Cache.next_positions  # not by inheritance: fields cannot stand in for a protocol's properties

    @classmethod
    def after(cls, cache: KVCache, spare: int) -> InPlaceCache:
        """The keys and values of a cache, which is not empty, and memory for `spare` more.

        Raises:
            ConfigurationError: an empty cache, a number that is no integer of at least 0.
        """
        whole_number("spare", spare, least=0)
        length, device = len(cache), cache.keys.device
        if not length:
            raise ConfigurationError("the cache is empty: append the keys of a prompt first")

        def with_spare(tensor: Tensor, axis: int, filling: int) -> Tensor:
            sizes = list(tensor.shape)
            sizes[axis] = spare
            return torch.cat([tensor, tensor.new_full(sizes, filling)], axis)

        positions = with_spare(cache.positions, -1, UNWRITTEN)
        next_position = torch.as_tensor(cache.next_position, device=device).clone()
        filled = torch.tensor(length, device=device)
        return cls(with_spare(cache.keys, 2, 0), with_spare(cache.values, 2, 0), positions, filled, next_position)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.keys.nbytes + self.values.nbytes + self.positions.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> InPlaceCache:
        """The cache itself, with M more keys and values written after its last ones.

        Raises:
            ShapeError, DtypeError, DeviceError: another batch, heads, dims, dtype or device than the cache has.
        """
        check_fits(keys, values, self)
        added = keys.shape[2]
        if positions is None:
            positions = self.next_positions(added, keys.device)
        at = self.filled + torch.arange(added, device=keys.device)
        self.keys.index_copy_(2, at, keys)
        self.values.index_copy_(2, at, values)
        self.positions.index_copy_(-1, at, positions.expand(*self.positions.shape[:-1], added))
        self.filled.add_(added)
        self.next_position.copy_(positions.amax(-1) + 1)
        return self

    def evict(self) -> InPlaceCache:
        """The cache itself: its memory stays as large as it is."""
        return self

    def reorder(self, rows: Tensor) -> InPlaceCache:
        """A cache of memory of its own for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows that are not integers in 0..batch-1, or bool for each row of the batch.
        """
        check_rows(rows, self.keys.shape[0])
        by_row = self.positions[rows] if self.positions.ndim == 2 else self.positions.clone()
        next_position = self.next_position[rows] if self.next_position.ndim else self.next_position.clone()
        return InPlaceCache(self.keys[rows], self.values[rows], by_row, self.filled.clone(), next_position)
