"""What all native code asks of the tensors that it reads."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import DeviceError
from . import library

DTYPES = (torch.float32, torch.bfloat16)


def reads(*tensors: Tensor) -> bool:
    """Whether there is native code for dot products of these tensors: on the CPU, all float32 or all bfloat16."""
    dtype = tensors[0].dtype
    return dtype in DTYPES and all(t.is_cpu and t.dtype == dtype for t in tensors) and library.available()


def check_cpu(name: str, tensor: Tensor) -> None:
    """Refuse a tensor that is not in the processor's own memory."""
    if tensor.device.type != "cpu":
        raise DeviceError(f"{name} is on {tensor.device}; native code runs on the CPU: pass {name}.cpu()")


def last_contiguous(tensor: Tensor) -> Tensor:
    """The tensor, or a copy of it where the numbers of its last axis do not lie side by side."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] <= 1 else tensor.contiguous()
