"""Which of torch's transforms and modes are active, autocast switched off, and torch's CausalBias recognised."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.autograd import forward_ad

functorch_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active: `under_transform` without the case of torch.compile."""


def under_transform() -> bool:
    """Whether torch.compile or torch.func traces the call, so that values of tensors cannot be read.

    >>> under_transform()
    False
    """
    return torch.compiler.is_compiling() or functorch_active()


def under_forward_mode() -> bool:
    """Whether forward-mode differentiation is active: `torch.func.jvp`, `jacfwd`, `hessian` or a dual level.

    >>> under_forward_mode()
    False
    """
    return forward_ad._current_level >= 0


def under_dispatch_mode() -> bool:
    """Whether a TorchDispatchMode or a tracer intercepts each operation.

    >>> from torch.utils.flop_counter import FlopCounterMode
    >>> with FlopCounterMode(display=False):
    ...     under_dispatch_mode()
    True
    """
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._is_tracing()


def without_autocast(device: str) -> AbstractContextManager:
    """A context without autocast; a null context if autocast is off.

    >>> with without_autocast("cpu"):
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


def is_causal_bias(value: object) -> bool:
    """Whether a value is torch's `CausalBias`, a tensor whose storage is not initialised and must not be read.

    >>> import torch
    >>> is_causal_bias(torch.zeros(3, 5))
    False
    """
    kind = type(value)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"
