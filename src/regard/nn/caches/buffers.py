"""Memory for keys, values and positions, with room to grow: several caches may share its beginning."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import DeviceError, DtypeError, ShapeError


@dataclass(eq=False)
class Buffers:
    """keys (B, H, C, D), values (B, H, C, Dv), positions (C,) or (B, C), for C positions of which `filled` are taken.

    What is taken is never written to again. So a cache may go on in place where it ends at `filled`; where another
    one went on from there before, it gets memory of its own.
    """

    keys: Tensor
    values: Tensor
    positions: Tensor
    filled: int

    @classmethod
    def of(cls, keys: Tensor, values: Tensor, positions: Tensor, capacity: int) -> Buffers:
        """Memory that begins with these."""
        if torch.is_grad_enabled():
            return cls(keys, values, positions, keys.shape[2])
        held = [_with_room(tensor, axis, capacity) for tensor, axis in ((keys, 2), (values, 2), (positions, -1))]
        return cls(*held, filled=keys.shape[2])

    @property
    def nbytes(self) -> int:
        """Bytes of all three."""
        return sum(tensor.untyped_storage().nbytes() for tensor in (self.keys, self.values, self.positions))

    def extended(self, length: int, keys: Tensor, values: Tensor, positions: Tensor, capacity: int) -> Buffers:
        """The first `length` positions and these behind them: in place, or in new memory of the capacity."""
        total = length + keys.shape[2]
        batch = max(self.positions.ndim, positions.ndim) == 2
        own, new = _per_batch(self.positions, batch, keys.shape[0]), _per_batch(positions, batch, keys.shape[0])
        if torch.is_grad_enabled():  # nothing that a gradient may need is ever written to
            tensors = (self.keys[:, :, :length], keys), (self.values[:, :, :length], values), (own[..., :length], new)
            joined = [torch.cat(pair, axis) for pair, axis in zip(tensors, (2, 2, -1), strict=True)]
            return Buffers(*joined, filled=total)
        buffers = self
        if not self._may_go_on(length, total) or own is not self.positions:
            begun = self.keys[:, :, :length], self.values[:, :, :length], own[..., :length]
            buffers = Buffers.of(*begun, capacity)
        buffers.keys[:, :, length:total] = keys
        buffers.values[:, :, length:total] = values
        buffers.positions[..., length:total] = new
        buffers.filled = total
        return buffers

    def kept(self, rows: Tensor | slice, capacity: int) -> Buffers:
        """Some of the positions, in new memory."""
        positions = self.positions[..., rows]
        return Buffers.of(self.keys[:, :, rows], self.values[:, :, rows], positions, capacity)

    def chosen(self, batch: Tensor, length: int, capacity: int) -> Buffers:
        """The first `length` positions of some rows of the batch, in new memory."""
        positions = self.positions[..., :length]
        if positions.ndim == 2:
            positions = positions[batch]
        return Buffers.of(self.keys[batch, :, :length], self.values[batch, :, :length], positions, capacity)

    def _may_go_on(self, length: int, total: int) -> bool:
        """Whether what comes next may be written behind the first `length` positions."""
        own = not self.keys.is_inference() or torch.is_inference_mode_enabled()
        return own and self.filled == length and total <= self.keys.shape[2]


def _with_room(tensor: Tensor, axis: int, capacity: int) -> Tensor:
    """The same numbers at the beginning of memory for `capacity` along an axis."""
    shape = list(tensor.shape)
    length, shape[axis] = shape[axis], max(capacity, shape[axis])
    roomy = tensor.new_empty(shape)
    roomy.narrow(axis, 0, length).copy_(tensor)
    return roomy


def _per_batch(positions: Tensor, wanted: bool, batch: int) -> Tensor:
    """Positions of each sequence of the batch, where that is wanted."""
    if not wanted or (positions.ndim == 2 and positions.shape[0] == batch):
        return positions
    return positions.expand(batch, positions.shape[-1])


def check_fits(keys: Tensor, values: Tensor, held: Buffers | None) -> None:
    """Keys and values that fit each other, and what is held already.

    Raises:
        ShapeError, DtypeError, DeviceError: they do not; the message has both, and the mend.
    """
    if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
        raise ShapeError(
            f"keys have the shape {tuple(keys.shape)} and values {tuple(values.shape)}; they need "
            "(batch, key heads, length, dim), all but dim alike"
        )
    if held is None:
        return
    if keys.shape[0] != held.keys.shape[0]:
        raise ShapeError(
            f"the cache has the batch {held.keys.shape[0]}, and what comes {keys.shape[0]}: a cache goes on with its "
            "own batch. cache.select(rows) gives the cache of other rows; another batch starts with a new cache"
        )
    other = "each layer needs a cache of its own"
    if keys.shape[1] != held.keys.shape[1]:
        raise ShapeError(f"the cache has {held.keys.shape[1]} key heads, and what comes {keys.shape[1]}: {other}")
    for name, new, own in (("key", keys, held.keys), ("value", values, held.values)):
        if new.shape[3] != own.shape[3]:
            raise ShapeError(f"the cache has {name} dim {own.shape[3]}, and what comes {new.shape[3]}: {other}")
        if new.dtype != own.dtype:
            raise DtypeError(
                f"the cache has {name}s of {own.dtype}, and what comes is {new.dtype}: prefill and decode in one "
                "dtype, both under autocast or neither, or start with a new cache"
            )
        if new.device != own.device:
            raise DeviceError(
                f"the cache is on {own.device}, and what comes on {new.device}: decode on the device of the prefill, "
                "or start with a new cache"
            )
