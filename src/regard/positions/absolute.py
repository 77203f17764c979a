"""Sines and cosines of the position, to be added to the input: as published, and as Tensor2Tensor has them.

A learned row for each position, to be added to the input.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from .frequencies import angles, check_base, check_dim, check_positions, geometric, is_whole, precise


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


class Learned(nn.Module):
    """The row table[p] for each position p: as many positions as the table is long, and no more.

    Shapes: positions (...) of any shape, whole numbers in [0, length - 1]; the result (..., dim), in the table's
    dtype. The table is the parameter `weight`, (length, dim), named as in `nn.Embedding`; it starts from normal
    numbers of standard deviation 0.02.

    Raises:
        ConfigurationError: a length or dim below 1.
        DtypeError: positions that are no whole numbers.
        DeviceError: positions on another device than the table.
        ShapeError: a position that the table has no row for. Under torch.compile and torch.func positions cannot be
            looked at beforehand: torch's own look-up then raises.

    Source: Gehring et al. 2017 (arXiv 1705.03122), section 3.1; the deviation is that of BERT and GPT-2.

    >>> Learned(length=10, dim=4)(torch.tensor([[0, 1, 2]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        for name, number in (("length", length), ("dim", dim)):
            if not is_whole(number) or number < 1:
                raise ConfigurationError(f"Learned needs a {name} of 1 or more; it is {number!r}")
        self.length, self.dim = length, dim
        self.weight = nn.Parameter(torch.empty(length, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """The positions (...) as (..., dim)."""
        check_positions(self, positions)
        if positions.device != self.weight.device:
            raise DeviceError(
                f"positions are on {positions.device}, but the table of {self} is on {self.weight.device}: move one "
                "of them with .to(device)"
            )
        if not under_transform():
            self._check_rows(positions)
        return functional.embedding(positions.long(), self.weight)

    def _check_rows(self, positions: Tensor) -> None:
        if not positions.numel():
            return
        first, last = (int(end) for end in positions.aminmax())
        if first < 0:
            raise ShapeError(f"position {first} is negative, but the table of {self} counts its rows from 0")
        if last >= self.length:
            raise ShapeError(
                f"position {last} lies beyond the table of {self}, whose last row is {self.length - 1}: shorten the "
                "sequence, or make the table longer; Sinusoidal and Rotary have no last position"
            )

    def extra_repr(self) -> str:
        return f"length={self.length}, dim={self.dim}"
