"""Whether tensors are finite, and results that need no check for NaN."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor


class CheckedRows(tuple[Tensor, Tensor]):
    """Output and log-sum-exp that need no check for NaN: no masked number can be in them.

    Their maker has found that the output is finite, or never multiplies what is masked.
    """

    __slots__ = ()


class SinkRows(tuple[Tensor, Tensor]):
    """Output and log-sum-exp in which the sinks of the problem are counted already."""

    __slots__ = ()


class CheckedGradients(tuple[Tensor, Tensor, Tensor, Tensor | None]):
    """Gradients that need no check for NaN, as `CheckedRows`: those of query, key and value, and of a bias.

    A row whose output is NaN has no part in them.
    """

    __slots__ = ()


def waits(tensor: Tensor) -> bool:
    """Whether to read a number of a tensor would wait for the device that computes it."""
    return not tensor.is_cpu


Reader: TypeAlias = Callable[[Tensor], bool | None]
"""Whether all entries of a tensor are finite; None of a tensor that it does not read."""

_readers: list[Reader] = []


def register_reader(reader: Reader) -> None:
    """Have a backend read the tensors that it reads faster than torch."""
    _readers.append(reader)


def all_finite(*tensors: Tensor) -> bool:
    """Whether no entry of any tensor is NaN or infinite."""
    for tensor in tensors:
        finite = None
        for reader in _readers:
            if (finite := reader(tensor)) is not None:
                break
        if finite is None:
            return _sums_are_finite(tensors) or all(bool(each.isfinite().all()) for each in tensors)
        if not finite:
            return False
    return True


def _sums_are_finite(tensors: tuple[Tensor, ...]) -> bool:
    """Whether one sum a tensor, or one dot product of two, is finite, which proves that all entries are."""
    if len(tensors) == 2:
        a, b = tensors
        as_vectors = (
            a.dtype is b.dtype is torch.float32
            and a.shape == b.shape
            and a.is_contiguous()
            and b.is_contiguous()
            and a.numel() < 2**31  # what torch.dot takes on a GPU
        )
        if as_vectors and math.isfinite(torch.dot(a.detach().view(-1), b.detach().view(-1)).item()):
            return True
    return all(math.isfinite(tensor.detach().sum(dtype=torch.float32).item()) for tensor in tensors)
