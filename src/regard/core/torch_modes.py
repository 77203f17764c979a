"""Torch's transforms, modes and generators: which are active, switched off or restored; and torch's CausalBias."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

functorch_active = torch._C._are_functorch_transforms_active
"""Whether a transform of torch.func is active: `under_transform` without the case of torch.compile."""
unwrap_if_dead = torch._C._functorch.unwrap_if_dead  # pyright: ignore[reportAttributeAccessIssue]
"""The tensor inside of one that was kept when its transform of torch.func had ended; any other tensor itself."""


def under_transform() -> bool:
    """Whether torch.compile or torch.func traces the call, so that values of tensors cannot be read.

    >>> under_transform()
    False
    """
    return torch.compiler.is_compiling() or functorch_active()


def maps_nothing(tensor: Tensor) -> bool:
    """Whether torch.vmap maps a tensor over a batch of 0, which torch's operators without a rule for it refuse.

    >>> import torch
    >>> maps_nothing(torch.zeros(0))
    False
    """
    inner: Any = tensor
    while torch._C._functorch.is_functorch_wrapped_tensor(inner):  # pyright: ignore[reportAttributeAccessIssue]
        inner = torch._C._functorch.get_unwrapped(inner)  # pyright: ignore[reportAttributeAccessIssue]
    return tensor.numel() > 0 and inner.numel() == 0


def mapped_by_autograd(gradient: Tensor) -> bool:
    """Whether torch.autograd.grad maps many gradients at once (`is_grads_batched=True`), and hides their numbers.

    >>> import torch
    >>> mapped_by_autograd(torch.zeros(3))
    False
    """
    return not torch._C._has_storage(gradient) and not functorch_active()


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


def no_mode_active() -> bool:
    """Whether no transform, level of forward-mode differentiation, dispatch mode or autocast is active on the CPU.

    >>> no_mode_active()
    True
    """
    # Not by the functions above, whose calls small problems would feel.
    return not (
        functorch_active()
        or forward_ad._current_level >= 0
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._is_tracing()
        or torch.is_autocast_enabled("cpu")
    )


def without_autocast(device: str) -> AbstractContextManager:
    """A context without autocast; a null context if autocast is off.

    >>> with without_autocast("cpu"):
    ...     torch.is_autocast_enabled("cpu")
    False
    """
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext()


@contextmanager
def generator_restored(device: torch.device) -> Iterator[None]:
    """Restore the state of a device's default generator after the block.

    >>> with generator_restored(torch.device("cpu")):
    ...     drawn = torch.rand(())
    >>> bool(torch.rand(()) == drawn)
    True
    """
    module: Any = torch.random if device.type == "cpu" else torch.get_device_module(device)
    if device.type != "cpu" and not module.is_available():  # a fake tensor's device, which has no generator
        yield
        return
    where = () if device.type in ("cpu", "mps") else (device,)  # of these there is one alone
    state = module.get_rng_state(*where)
    try:
        yield
    finally:
        module.set_rng_state(state, *where)


def is_causal_bias(value: object) -> bool:
    """Whether a value is torch's `CausalBias`, a tensor whose storage is not initialised and must not be read.

    >>> import torch
    >>> is_causal_bias(torch.zeros(3, 5))
    False
    """
    kind = type(value)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"
