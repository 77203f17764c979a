"""A cache of keys and values as two tensors of a graph, which each step makes longer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..masks import Mask
from ..nn.caches.base import Cache, check_rows
from ..nn.caches.buffers import check_fits


@dataclass(frozen=True, eq=False)
class TensorCache(Cache):
    """Keys and values of positions 0..N-1, which `append` copies into longer tensors: N may vary in a program.

    `KVCache` writes into memory that it has allocated for later tokens; a graph has tensors that go in and come out.
    Nothing is evicted. `Attention`, `LatentAttention` and their blocks take it in `step`.

    Shapes: keys (batch, key heads, N, key dim), values (batch, key heads, N, value dim).

    >>> import torch
    >>> cache = TensorCache(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    >>> cache.append(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4)).keys.shape
    torch.Size([1, 2, 4, 4])
    """

    keys: Tensor  # type: ignore[assignment]  # a property of the protocol
    values: Tensor  # type: ignore[assignment]  # likewise

    has_default_positions = True
    mask: ClassVar[Mask | None] = None  # type: ignore[assignment]  # likewise

    @property
    def next_position(self) -> int:
        """N, the position of the next token."""
        return self.values.shape[2]

    @property
    def positions(self) -> Tensor:
        """0..N-1."""
        return torch.arange(self.values.shape[2], device=self.values.device)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> TensorCache:
        """This cache with the keys and values of the next M positions.

        Positions, which a layer passes on from its call, are not read: they are N..N+M-1 here.

        Raises:
            ShapeError, DtypeError, DeviceError: keys and values that do not fit the cache's.
        """
        check_fits(keys, values, self)
        return replace(self, keys=torch.cat([self.keys, keys], 2), values=torch.cat([self.values, values], 2))

    def evict(self) -> TensorCache:
        """The cache itself."""
        return self

    def reorder(self, rows: Tensor) -> TensorCache:
        """The cache for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows that are not integers in 0..batch-1, or bool for each row of the batch.
        """
        check_rows(rows, self.values.shape[0])
        return replace(self, keys=self.keys[rows], values=self.values[rows])
