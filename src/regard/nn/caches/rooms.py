"""How much a cache holds: everything, everything up to a length, or what a mask still needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import ConfigurationError, ShapeError
from ...masks import Mask
from .future import needed

SPARE = 32
"""A buffer has room for half as many positions again as it holds, and this many."""


class Room(Protocol):
    """What decides on the size of a cache's memory, and on what it keeps."""

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        """Refuse what does not fit: the last `added` of `length` positions, all below the next position."""
        ...

    def capacity(self, length: int) -> int:
        """For how many positions new memory is made, when `length` have to fit."""
        ...

    def needed(self, positions: Tensor, next_position: int | Tensor) -> Tensor:
        """Which of the keys at these positions are kept for queries at the next one and later: bool, (N,)."""
        ...


@dataclass(frozen=True)
class Growing:
    """Everything is kept; memory grows by half as often as it is full, so that a step costs no copy on average."""

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        pass

    def capacity(self, length: int) -> int:
        return roomy(length)

    def needed(self, positions: Tensor, next_position: int | Tensor) -> Tensor:
        return everything(positions)


@dataclass(frozen=True)
class Static:
    """Everything is kept, in memory for `max_length` positions that is made once."""

    max_length: int

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        if length > self.max_length:
            raise ShapeError(
                f"the cache is full: it was made for max_length={self.max_length} positions, holds {length - added} "
                f"and {added} more came. Make it longer, or let it grow with KVCache()"
            )

    def capacity(self, length: int) -> int:
        return self.max_length

    def needed(self, positions: Tensor, next_position: int | Tensor) -> Tensor:
        return everything(positions)


@dataclass(frozen=True)
class Rolling:
    """What no query to come may attend to, by a mask, is dropped."""

    mask: Mask
    max_length: int | None = None

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        if self.max_length is not None and bool((torch.as_tensor(next_position) > self.max_length).any()):
            raise ConfigurationError(
                f"the cache was made for positions below max_length={self.max_length}, and positions up to "
                f"{int(torch.as_tensor(next_position).max()) - 1} came: make it for more"
            )

    def capacity(self, length: int) -> int:
        return roomy(length)

    def needed(self, positions: Tensor, next_position: int | Tensor) -> Tensor:
        return needed(self.mask, positions, next_position, self.max_length)


def everything(positions: Tensor) -> Tensor:
    """All keys, whatever their positions: (N,)."""
    return torch.ones(positions.shape[-1], dtype=torch.bool, device=positions.device)


def roomy(length: int) -> int:
    """A length, and room to grow.

    >>> roomy(100)
    182
    """
    return length + length // 2 + SPARE
