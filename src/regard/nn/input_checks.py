"""Checks of layer inputs; the errors name the argument, its shape or dtype, what is needed, and the fix."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor, nn

from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from ..utils.other_types import needs_tensor


def check_input(name: str, tensor: object, dim: int, layer: nn.Module) -> None:
    """Check that a tensor is (batch, length, dim) in the dtype of the layer and on its device; autocast may cast it.

    Raises:
        ShapeError, DtypeError, DeviceError: it is not.
    """
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
        raise DtypeError(f"{name} needs a floating-point tensor (batch, length, {dim}); it is {has}")
    if tensor.ndim != 3 or tensor.shape[-1] != dim:
        hint = ": pass tensor.unsqueeze(0) where there is no batch" if tensor.ndim == 2 else ""
        raise ShapeError(f"{name} has the shape {tuple(tensor.shape)}; it needs (batch, length, {dim}){hint}")
    weight = _first_parameter(layer)
    if weight is None:  # quantised layers have no parameters, and check their input themselves
        return
    if tensor.device != weight.device:
        _wrong_device(name, tensor, weight.device)
    if tensor.dtype != weight.dtype:
        _check_dtype(name, tensor, weight.dtype)


def _first_parameter(layer: nn.Module) -> nn.Parameter | None:
    """The first of `layer.parameters()`, whose generators take as long as a small product."""
    for parameter in layer._parameters.values():
        if parameter is not None:
            return parameter
    for child in layer._modules.values():
        if child is not None and (found := _first_parameter(child)) is not None:
            return found
    return None


def refuse_scripting(layer: nn.Module) -> NoReturn:
    """Raise for `torch.jit.script`, as the `__prepare_scriptable__` of a layer.

    Raises:
        ConfigurationError: always.
    """
    raise ConfigurationError(
        f"torch.jit.script cannot compile regard.nn.{type(layer).__name__}, which chooses its kernel in Python: use "
        "torch.export.export or torch.compile; or script the model with torch's own layers, before regard.nn.swap"
    )


def check_tensors(query: object, key: object, value: object, weight: Tensor) -> None:
    """Check that query, key and value have the dtype of a layer's weight and its device; autocast may cast them.

    Raises:
        DtypeError, DeviceError: they have not.

    >>> import torch
    >>> check_tensors(torch.zeros(3), torch.zeros(3), torch.zeros(3), torch.ones(2))
    """
    dtype, device = weight.dtype, weight.device
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise DtypeError(needs_tensor(name, tensor))
        if tensor.dtype is not dtype:
            _check_dtype(name, tensor, dtype)
        if tensor.device != device:
            _wrong_device(name, tensor, device)


def _check_dtype(name: str, tensor: Tensor, dtype: torch.dtype) -> None:
    """Refuse another dtype than the layer's; under autocast only dtypes that are not floating-point."""
    if not tensor.is_floating_point():
        raise DtypeError(f"{name} needs floating-point numbers; it is {tensor.dtype}: call {name}.float()")
    if tensor.is_meta or not torch.is_autocast_enabled(tensor.device.type):
        raise DtypeError(
            f"{name} is {tensor.dtype}, but the layer's parameters are {dtype}: convert one of them with .to(dtype)"
        )


def _wrong_device(name: str, tensor: Tensor, device: torch.device) -> None:
    raise DeviceError(
        f"{name} is on {tensor.device}, but the layer's parameters are on {device}: move one of them with .to(device)"
    )


def check_positions(name: str, positions: object, batch: int, length: int) -> None:
    """Check that positions are integers of shape (length,) or (batch, length).

    Raises:
        ShapeError, DtypeError: they are not.

    >>> import torch
    >>> check_positions("positions", torch.arange(3), 2, 3)
    """
    if (
        not isinstance(positions, Tensor)
        or positions.is_floating_point()
        or positions.is_complex()
        or positions.dtype == torch.bool
    ):
        has = positions.dtype if isinstance(positions, Tensor) else f"a {type(positions).__name__}"
        raise DtypeError(f"{name} needs a tensor of whole numbers; it is {has}")
    if tuple(positions.shape) not in ((length,), (batch, length), (1, length)):
        raise ShapeError(
            f"{name} has the shape {tuple(positions.shape)}; it needs ({length},) or ({batch}, {length}): one position "
            f"for each of the {length} tokens, the same in all {batch} sequences of the batch or in each its own"
        )


def probability(name: str, value: float) -> float:
    """A dropout probability in [0, 1), as a float.

    Raises:
        ConfigurationError: it is not.

    >>> probability("dropout", 0.1)
    0.1
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0.0 <= value < 1.0:
        raise ConfigurationError(f"{name} is {value!r}; it needs a probability in [0, 1)")
    return float(value)
