"""Absolute position embeddings, added to the input: sinusoidal (the paper's, Tensor2Tensor's) and learned."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.torch_modes import under_transform
from ..errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from .frequencies import angles, check_base, check_dim, check_positions, geometric, is_whole, precise


class Sinusoidal(nn.Module):
    """PE(p, 2i) = sin(p · base^(-2i/dim)), PE(p, 2i+1) = cos(p · base^(-2i/dim)): no parameters, any position.

    Shapes: positions (...) of any shape, whole numbers, also negative; the result is (..., dim), in `dtype`, by default
    float32. Angles are computed in double precision: at position 100,000 the error of each number is below 1e-6.

    Raises:
        ConfigurationError: a dim that is odd or below 2, or a base that is not above 1.
        DtypeError: positions that are not whole numbers, or a dtype that is not floating point.

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
        radians = angles(positions, geometric(self.dim, self.base, positions.device))  # [..., dim/2]
        return torch.stack([radians.sin(), radians.cos()], dim=-1).flatten(-2).to(dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}"


class SplitSinusoidal(nn.Module):
    """PE(p, i) = sin(p · base^(-2i/dim)), PE(p, n+i) = cos(p · base^(-2i/dim)), for i = 0..n-1, n = dim/2.

    The numbers of `Sinusoidal` in another order: all sines, then all cosines. Marian's translators have it in
    transformers (`MarianMTModel`) and in CTranslate2; Marian itself has `Tensor2TensorSinusoidal`.

    Shapes, dtype, precision and errors are those of `Sinusoidal`.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5, but for the order.

    >>> SplitSinusoidal(dim=4)(torch.tensor([0, 1]))
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0100, 0.5403, 0.9999]])
    """

    def __init__(self, dim: int, base: float = 10000.0) -> None:
        super().__init__()
        check_dim("SplitSinusoidal", dim)
        check_base("SplitSinusoidal", base)
        self.dim, self.base = dim, base

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The positions (...) as (..., dim)."""
        _check(self, positions, dtype)
        radians = angles(positions, geometric(self.dim, self.base, positions.device))  # [..., dim/2]
        return torch.cat([radians.sin(), radians.cos()], dim=-1).to(dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}"


class Tensor2TensorSinusoidal(nn.Module):
    """PE(p, i) = sin(p · base^(-i/(n-1))), PE(p, n+i) = cos(p · base^(-i/(n-1))), for i = 0..n-1, n = dim/2.

    It differs from `Sinusoidal` in two ways: all sines come before all cosines, and the lowest frequency is exactly
    1/base, while in the paper's formula it is a little higher. With n = 1 there is one frequency, 1.

    `first` is what position 0 is counted as: Tensor2Tensor counts from 0, CTranslate2 from 1, fairseq from the index of
    its padding symbol plus 1, which is 2 in M2M100.

    Raises:
        ConfigurationError: a dim that is odd or below 2, a base that is not above 1, or a first that is no whole number
            of at least 0. (Tensor2Tensor pads an odd dim with a feature of 0.)
        DtypeError: positions that are not whole numbers, or a dtype that is not floating point.

    Source: `get_timing_signal_1d` in the code released with Vaswani et al. 2017 (arXiv 1706.03762).

    >>> Tensor2TensorSinusoidal(dim=4, base=10.0)(torch.tensor([0, 1]))
    tensor([[0.0000, 0.0000, 1.0000, 1.0000],
            [0.8415, 0.0998, 0.5403, 0.9950]])
    """

    def __init__(self, dim: int, base: float = 10000.0, *, first: int = 0) -> None:
        super().__init__()
        check_dim("Tensor2TensorSinusoidal", dim)
        check_base("Tensor2TensorSinusoidal", base)
        if not is_whole(first) or first < 0:
            raise ConfigurationError(f"Tensor2TensorSinusoidal needs a first of 0 or more; it is {first!r}")
        self.dim, self.base, self.first = dim, base, first

    def forward(self, positions: Tensor, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The positions (...) as (..., dim)."""
        _check(self, positions, dtype)
        n = self.dim // 2
        steps = torch.arange(n, dtype=precise(positions.device), device=positions.device) / max(n - 1, 1)
        radians = angles(positions + self.first, torch.pow(self.base, -steps))  # [..., n]
        return torch.cat([radians.sin(), radians.cos()], dim=-1).to(dtype)

    def extra_repr(self) -> str:
        return f"dim={self.dim}, base={self.base}" + (f", first={self.first}" if self.first else "")


def _check(owner: nn.Module, positions: Tensor, dtype: torch.dtype) -> None:
    check_positions(owner, positions)
    if not dtype.is_floating_point:
        raise DtypeError(f"{owner} gives floating-point numbers, torch.float32 for instance; dtype is {dtype}")


class Learned(nn.Module):
    """A learned embedding per position, weight[p], for positions 0..length-1.

    Shapes: positions (...) of any shape, whole numbers in [0, length - 1]; the result is (..., dim), in the dtype of
    the parameter `weight`, (length, dim), which is named as in `nn.Embedding` and initialised from a normal
    distribution with standard deviation 0.02.

    Raises:
        ConfigurationError: a length or dim below 1.
        DtypeError: positions that are not whole numbers.
        DeviceError: positions on another device than the table.
        ShapeError: a position outside the table. Under torch.compile and torch.func, where positions have no values to
            check, torch's own indexing raises instead.

    Source: Gehring et al. 2017 (arXiv 1705.03122), section 3.1; the standard deviation is that of BERT and GPT-2.

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
