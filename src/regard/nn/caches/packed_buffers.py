"""Buffers whose keys and values are codes, of formats that may differ by head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...core.cache_format import CacheFormat
from ...core.packed_rows import CodeRows, KeyCodes, PackedHeads, PackedTensor, ValueCodes
from ...core.packing import BLOCK
from ...errors import ConfigurationError
from ...kernels.packed_inputs import store


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """The heads of one format: `packed` tokens as codes, and after them the newest as they are."""

    heads: tuple[int, ...]
    format: CacheFormat
    keys: CodeRows | None
    values: CodeRows | None
    packed: int
    newest_keys: Tensor
    newest_values: Tensor

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        stored = sum(codes.nbytes for codes in (self.keys, self.values) if codes is not None)
        return stored + self.newest_keys.nbytes + self.newest_values.nbytes

    def append(self, keys: Tensor, values: Tensor) -> PackedGroup:
        """These tokens and more of them; codes are written where there is memory for them."""
        if self.keys is not None and self.values is not None and not self.format.by_blocks:
            store(self.keys, self.packed, keys)
            store(self.values, self.packed, values)
            return replace(self, packed=self.packed + keys.shape[2])
        keys = torch.cat([self.newest_keys, keys], 2)
        values = torch.cat([self.newest_values, values], 2)
        count = max(keys.shape[2] - self.format.newest, 0) // BLOCK * BLOCK
        if self.keys is None or self.values is None or not count:
            return replace(self, newest_keys=keys, newest_values=values)
        store(self.keys, self.packed, keys[:, :, :count])
        store(self.values, self.packed, values[:, :, :count])
        left = {"newest_keys": keys[:, :, count:].clone(), "newest_values": values[:, :, count:].clone()}
        return replace(self, packed=self.packed + count, **left)

    def until(self, length: int) -> tuple[PackedHeads, PackedHeads]:
        """Keys and values of the first `length` tokens."""
        whole = length - self.packed
        keys, values = self.newest_keys[:, :, :whole], self.newest_values[:, :, :whole]
        return (
            PackedHeads(self.heads, self.keys, 0, self.packed, keys),
            PackedHeads(self.heads, self.values, 0, self.packed, values),
        )

    def with_capacity(self, capacity: int) -> PackedGroup:
        """A copy with memory for codes of `capacity` tokens."""
        if self.keys is None or self.values is None:
            return self
        return replace(self, keys=self.keys.with_capacity(capacity), values=self.values.with_capacity(capacity))

    def take_columns(self, columns: Tensor, capacity: int) -> PackedGroup:
        """These tokens of all, in memory of their own."""
        coded = columns < self.packed
        left = columns[~coded] - self.packed
        taken = replace(self, newest_keys=self.newest_keys[:, :, left], newest_values=self.newest_values[:, :, left])
        if self.keys is None or self.values is None:
            return taken
        columns = columns[coded]
        keys, values = (codes.take_tokens(columns, capacity) for codes in (self.keys, self.values))
        return replace(taken, keys=keys, values=values, packed=len(columns))

    def take_rows(self, rows: Tensor) -> PackedGroup:
        """These rows of the batch, copied."""
        taken = replace(self, newest_keys=self.newest_keys[rows], newest_values=self.newest_values[rows])
        if self.keys is None or self.values is None:
            return taken
        return replace(taken, keys=self.keys.take_rows(rows), values=self.values.take_rows(rows))


@dataclass(eq=False)
class PackedBuffers:
    """`Buffers` of codes: groups of heads, with memory for `capacity` tokens, of which the first `filled` are set.

    The codes of earlier tokens are never written again, so that several caches may share them.
    """

    groups: tuple[PackedGroup, ...]
    capacity: int
    filled: int

    @classmethod
    def allocate(cls, formats: Sequence[CacheFormat], keys: Tensor, values: Tensor, capacity: int) -> PackedBuffers:
        """New buffers for `capacity` tokens that start with these; one format for all heads, or one for each.

        Raises:
            ConfigurationError: another number of formats than key heads; keys or values with gradients.
            DtypeError, ShapeError: keys or values that the formats cannot store.
        """
        heads = keys.shape[1]
        if len(formats) not in (1, heads):
            raise ConfigurationError(
                f"the cache has {len(formats)} formats, and the keys have {heads} heads: give one format, or one for "
                "each key head"
            )
        of_head = [formats[0]] * heads if len(formats) == 1 else [*formats]
        groups = []
        for format_ in dict.fromkeys(of_head):
            own = [head for head in range(heads) if of_head[head] == format_]
            groups.append(_group(own, format_, keys[:, own], values[:, own], capacity))
        return cls(tuple(groups), max(capacity, keys.shape[2]), filled=keys.shape[2])

    @property
    def keys(self) -> Tensor:
        """(B, H, N, D), N the tokens of the cache that was extended last."""
        return self.keys_until(self.filled)

    @property
    def values(self) -> Tensor:
        """(B, H, N, Dv)."""
        return self.values_until(self.filled)

    @property
    def nbytes(self) -> int:
        """Allocated bytes."""
        return sum(group.nbytes for group in self.groups)

    def keys_until(self, length: int) -> Tensor:
        """Keys of the first `length` tokens: a view, read as numbers by any operation of torch."""
        return PackedTensor([group.until(length)[0] for group in self.groups])

    def values_until(self, length: int) -> Tensor:
        """Values of the first `length` tokens, likewise."""
        return PackedTensor([group.until(length)[1] for group in self.groups])

    def retainable(self, retained: Tensor) -> Tensor:
        """Which tokens stay if these (N,) have to: of tokens that share parameters by channel, all or none."""
        shared = [
            group.packed for group in self.groups if group.format.keys is not None and group.format.keys.by_channel
        ]
        count = max(shared, default=0)
        if not count:
            return retained
        blocks = retained[:count].unflatten(0, (-1, BLOCK)).any(1, keepdim=True).expand(-1, BLOCK)
        return torch.cat([blocks.flatten(), retained[count:]])

    def extend(self, length: int, keys: Tensor, values: Tensor, capacity: int) -> PackedBuffers:
        """The first `length` tokens followed by new ones: in place where possible, else in new buffers."""
        for group in self.groups:
            group.format.check(keys, values)
        total, groups, capacity = length + keys.shape[2], self.groups, max(capacity, length + keys.shape[2])
        if self.filled == length and total <= self.capacity and self._writable():
            self.filled, capacity = total, self.capacity  # a cache that ends before takes a copy
        else:
            groups = tuple(group.with_capacity(capacity) for group in groups)
        if len(groups) == 1:  # of all heads, in their order
            return PackedBuffers((groups[0].append(keys, values),), capacity, total)
        groups = tuple(group.append(keys[:, group.heads], values[:, group.heads]) for group in groups)
        return PackedBuffers(groups, capacity, total)

    def take_columns(self, columns: Tensor, capacity: int) -> PackedBuffers:
        """These columns (count,) of all rows, copied to new buffers: codes as they are."""
        groups = tuple(group.take_columns(columns, capacity) for group in self.groups)
        return PackedBuffers(groups, max(capacity, len(columns)), len(columns))

    def take_rows(self, rows: Tensor, length: int, capacity: int) -> PackedBuffers:
        """The first `length` tokens of these rows of the batch, copied to new buffers, which are as long as these."""
        groups = tuple(group.take_rows(rows) for group in self.groups)
        return PackedBuffers(groups, self.capacity, length)

    def _writable(self) -> bool:
        """Whether no memory of inference mode would be written outside of it."""
        if torch.is_inference_mode_enabled():
            return True
        return not any(codes.words.is_inference() for each in self.groups if (codes := each.keys) is not None)


def _group(heads: list[int], format_: CacheFormat, keys: Tensor, values: Tensor, capacity: int) -> PackedGroup:
    """A group of heads in new memory."""
    format_.check(keys, values)
    group = PackedGroup(tuple(heads), format_, None, None, 0, keys[:, :, :0], values[:, :, :0])
    if format_.keys is not None and format_.values is not None:
        key_codes = KeyCodes.allocate(format_.keys, keys, capacity)
        group = replace(group, keys=key_codes, values=ValueCodes.allocate(format_.values, values, capacity))
    return group.append(keys, values)
