"""Whether anything is to see each call of some modules, of attention or of an operation of torch."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.torch_modes import under_dispatch_mode, under_forward_mode, under_transform
from ..kernels.hooks import CURRENT_HOOK


def are_watched(modules: Iterable[nn.Module]) -> bool:
    """Whether something watches calls of these modules, or of what they call, that native code would not make.

    >>> are_watched([nn.Linear(1, 1)])
    False
    """
    return (
        under_transform()
        or under_dispatch_mode()
        or under_forward_mode()
        or torch.is_autocast_enabled("cpu")
        or CURRENT_HOOK.get() is not None
        or bool(_has_any_global_hook())
        or any(map(_has_hook, modules))
    )


def _has_hook(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    ) or ("forward" in module.__dict__)
