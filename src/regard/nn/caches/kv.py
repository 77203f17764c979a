"""The keys and values of the positions so far, as a value that is passed in and returned."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...errors import ConfigurationError
from ...masks import Mask, as_mask
from ...whole import whole_number
from ..checks import check_positions
from .buffers import Buffers, check_fits
from .rooms import Growing, Rolling, Room, Static, roomy
from .rows import check_rows


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
