"""Whether anything is to see each call of some modules, of attention or of an operation of torch."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat
from operator import contains

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..core.torch_modes import under_dispatch_mode, under_forward_mode, under_transform
from ..kernels.hooks import CURRENT_HOOK


class WatchedModules:
    """Modules that are asked again and again whether they are watched: where each keeps its hooks is looked up once.

    A hook that is added later is seen, since torch adds it to the same dictionary.

    >>> layer = nn.Linear(1, 1)
    >>> modules = WatchedModules([layer])
    >>> hook = layer.register_forward_hook(print)
    >>> modules.are_watched()
    True
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        modules = tuple(modules)
        self._attributes = tuple(module.__dict__ for module in modules)
        self._hooks = tuple(hooks for module in modules for hooks in _hooks(module))

    def are_watched(self) -> bool:
        """Whether something watches calls of these modules, or of what they call, that native code would not make."""
        return (
            under_transform()
            or under_dispatch_mode()
            or under_forward_mode()
            or torch.is_autocast_enabled("cpu")
            or CURRENT_HOOK.get() is not None
            or bool(_has_any_global_hook())
            or any(self._hooks)
            or any(map(contains, self._attributes, repeat("forward")))
        )


def _hooks(module: nn.Module) -> tuple[dict, ...]:
    return (
        *(module._forward_hooks, module._forward_pre_hooks),
        *(module._backward_hooks, module._backward_pre_hooks),
    )
