"""What torch's transforms do to a call: what they look at has no values yet; and autocast, which changes dtypes."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def transformed() -> bool:
    """Whether torch.compile or torch.func is looking on: tensors can be computed with then, but not asked for values.

    >>> transformed()
    False
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()


def without_autocast(device: str) -> AbstractContextManager:
    """The block in which autocast does not reach in; where there is none, for no more than a look.

    >>> with without_autocast("cpu"):
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()
