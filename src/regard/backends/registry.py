"""All backends, in the order in which they are asked, and who of them has which group of methods."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from .base import Backend
from .cpu.cpu_backend import CPU
from .torch.torch_backend import TORCH
from .triton.triton_backend import TRITON

BACKENDS: tuple[Backend, ...] = (CPU, TRITON, TORCH)


def reasons_against(backends: Sequence[Backend], value: Tensor) -> list[str]:
    """Why none of these backends computes tensors of this device and dtype; empty if one does."""
    if any(backend.runs(value) for backend in backends):
        return []
    return [reason for backend in backends for reason in backend.why_not(value)]


_NAN_SAFE = tuple(backend for backend in BACKENDS if backend.nan_safe)


def is_nan_safe(name: str) -> bool:
    """Whether the backend of that name is, as `Backend.nan_safe` describes it."""
    return any(backend.name == name for backend in _NAN_SAFE)


@cache
def some_nan_safe(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a backend that is computes tensors of this device and dtype."""
    return any(backend.runs(torch.empty(0, device=device, dtype=dtype)) for backend in _NAN_SAFE)
