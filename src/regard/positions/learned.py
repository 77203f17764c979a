"""A learned row for each position, to be added to the input."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..errors import ConfigurationError, DeviceError, ShapeError
from ..transforms import transformed
from .angles import check_positions, is_whole


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
        if not transformed():
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
