"""What torch's transforms do to a call: what they look at has no values yet."""

from __future__ import annotations

import torch


def transformed() -> bool:
    """Whether torch.compile or torch.func is looking on: tensors can be computed with then, but not asked for values.

    >>> transformed()
    False
    """
    return torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
