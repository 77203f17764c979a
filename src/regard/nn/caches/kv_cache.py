"""The keys and values of the positions so far, as a value that is passed in and returned.

How much a cache holds: everything, everything up to a length, or what a mask still needs.

Rows of a batch, for what is asked for some of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor

from ...core.torch_modes import transformed
from ...errors import ConfigurationError, DtypeError, ShapeError
from ...masks import Mask, as_mask
from ...utils.numbers import whole_number
from ..input_checks import check_positions
from .buffers import Buffers, check_fits
from .eviction import needed

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


def check_rows(rows: object, batch: int) -> None:
    """Rows (count,) of a batch, whole numbers in 0..batch-1, or bool (batch,). Only on a CPU are they looked at.

    torch alone would count a row below 0 from the end, and a wrong parent in a search would show in no message.

    Raises:
        ShapeError, DtypeError: they are not that.

    >>> check_rows(torch.tensor([1, 1, 0]), batch=2)
    """
    if not isinstance(rows, Tensor) or rows.dtype not in (torch.int64, torch.int32, torch.bool):
        has = rows.dtype if isinstance(rows, Tensor) else f"a {type(rows).__name__}"
        raise DtypeError(f"rows need a tensor of whole numbers, torch.int64 for instance, or of bool; this is {has}")
    if rows.ndim != 1 or (rows.dtype == torch.bool and len(rows) != batch):
        needs = f"({batch},), as the batch has the size {batch}" if rows.dtype == torch.bool else "(count,)"
        raise ShapeError(f"rows have the shape {tuple(rows.shape)}; {rows.dtype} rows need {needs}")
    if rows.dtype == torch.bool or not rows.is_cpu or not len(rows) or transformed():
        return
    least, most = (int(end) for end in rows.aminmax())
    if least < 0 or most >= batch:
        raise ShapeError(
            f"rows are in {least}..{most}, but the batch has the size {batch}: they need to be in 0..{batch - 1}"
        )


@dataclass(frozen=True, eq=False)
class KVCache:
    """Keys and values of the positions so far, of one layer: what decoding passes in and gets back.

    `append` gives a cache that holds more, and the old one stays as it was: both may go on, as branches of a search
    do. Memory is shared between them wherever that is safe, so a step takes no copy of what came before; the second
    branch that goes on from one cache takes one. There are three kinds:

        KVCache()                   grows
        KVCache.static(length)      has its memory for a maximal length, made once
        KVCache.rolling(mask)       drops what no query to come may attend to: O(window) for a window

    Shapes: keys (batch, key heads, N, key dim) and values (batch, key heads, N, value dim), positions (N,) or
    (batch, N). A rolling cache drops from time to time: it holds at most half as much again as the mask needs, and 32
    positions, beside the part that came last.

    Decode under `torch.no_grad()` or `torch.inference_mode()`: where gradients are recorded each step copies.

    >>> import torch, regard
    >>> mask = regard.masks.causal() & regard.masks.window(before=3)
    >>> cache = regard.nn.KVCache.rolling(mask)
    >>> with torch.no_grad():
    ...     for token in torch.randn(100, 2, 4, 1, 8):
    ...         cache = cache.append(token, token)
    >>> cache.next_position, len(cache) < 40, cache.positions[-4:].tolist()
    (100, True, [96, 97, 98, 99])
    """

    room: Room = field(default_factory=Growing)
    held: Held | None = field(default=None, repr=False)

    @classmethod
    def static(cls, max_length: int) -> KVCache:
        """An empty cache for at most `max_length` positions; its memory is made once, with the first of them.

        Raises:
            ConfigurationError: a length that is no whole number of at least 1.
        """
        return cls(Static(whole_number("max_length", max_length)))

    @classmethod
    def rolling(cls, mask: Mask, max_length: int | None = None) -> KVCache:
        """An empty cache that drops the keys of which a mask says that no query to come may attend to them.

        Queries to come are those at the next position and later, without end; give `max_length` where positions stay
        below one, as they do for masks made for a length, such as `documents(ids)`: they can then tell.

        Raises:
            MaskError: no mask.
            ConfigurationError: a length that is no whole number of at least 1.
        """
        return cls(Rolling(as_mask(mask), None if max_length is None else whole_number("max_length", max_length)))

    def __len__(self) -> int:
        return 0 if self.held is None else self.held.length

    def __bool__(self) -> bool:
        return True  # an empty cache is a cache

    @property
    def mask(self) -> Mask | None:
        """By which mask it drops, or None where it keeps everything."""
        return self.room.mask if isinstance(self.room, Rolling) else None

    @property
    def keys(self) -> Tensor:
        """(batch, key heads, N, key dim); a view, not to be written to."""
        return self._filled.buffers.keys[:, :, : self._filled.length]

    @property
    def values(self) -> Tensor:
        """(batch, key heads, N, value dim); a view, not to be written to."""
        return self._filled.buffers.values[:, :, : self._filled.length]

    @property
    def positions(self) -> Tensor:
        """Where the keys sit: (N,) or (batch, N)."""
        return self._filled.buffers.positions[..., : self._filled.length]

    @property
    def next_position(self) -> int | Tensor:
        """Where the next token sits unless told otherwise: a number, or of each sequence its own, (batch,)."""
        return 0 if self.held is None else self.held.next_position

    @property
    def counted(self) -> bool:
        """Whether the keys sit at 0..N-1, as keys do that are given no positions."""
        return self.held is None or self.held.counted

    @property
    def nbytes(self) -> int:
        """The memory it holds on to, room to grow included."""
        return 0 if self.held is None else self.held.buffers.nbytes

    def following(self, count: int, device: torch.device | None = None) -> Tensor:
        """The positions of the next `count` tokens: (count,) or (batch, count)."""
        ahead, first = torch.arange(count, device=device), self.next_position
        return ahead + (first.unsqueeze(-1) if isinstance(first, Tensor) else first)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> KVCache:
        """This cache with more keys and values: at the positions that follow, or at those that are given.

        All that a query at these positions may attend to is in it.

        Shapes: keys (batch, key heads, M, key dim), values (batch, key heads, M, value dim), positions (M,) or
        (batch, M).

        Raises:
            ShapeError: another batch, heads or dims than the cache has, keys and values that do not fit together,
                positions that do not fit them; a static cache is full.
            DtypeError, DeviceError: another dtype or device than the cache has.
            ConfigurationError: a rolling cache, and a position that is earlier than the next one or beyond its end.
        """
        check_fits(keys, values, None if self.held is None else self.held.buffers)
        batch, added = keys.shape[0], keys.shape[2]
        if positions is not None:
            check_positions("positions", positions, batch, added)
            positions = positions.to(keys.device, torch.int64)
            positions = positions.expand(batch, added) if positions.ndim == 2 else positions
            self._check_order(positions)
        cache = self.trimmed()
        at = cache.following(added, keys.device) if positions is None else positions
        ahead = cache.next_position
        if positions is None:
            ahead = ahead + added
        elif added:
            ahead = positions.amax(-1) + 1
        length = len(cache) + added
        self.room.check(length, added, ahead)
        if cache.held is None:
            buffers = Buffers.of(keys, values, at, self.room.capacity(length))
            look_again = roomy(0)
        else:
            buffers = cache.held.buffers.extended(len(cache), keys, values, at, self.room.capacity(length))
            look_again = cache.held.look_again
        return replace(cache, held=Held(buffers, length, ahead, cache.counted and positions is None, look_again))

    def trimmed(self) -> KVCache:
        """This cache without what no query to come may attend to; the mask is asked when it is half as long again."""
        held = self.held
        if held is None or self.mask is None or held.length < held.look_again or not held.buffers.keys.shape[0]:
            return self
        kept = self.room.needed(self.positions, held.next_position)
        rows = kept.nonzero().squeeze(-1)
        count = len(rows)
        if count == held.length:
            return replace(self, held=replace(held, look_again=roomy(held.length)))
        buffers = held.buffers.kept(rows, roomy(count))
        return replace(self, held=replace(held, buffers=buffers, length=count, counted=False, look_again=roomy(count)))

    def select(self, rows: Tensor) -> KVCache:
        """The cache of these rows of the batch, in this order; a row may come more than once, as in a beam search.

        Shapes: rows (count,), whole numbers in 0..batch-1, or bool (batch,). An empty cache is of any batch.

        Raises:
            ShapeError, DtypeError: rows that are not that.
        """
        if self.held is None:
            return self
        check_rows(rows, self.held.buffers.keys.shape[0])
        held, room = self.held, self.held.buffers.keys.shape[2]
        buffers, ahead = held.buffers.chosen(rows, held.length, room), held.next_position
        if isinstance(ahead, Tensor) and ahead.ndim:
            ahead = ahead[rows]
        return replace(self, held=replace(held, buffers=buffers, next_position=ahead))

    def _check_order(self, positions: Tensor) -> None:
        """What was dropped, was dropped for queries at the next position and later."""
        if self.mask is None or self.held is None or not positions.shape[-1]:
            return
        least = self.held.next_position
        if bool((positions.amin(-1) < least).any()):
            raise ConfigurationError(
                f"positions go back to {int(positions.min())}, but a rolling cache has dropped what positions from "
                f"{least.tolist() if isinstance(least, Tensor) else least} on do not need: use KVCache() for that"
            )

    @property
    def _filled(self) -> Held:
        if self.held is None:
            raise ConfigurationError("the cache is empty: keys, values and positions are there after the first append")
        return self.held


@dataclass(frozen=True, eq=False)
class Held:
    """What a cache holds: the first `length` positions of buffers that other caches may share.

    next_position: see `KVCache`. counted: whether keys sit at 0..length-1. look_again: the length at which it is worth
    asking the mask what may be dropped.
    """

    buffers: Buffers
    length: int
    next_position: int | Tensor
    counted: bool
    look_again: int
