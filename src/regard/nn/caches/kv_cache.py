"""The key-value cache of softmax attention: an immutable value over memory that several caches may share.

Its policy says how many positions it has memory for, and by which mask `KVCache.evict` finds keys to remove.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ...core.cache_format import CacheFormat
from ...errors import ConfigurationError, DtypeError, ShapeError
from ...kernels.validation import FLOATING
from ...masks import Mask, as_mask
from ...utils.numbers import whole_number
from ..input_checks import check_positions
from .base import Cache, KeyValueStore, check_rows
from .buffers import Buffers, check_fits
from .eviction import keys_to_retain
from .packed_buffers import PackedBuffers

SPARE = 32
"""The number of positions allocated in advance, in addition to half of the current length."""
SPARE_OF_BEAMS = 4
"""The same of a cache whose rows were reordered: a beam search does so at almost every step, and fresh memory costs
more than what is copied."""


@dataclass(frozen=True)
class Growing:
    """No limit and no eviction: memory grows by half whenever it is full, so the copies are O(1) a token on average."""

    def check(self, length: int, added: int, next_position: int | Tensor) -> None:
        """Any length fits."""

    def capacity(self, length: int) -> int:
        """Positions to allocate for a cache of this length."""
        return with_spare(length)

    def capacity_after_reorder(self, length: int) -> int:
        """Positions to allocate for other rows of a cache of this length."""
        return length + SPARE_OF_BEAMS


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

    def capacity_after_reorder(self, length: int) -> int:
        """The same."""
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

    def capacity_after_reorder(self, length: int) -> int:
        """Positions to allocate for other rows of a cache of this length."""
        return length + SPARE_OF_BEAMS


Policy = Growing | Static | Rolling


def with_spare(length: int) -> int:
    """A length plus space to grow by half.

    >>> with_spare(100)
    182
    """
    return length + length // 2 + SPARE


@dataclass(frozen=True, eq=False)
class KVCache(Cache):
    """Keys and values of all positions so far, for one layer: an immutable value that each decoding step extends.

    `append` returns a longer cache and leaves the old one unchanged, so both can be continued, as branches of a search
    are. Memory is shared between them where that is safe: a step copies nothing that came before, and only the second
    branch from one cache takes a copy. There are three kinds:

        KVCache()                   grows
        KVCache.static(length)      allocates memory for a maximal length once
        KVCache.rolling(mask)       evicts keys that no future query can attend to: O(window) memory for a window

    Each of them stores numbers as they are, or, `packed`, codes of 8 or 4 bits.

    Shapes: keys (batch, key heads, N, key dim) and values (batch, key heads, N, value dim), positions (N,) or
    (batch, N). A rolling cache evicts from time to time: beside the last chunk it stores at most 1.5 times the keys
    that the mask needs, and 32 more.

    Decode under `torch.no_grad()` or `torch.inference_mode()`: where gradients are recorded every step copies.

    >>> import torch, regard
    >>> mask = regard.masks.causal() & regard.masks.window(before=3)
    >>> cache = regard.nn.KVCache.rolling(mask)
    >>> with torch.no_grad():
    ...     for token in torch.randn(100, 2, 4, 1, 8):
    ...         cache = cache.append(token, token)
    >>> cache.next_position, len(cache) < 40, cache.positions[-4:].tolist()
    (100, True, [96, 97, 98, 99])
    """

    policy: Policy = field(default_factory=Growing)
    contents: Contents | None = field(default=None, repr=False)
    formats: tuple[CacheFormat, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.policy, Policy):
            raise ConfigurationError(
                f"policy is {self.policy!r}; a cache is made by KVCache(), KVCache.static(length) or "
                "KVCache.rolling(mask)"
            )

    @classmethod
    def static(cls, max_length: int) -> KVCache:
        """An empty cache for at most `max_length` positions, whose memory is allocated once, by the first `append`.

        Raises:
            ConfigurationError: a length that is no integer of at least 1.
        """
        return cls(Static(whole_number("max_length", max_length)))

    @classmethod
    def rolling(cls, mask: Mask, max_length: int | None = None) -> KVCache:
        """An empty cache that evicts the keys to which no future query can attend under a mask.

        Future queries are those at the next position and later, without end. With `max_length` they end below it: masks
        made for a length, such as `documents(ids)`, can be decided only then.

        Raises:
            MaskError: no mask.
            ConfigurationError: a length that is no integer of at least 1.
        """
        return cls(Rolling(as_mask(mask), None if max_length is None else whole_number("max_length", max_length)))

    def packed(self, *formats: CacheFormat) -> KVCache:
        """This empty cache, of any kind, which stores keys and values as codes: one format, or one for each key head.

        The kernel `decode` reads the codes as they are, in C on the CPU; whatever else reads `keys` and `values` gets
        the numbers that they stand for. For heads of 128, int8 takes 0.52 of the bytes of 16-bit numbers, int4 0.27.
        What that costs in accuracy `regard.model_approximation` measures on your own model, with formats as methods.

        Raises:
            ConfigurationError: no format, or what is none; a cache that has keys.

        >>> import torch, regard
        >>> cache = regard.nn.KVCache.static(128).packed(regard.nn.CacheFormat())
        >>> with torch.no_grad():
        ...     cache = cache.append(torch.ones(1, 2, 100, 128), torch.ones(1, 2, 100, 128))
        >>> cache.keys.shape, cache.nbytes / 128  # of 2 · 2 heads · (128 codes, a scale and an offset)
        (torch.Size([1, 2, 100, 128]), 528.0)
        """
        if not formats or not all(isinstance(each, CacheFormat) for each in formats):
            has = ", ".join(map(repr, formats)) or "none"
            raise ConfigurationError(
                f"packed needs formats such as CacheFormat(), one or one for each head; it got {has}"
            )
        if self.contents is not None:
            raise ConfigurationError(
                f"the cache has {len(self)} tokens, stored as they came: pack an empty one, and append them to it"
            )
        return replace(self, formats=formats)

    def __len__(self) -> int:
        return 0 if self.contents is None else self.contents.length

    def __bool__(self) -> bool:
        return True  # so that an empty cache is not mistaken for None

    @property
    def mask(self) -> Mask | None:
        """The mask that decides which keys are evicted; None if no key is ever evicted."""
        return self.policy.mask if isinstance(self.policy, Rolling) else None

    @property
    def keys(self) -> Tensor:
        """(batch, key heads, N, key dim): a read-only view."""
        filled = self._filled
        return filled.buffers.keys_until(filled.length)

    @property
    def values(self) -> Tensor:
        """(batch, key heads, N, value dim): a read-only view."""
        filled = self._filled
        return filled.buffers.values_until(filled.length)

    @property
    def positions(self) -> Tensor:
        """Positions of the keys: (N,) or (batch, N)."""
        return self._filled.known_positions(self.keys.device)

    @property
    def consecutive_positions(self) -> range | None:
        """Positions of the keys, of which the last is that before the next token's, where they are consecutive.

        They are unless positions were given, or keys between others evicted. No device is asked for them.
        """
        return None if self.contents is None else self.contents.consecutive

    @property
    def next_position(self) -> int | Tensor:
        """Default position of the next token: one number, or (batch,) where the sequences differ."""
        return 0 if self.contents is None else self.contents.next_position

    @property
    def has_default_positions(self) -> bool:
        """Whether the keys are at positions 0..N-1, as keys without explicit positions are."""
        contents = self.contents
        return contents is None or (contents.positions is None and contents.length == contents.next_position)

    @property
    def nbytes(self) -> int:
        """Allocated bytes, spare positions included."""
        return 0 if self.contents is None else self.contents.nbytes

    def append(self, keys: Tensor, values: Tensor, positions: Tensor | None = None) -> KVCache:
        """This cache with M more keys and values, at the next positions or at the given ones.

        It contains every key that a query at these positions may attend to.

        Shapes: keys (batch, key heads, M, key dim), values (batch, key heads, M, value dim), positions (M,) or
        (batch, M).

        Raises:
            ShapeError: another batch, heads or dims than the cache has, keys and values that do not fit together,
                positions that do not fit them; a static cache is full.
            DtypeError, DeviceError: another dtype or device than the cache has; a dtype that attention does not read.
            ConfigurationError: a rolling cache, and a position that is earlier than the next one or beyond its end.
        """
        check_fits(keys, values, None if self.contents is None else self.contents.buffers)
        batch, added = keys.shape[0], keys.shape[2]
        if positions is not None:
            check_positions("positions", positions, batch, added)
            positions = positions.to(keys.device, torch.int64)
            positions = positions.expand(batch, added) if positions.ndim == 2 else positions
            self._check_order(positions)
        cache = self.evict()  # `step` of a layer has done so already; other callers may not have
        next_position = cache.next_position
        if positions is None:
            next_position = next_position + added
        elif added:
            next_position = positions.amax(-1) + 1
        length = len(cache) + added
        self.policy.check(length, added, next_position)
        capacity, contents = self.policy.capacity(length), cache.contents
        if contents is None:
            buffers, evict_at = self._allocate(keys, values, capacity), with_spare(0)
        else:
            buffers = contents.buffers.extend(contents.length, keys, values, capacity)
            evict_at = contents.evict_at
        if positions is not None or (contents is not None and contents.positions is not None):
            positions = cache._positions_with(positions, batch, added, keys.device)
        return KVCache(self.policy, Contents(buffers, length, next_position, evict_at, positions), self.formats)

    def _positions_with(self, new: Tensor | None, batch: int, added: int, device: torch.device) -> Tensor:
        """The positions with those of `added` more keys, on a device where any were given on one."""
        own = None if self.contents is None else self.contents.positions
        if own is None:
            own = torch.arange(0, device=device) if self.contents is None else self.positions
        new = self.next_positions(added, own.device) if new is None else new
        own = own.to(new.device)
        if max(own.ndim, new.ndim) == 2:
            own, new = (each.expand(batch, each.shape[-1]) for each in (own, new))
        return torch.cat([own, new], -1)

    def _allocate(self, keys: Tensor, values: Tensor, capacity: int) -> Buffers | PackedBuffers:
        """The first buffers."""
        if keys.dtype not in FLOATING:
            raise DtypeError(
                f"the cache was given keys of {keys.dtype}, which attention does not read: append numbers of 16, 32 or "
                'more bits; a cache that is .packed(CacheFormat(Packing("float8_e4m3fn"), Packing("float8_e4m3fn"))), '
                "or in int8 or int4, stores them in fewer"
            )
        if self.formats:
            return PackedBuffers.allocate(self.formats, keys, values, capacity)
        return Buffers.allocate(keys, values, capacity)

    def evict(self) -> KVCache:
        """This cache without keys that no future query can attend to; evaluated once it is as long as `evict_at`.

        That is 1.5 times the keys that it had after the last evaluation, and 32: at 32 keys for the first time.
        """
        contents = self.contents
        if contents is None or not isinstance(self.policy, Rolling):
            return self
        if contents.length < contents.evict_at or not self.keys.shape[0]:
            return self
        policy, next_position, positions = self.policy, contents.next_position, contents.known_positions()
        retained = keys_to_retain(policy.mask, positions, next_position, policy.max_length)
        retained = contents.buffers.retainable(retained)
        columns = retained.nonzero().squeeze(-1)
        length, evict_at = len(columns), with_spare(len(columns))
        if length == contents.length:
            return replace(self, contents=replace(contents, evict_at=evict_at))
        buffers = contents.buffers.take_columns(columns.to(self.keys.device, non_blocking=True), evict_at)
        # Where the last of consecutive ones are left, they still are.
        last = contents.positions is None and (not length or int(columns[0]) == contents.length - length)
        left = None if last else positions[..., columns]
        return replace(self, contents=Contents(buffers, length, next_position, evict_at, left))

    def reorder(self, rows: Tensor) -> KVCache:
        """The cache for these rows of the batch, in this order; rows may repeat, as in beam search.

        Shapes: rows (count,), integers in 0..batch-1, or bool (batch,). An empty cache fits any batch.

        Raises:
            ShapeError, DtypeError: other shapes, dtypes or values.
        """
        if self.contents is None:
            return self
        check_rows(rows, self.contents.buffers.keys.shape[0])
        contents, capacity = self.contents, self.policy.capacity_after_reorder(self.contents.length)
        buffers, next_position = contents.buffers.take_rows(rows, contents.length, capacity), contents.next_position
        if isinstance(next_position, Tensor) and next_position.ndim:
            next_position = next_position[rows]
        positions = contents.positions
        if positions is not None and positions.ndim == 2:
            positions = positions[rows]
        contents = replace(contents, buffers=buffers, next_position=next_position, positions=positions)
        return replace(self, contents=contents)

    def _check_order(self, positions: Tensor) -> None:
        """Refuse earlier positions after eviction: keys were evicted for queries at the next position and later."""
        if self.mask is None or self.contents is None or not positions.shape[-1]:
            return
        least = self.contents.next_position
        if bool((positions.amin(-1) < least).any()):
            raise ConfigurationError(
                f"positions go back to {int(positions.min())}, but a rolling cache has evicted keys that queries from "
                f"{least.tolist() if isinstance(least, Tensor) else least} on cannot attend to: use KVCache() for that"
            )

    @property
    def _filled(self) -> Contents:
        if self.contents is None:
            raise ConfigurationError("the cache is empty: keys, values and positions are there after the first append")
        return self.contents


@dataclass(frozen=True, eq=False)
class Contents:
    """The contents of a non-empty cache: the first `length` positions of buffers that other caches may share.

    next_position: see `KVCache`. evict_at: the length at which eviction is tried again. positions: (N,) or (batch, N);
    None where they are consecutive and end before the next one, so that no tensor is written for them. Else they are on
    the device of the keys if some were given, and on the host if not.
    """

    buffers: Buffers | PackedBuffers
    length: int
    next_position: int | Tensor
    evict_at: int
    positions: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return self.buffers.nbytes + (0 if self.positions is None else self.positions.nbytes)

    @property
    def consecutive(self) -> range | None:
        """The positions where they are consecutive, up to that before the next one."""
        if self.positions is not None or isinstance(self.next_position, Tensor):
            return None
        return range(self.next_position - self.length, self.next_position)

    def known_positions(self, device: torch.device | None = None) -> Tensor:
        """The positions on a device; without one where they are known, on the host unless some were given elsewhere."""
        if self.positions is not None:
            return self.positions if device is None else self.positions.to(device, non_blocking=True)
        known = self.consecutive or range(0)
        return torch.arange(known.start, known.stop, device=device or torch.device("cpu"))


@dataclass(frozen=True, eq=False)
class ProjectedMemory:
    """Keys and values of a memory, as `Attention.project_memory` returns them; layers accept it in place of the memory.

    Shapes: keys (batch, key heads, N, ·), values (batch, key heads, N, value dim), positions (N,) or (batch, N), or
    None where they are 0..N-1.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor | None = None

    @classmethod
    def of_cache(cls, cache: KeyValueStore) -> ProjectedMemory:
        """What a cache holds now: views, which change where the cache is written in place."""
        return cls(cache.keys, cache.values, None if cache.has_default_positions else cache.positions)

    def __len__(self) -> int:
        return self.values.shape[2]

    def __bool__(self) -> bool:
        return True  # so that a memory of length 0 is not mistaken for None

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values."""
        return self.keys.nbytes + self.values.nbytes

    def reorder(self, rows: Tensor) -> ProjectedMemory:
        """The memory for these rows of the batch, in this order; rows may repeat.

        Raises:
            ShapeError, DtypeError: rows that are not integers in 0..batch-1, or bool for each row of the batch.
        """
        check_rows(rows, self.values.shape[0])
        positions = self.positions
        if positions is not None and positions.ndim == 2 and len(positions) > 1:
            positions = positions[rows]
        return replace(self, keys=self.keys[rows], values=self.values[rows], positions=positions)
