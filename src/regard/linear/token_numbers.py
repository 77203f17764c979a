"""Numbers of the tokens of a sequence, one or several for each head: what is checked of them."""

from __future__ import annotations

import math

from torch import Tensor

from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.validation import check_device
from ..utils.other_types import needs_tensor
from .linear_arguments import has_values


def check_token_numbers(
    name: str, numbers: Tensor, rows: Tensor, each: str | None = None, most: float | None = None
) -> Tensor:
    """The numbers for each token of rows (..., N, ·), as (..., N), or as (..., N, count) with `each` naming them.

    Raises:
        ShapeError, DtypeError, DeviceError: a shape that does not broadcast, another kind or device.
        ConfigurationError: with a `most`, numbers out of 0..most.
    """
    if refused := needs_tensor(name, numbers):
        raise DtypeError(refused)
    if not numbers.is_floating_point():
        raise DtypeError(f"{name} needs a floating-point tensor; it is {numbers.dtype}")
    check_device(name, numbers, rows.device)
    needs = tuple(rows.shape[:-1])
    own = numbers.shape[-1:] if each else ()
    try:
        if numbers.ndim != len(needs) + len(own):
            raise RuntimeError
        numbers.expand(*needs, *own)
    except RuntimeError:
        shape = f"({', '.join(map(str, needs))}, {each})" if each else str(needs)
        raise ShapeError(
            f"{name} has the shape {tuple(numbers.shape)}; with rows of {tuple(rows.shape)} it needs {shape}, or 1 in "
            "place of some of these numbers"
        ) from None
    if most is not None and has_values(numbers):
        least, largest = (float(end) for end in numbers.detach().aminmax())
        if least < 0 or largest > most:
            needs = "values of at least 0: pass it after its softplus"
            if most != math.inf:
                needs = f"values in 0..{most:g}: pass it after its sigmoid"
            raise ConfigurationError(f"{name} has values from {least:.4g} to {largest:.4g}; it needs {needs}")
    return numbers.expand(*needs, *own)
