"""What follows from the numbers of a tensor, and copies on other devices: to find them again waits for a device."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .state import counted
from .torch_modes import under_dispatch_mode, under_transform

Found = TypeVar("Found")


class _Memoized(NamedTuple):
    """A value, the writes to all tensors that torch had counted, and the tensors but the first."""

    value: Any
    versions: tuple[int, ...]
    others: tuple[weakref.ref[Tensor], ...]


_memoized: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # of dictionaries by what follows, and from whom
MAX_VALUES = 64
"""Number of values memoized for each tensor before all are cleared."""


def memoize_by_tensors(
    tensors: tuple[Tensor, ...],
    what: Hashable,
    compute: Callable[[], Found],
    when: Callable[[Found], bool] = lambda _: True,
) -> Found:
    """A value that follows from the numbers of some tensors, computed again after a write to one of them.

    `when` decides whether it is stored. It lives as long as the first of them. Of a tensor with a gradient, and of one
    whose writes torch does not count, it is computed each time.

    >>> lengths = torch.tensor([1, 3])
    >>> memoize_by_tensors((lengths,), "most", lambda: int(lengths.max()))
    3
    """
    traced = under_transform() or under_dispatch_mode()  # first: dynamo cannot trace what counts writes
    if traced or any(each.requires_grad or counted(each) is None for each in tensors):
        return compute()
    if (known := _memoized.get(tensors[0])) is None:
        known = _memoized[tensors[0]] = {}
    versions, others = tuple(each._version for each in tensors), tensors[1:]
    key = what, *map(id, others)
    found: _Memoized | None = known.get(key)
    if found is not None and found.versions == versions and _are(found.others, others):
        return found.value
    with torch.inference_mode(False):
        value = compute()
    if when(value):
        if len(known) >= MAX_VALUES:
            known.clear()
        known[key] = _Memoized(value, versions, tuple(map(weakref.ref, others)))
    return value


def _are(known: tuple[weakref.ref[Tensor], ...], tensors: tuple[Tensor, ...]) -> bool:
    return all(reference() is tensor for reference, tensor in zip(known, tensors, strict=True))


def copy_on(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor on a device: itself, or a copy, which is not made again until the tensor is written to.

    >>> lengths = torch.tensor([1, 3])
    >>> copy_on(lengths, torch.device("cpu")) is lengths, copy_on(lengths, torch.device("meta")).device.type
    (True, 'meta')
    """
    if tensor.device == device:
        return tensor
    # From the host to a device nobody has to wait; what is brought from there is read at once.
    return memoize_by_tensors((tensor,), device, lambda: tensor.to(device, non_blocking=tensor.is_cpu))
