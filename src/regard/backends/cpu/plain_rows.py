"""Whether tensors can be read by code that autograd, and torch's transforms, know nothing of."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core.torch_modes import mapped_by_autograd, no_mode_active
from . import library


def are_plain(*tensors: Tensor) -> bool:
    """Whether tensors are float32 on the CPU, with numbers to read, and nothing of torch's watches them."""
    learns = torch.is_grad_enabled()
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu or (learns and tensor.requires_grad):
            return False
        if mapped_by_autograd(tensor):
            return False
    return not torch.compiler.is_compiling() and no_mode_active() and library.available()
