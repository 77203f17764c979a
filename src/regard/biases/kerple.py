"""KERPLE: learned kernels of the distance, as biases that fall with its logarithm or a power of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32
from ..errors import DtypeError, ShapeError
from .base import describe_tensor, is_floating
from .relative import RelativeBias


@dataclass(frozen=True, eq=False, repr=False)
class KerpleLog(RelativeBias):
    """-slope · log(1 + rate · |key position - query position|)."""

    slopes: Tensor
    rates: Tensor

    def values_at(self, distances: Tensor) -> Tensor:
        slopes, rates = (_over(tensor, distances) for tensor in (self.slopes, self.rates))
        return torch.log1p(rates * distances.abs()) * -slopes

    def __repr__(self) -> str:
        return f"kerple_log({describe_tensor(self.slopes)}, {describe_tensor(self.rates)})"


def kerple_log(slopes: Tensor, rates: Tensor) -> RelativeBias:
    """-r₁ · log(1 + r₂ · |key position - query position|): a penalty by the logarithm of the distance, by head.

    r₁ are the slopes and r₂ the rates, both above 0: learn their logarithms, or pass `softplus(parameter)`.

    Shapes: (heads,) each; gradients flow into both. Units: r₂ is per position.

    Raises:
        DtypeError, ShapeError: tensors that are not floating point, or not one number for each head.

    Source: Chi et al. 2022 (arXiv 2205.09921), Eq. 6, the logarithmic variant.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.kerple_log(torch.ones(1), torch.ones(1)).values(Grid.from_lengths(1, 3))
    tensor([[[-1.0986, -0.6931, -0.0000]]])
    """
    _check("kerple_log", slopes=slopes, rates=rates)
    return KerpleLog(slopes, rates)


@dataclass(frozen=True, eq=False, repr=False)
class KerplePower(RelativeBias):
    """-slope · |key position - query position|^power."""

    slopes: Tensor
    powers: Tensor

    def values_at(self, distances: Tensor) -> Tensor:
        slopes, powers = (_over(tensor, distances) for tensor in (self.slopes, self.powers))
        away = distances.abs()
        # 0 to any power is 0, but the derivative of 0^p would be 0 · log 0.
        raised = away.clamp(min=1).to(powers.dtype) ** powers
        return -slopes * torch.where(away == 0, 0.0, raised)

    def __repr__(self) -> str:
        return f"kerple_power({describe_tensor(self.slopes)}, {describe_tensor(self.powers)})"


def kerple_power(slopes: Tensor, powers: Tensor) -> RelativeBias:
    """-r₁ · |key position - query position|^r₂: a penalty by a power of the distance, by head; ALiBi for r₂ = 1.

    r₁ are the slopes, above 0, and r₂ the powers, above 0 and at most 2.

    Shapes: (heads,) each; gradients flow into both.

    Raises:
        DtypeError, ShapeError: tensors that are not floating point, or not one number for each head.

    Source: Chi et al. 2022 (arXiv 2205.09921), Eq. 5, the power variant.

    >>> import torch
    >>> from regard import biases
    >>> from regard.core.grid import Grid
    >>> biases.kerple_power(torch.ones(1), torch.full((1,), 2.0)).values(Grid.from_lengths(1, 3))
    tensor([[[-4., -1., -0.]]])
    """
    _check("kerple_power", slopes=slopes, powers=powers)
    return KerplePower(slopes, powers)


def _over(tensor: Tensor, distances: Tensor) -> Tensor:
    """A number for each head, (heads, 1, ...), beside distances of any shape."""
    return at_least_float32(tensor.to(distances.device)).reshape(-1, *(1,) * distances.ndim)


def _check(maker: str, **named: Tensor) -> None:
    heads = None
    for name, tensor in named.items():
        if not is_floating(tensor):
            has = tensor.dtype if isinstance(tensor, Tensor) else f"a {type(tensor).__name__}"
            raise DtypeError(f"{maker} needs floating-point {name}, one for each head; this is {has}")
        heads = tensor.shape[0] if heads is None and tensor.ndim == 1 else heads
        if tensor.ndim != 1 or not heads or tensor.shape[0] != heads:
            raise ShapeError(
                f"{maker} needs {' and '.join(named)} (heads,) of the same heads; {name} has {tuple(tensor.shape)}"
            )
