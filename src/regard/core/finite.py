"""Whether tensors are finite, and results of which their maker has found that they are."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor


class FiniteRows(tuple[Tensor, Tensor]):
    """Output and log-sum-exp of a forward pass that wrote neither NaN nor infinity into the output."""

    __slots__ = ()


class FiniteGradients(tuple[Tensor, Tensor, Tensor, Tensor | None]):
    """Gradients of a backward pass that wrote neither NaN nor infinity into those of query, key and value."""

    __slots__ = ()


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
