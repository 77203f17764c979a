"""All backends, in the order in which they are asked, and who of them has which group of methods."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Generic, TypeVar

import torch
from torch import Tensor

from .base import Backend
from .cpu.cpu_backend import CPU
from .torch.torch_backend import TORCH
from .triton.triton_backend import TRITON

BACKENDS: tuple[Backend, ...] = (CPU, TRITON, TORCH)


Group = TypeVar("Group")


class Makers(Generic[Group]):
    """The backends that have a group of methods, in the order in which they are asked.

    group: of a backend the methods, or None.
    """

    def __init__(self, group: Callable[[Backend], Group | None]) -> None:
        self._group = group

    def why_not(self, *tensors: Tensor) -> list[str]:
        """Why none of them computes tensors of this device and dtype; empty if one does."""
        if self.find(*tensors) is not None:
            return []
        backends = [each for each in BACKENDS if self._group(each) is not None]
        return [reason for backend in backends for reason in backend.why_not(tensors[-1])]

    def find(self, *tensors: Tensor) -> tuple[str, Group] | None:
        """The first that computes tensors of this device and dtype: its name, and its methods; None if none does."""
        for backend in BACKENDS:
            if (methods := self._group(backend)) is not None and backend.runs(*tensors):
                return backend.name, methods
        return None

    def of(self, *tensors: Tensor) -> tuple[str, Group]:
        """The same where one is known to be there, as `why_not` has no reasons."""
        if (found := self.find(*tensors)) is None:
            raise AssertionError("no backend computes these tensors, though `why_not` had no reasons")
        return found


_NAN_SAFE = tuple(backend for backend in BACKENDS if backend.nan_safe)


def is_nan_safe(name: str) -> bool:
    """Whether the backend of that name is, as `Backend.nan_safe` describes it."""
    return any(backend.name == name for backend in _NAN_SAFE)


@cache
def some_nan_safe(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend that is computes tensors of this device and dtype."""
    return any(backend.runs(torch.empty(0, device=device, dtype=dtype)) for backend in _NAN_SAFE)
