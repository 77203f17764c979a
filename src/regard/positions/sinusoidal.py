"""Sines and cosines of the position, to be added to the input: as published, and as Tensor2Tensor has them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import DtypeError
from .angles import angles, check_base, check_dim, check_positions, geometric, precise


class Sinusoidal(nn.Module):
    """PE(p, 2i) = sin(p · base^(-2i/dim)), PE(p, 2i+1) = cos(p · base^(-2i/dim)): no parameters, no last position.

    Shapes: positions (...) of any shape, whole numbers, negative ones too; the result (..., dim), in float32 unless
    another `dtype` is asked for. Angles are taken in double precision: at position 100,000 each number is still
    within 1e-6.

    Raises:
        ConfigurationError: a dim that is odd or below 2, or a base that is not above 1.
        DtypeError: positions that are no whole numbers, or a dtype that is no floating-point one.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5. Released code differs: see `Tensor2TensorSinusoidal`.

    >>> Sinusoidal(dim=2)(torch.tensor([0, 1]))
    tensor([[0.0000, 1.0000],
            [0.8415, 0.5403]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_dim("Sinusoidal", dim)
        check_base("Sinusoidal", base)
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The positions (...) as (..., dim)."""
        _check(self, positions, dtype)
        at = angles(positions, geometric(self.dim, self.base, positions.device))
        return torch.stack([at.sin(), at.cos()], dim=-1).flatten(-2).to(dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}"


class Tensor2TensorSinusoidal(nn.Module):
    """PE(p, i) = sin(p · base^(-i/(n-1))), PE(p, n+i) = cos(p · base^(-i/(n-1))), for i = 0..n-1, n = dim/2.

    As `Sinusoidal`, with two differences: all sines come before all cosines, and the slowest wave is base times slower
    than the first, where in the paper's formula it stays a little faster. With n = 1 there is one wave, of frequency 1.

    Positions are those that are given: Tensor2Tensor counts from 0, CTranslate2 from 1, fairseq from the number of
    its padding symbol plus 1.

    Raises:
        ConfigurationError: a dim that is odd or below 2, or a base that is not above 1. (Tensor2Tensor gives an odd
            dim a last feature of 0.)
        DtypeError: positions that are no whole numbers, or a dtype that is no floating-point one.

    Source: `get_timing_signal_1d` in the code released with Vaswani et al. 2017 (arXiv 1706.03762).

    >>> Tensor2TensorSinusoidal(dim=4, base=10.0)(torch.tensor([0, 1]))
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0998, 0.5403, 0.9950]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_dim("Tensor2TensorSinusoidal", dim)
        check_base("Tensor2TensorSinusoidal", base)
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The positions (...) as (..., dim)."""
        _check(self, positions, dtype)
        waves = self.dim // 2
        steps = torch.arange(waves, dtype=precise(positions.device), device=positions.device) / max(waves - 1, 1)
        at = angles(positions, torch.pow(self.base, -steps))
        return torch.cat([at.sin(), at.cos()], dim=-1).to(dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}"


def _check(owner: nn.Module, positions: Tensor, dtype: torch.dtype) -> None:
    check_positions(owner, positions)
    if not dtype.is_floating_point:
        raise DtypeError(f"{owner} gives floating-point numbers, torch.float32 for instance; dtype is {dtype}")
