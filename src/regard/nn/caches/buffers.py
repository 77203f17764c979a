"""Buffers for keys and values with spare capacity, whose filled part several caches may share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...core.torch_modes import under_transform
from ...errors import DeviceError, DtypeError, ShapeError
from ...utils.other_types import needs_tensor


class KeysAndValues(Protocol):
    """Whatever has stored keys and values."""

    @property
    def keys(self) -> Tensor: ...

    @property
    def values(self) -> Tensor: ...


@dataclass(eq=False)
class Buffers:
    """keys (B, H, C, D) and values (B, H, C, Dv), of which the first `filled` of C are set.

    The filled part is never written again. So a cache that ends at `filled` appends in place; one that ends earlier,
    because another cache has appended since, gets a copy.
    """

    keys: Tensor
    values: Tensor
    filled: int

    @classmethod
    def allocate(cls, keys: Tensor, values: Tensor, capacity: int) -> Buffers:
        """New buffers of this capacity that start with copies of the tensors; the tensors themselves with gradients."""
        if torch.is_grad_enabled():
            return cls(keys, values, keys.shape[2])
        return cls(with_capacity(keys, 2, capacity), with_capacity(values, 2, capacity), keys.shape[2])

    @property
    def capacity(self) -> int:
        """Positions that there is memory for."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Allocated bytes of both tensors."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.keys, self.values))

    def keys_until(self, length: int) -> Tensor:
        """Keys of the first `length` positions: a view."""
        return self.keys.narrow(2, 0, length)

    def values_until(self, length: int) -> Tensor:
        """Values of the first `length` positions: a view."""
        return self.values.narrow(2, 0, length)

    def retainable(self, retained: Tensor) -> Tensor:
        """Which positions stay if these (N,) have to: these alone."""
        return retained

    def extend(self, length: int, keys: Tensor, values: Tensor, capacity: int) -> Buffers:
        """The first `length` positions followed by new ones: in place where possible, else in new buffers."""
        added = keys.shape[2]
        total = length + added
        if torch.is_grad_enabled():  # autograd may need the old tensors unchanged
            tensors = (self.keys[:, :, :length], keys), (self.values[:, :, :length], values)
            return Buffers(*(torch.cat(pair, 2) for pair in tensors), filled=total)
        buffers = self
        if not self._can_append_in_place(length, total):
            buffers = Buffers.allocate(self.keys[:, :, :length], self.values[:, :, :length], capacity)
        buffers.keys.narrow(2, length, added).copy_(keys)
        buffers.values.narrow(2, length, added).copy_(values)
        buffers.filled = total
        return buffers

    def take_columns(self, columns: Tensor, capacity: int) -> Buffers:
        """These columns (count,) of all rows, copied to new buffers."""
        return Buffers.allocate(self.keys[:, :, columns], self.values[:, :, columns], capacity)

    def take_rows(self, rows: Tensor, length: int, capacity: int) -> Buffers:
        """The first `length` positions of these rows of the batch, copied to new buffers."""
        rows = (rows.nonzero().squeeze(-1) if rows.dtype == torch.bool else rows).to(self.keys.device)
        keys, values = self.keys[:, :, :length], self.values[:, :, :length]
        if torch.is_grad_enabled() or under_transform():
            return Buffers.allocate(keys.index_select(0, rows), values.index_select(0, rows), capacity)
        keys, values = (_rows_with_capacity(part, rows, capacity) for part in (keys, values))
        return Buffers(keys, values, filled=length)

    def _can_append_in_place(self, length: int, total: int) -> bool:
        """Whether no other cache has appended after the first `length` positions, and `total` fit."""
        writable = not self.keys.is_inference() or torch.is_inference_mode_enabled()
        return writable and self.filled == length and total <= self.keys.shape[2]


def with_capacity(tensor: Tensor, axis: int, capacity: int) -> Tensor:
    """A copy with `capacity` entries along an axis, of which those after the given ones are not initialised."""
    shape = list(tensor.shape)
    length, shape[axis] = shape[axis], max(capacity, shape[axis])
    padded = tensor.new_empty(shape)
    padded.narrow(axis, 0, length).copy_(tensor)
    return padded


def _rows_with_capacity(tensor: Tensor, rows: Tensor, capacity: int) -> Tensor:
    """Rows of (B, H, N, D) with `capacity` positions, of which those after the N are not initialised: copied once."""
    length = tensor.shape[2]
    padded = tensor.new_empty(len(rows), tensor.shape[1], max(capacity, length), tensor.shape[3])
    torch.index_select(tensor, 0, rows, out=padded[:, :, :length])
    return padded


def check_fits(keys: Tensor, values: Tensor, stored: KeysAndValues | None) -> None:
    """Check that new keys and values fit each other and the stored ones.

    Raises:
        ShapeError, DtypeError, DeviceError: they do not; the message names both, and the fix.
    """
    for name, given in (("keys", keys), ("values", values)):
        if refused := needs_tensor(name, given):
            raise DtypeError(refused)
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"keys have the shape {tuple(keys.shape)} and values {tuple(values.shape)}; they need "
            "(batch, key heads, length, dim), all but dim alike"
        )
    if stored is None:
        return
    if keys.shape[0] != stored.keys.shape[0]:
        raise ShapeError(
            f"the cache has the batch size {stored.keys.shape[0]}, and the new keys have {keys.shape[0]}: both need "
            "the same batch. cache.reorder(rows) returns the cache of other rows; start another batch with a new cache"
        )
    other = "each layer needs a cache of its own"
    if keys.shape[1] != stored.keys.shape[1]:
        raise ShapeError(
            f"the cache has {stored.keys.shape[1]} key heads, and the new keys have {keys.shape[1]}: {other}"
        )
    for name, new, own in (("key", keys, stored.keys), ("value", values, stored.values)):
        if new.shape[3] != own.shape[3]:
            raise ShapeError(
                f"the cache has {name} dim {own.shape[3]}, and the new {name}s have {new.shape[3]}: {other}"
            )
        if new.dtype != own.dtype:
            raise DtypeError(
                f"the cache has {name}s of {own.dtype}, and the new {name}s are {new.dtype}: prefill and decode in one "
                "dtype, both under autocast or neither, or start with a new cache"
            )
        if new.device != own.device:
            raise DeviceError(
                f"the cache is on {own.device}, and the new {name}s on {new.device}: decode on the device of the "
                "prefill, or start with a new cache"
            )
