"""The error for a mask or a bias that reads tensors on another device than the inputs."""

from __future__ import annotations

import torch

from ..errors import DeviceError
from .state_search import state_of


def refuse_mixed_devices(owner: object, error: Exception, device: torch.device) -> None:
    """Raise DeviceError where a mask or a bias failed as it reads tensors on another device than that of its positions.

    Nothing is looked up before something has failed: a tensor without axes goes with any device, and some masks and
    biases move what they read.
    """
    if not isinstance(error, RuntimeError) or "device" not in str(error):  # of all errors torch's
        return
    state = state_of(owner)
    read = [] if state is None else [each.tensor for each in state.tensors]
    others = sorted({str(tensor.device) for tensor in read if tensor.ndim and tensor.device != device})
    if others:
        raise DeviceError(
            f"{owner!r} reads tensors on {', '.join(others)}, but query, key and value are on {device}: move them with "
            f".to({str(device)!r})"
        ) from error
