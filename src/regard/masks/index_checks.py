"""Whole numbers that masks are made from and ask for, checked where they are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MaskError
from ..utils.numbers import whole_number

if TYPE_CHECKING:
    from .base import Mask, Pairs
from ..core.torch_modes import under_transform


def count(name: str, value: object, *, least: int = 0) -> int:
    """A whole number of at least `least`; `name` is the mask and its argument, such as "window's before"."""
    return whole_number(name, value, least=least, error=MaskError)


def whole_numbers(mask: str, name: str, values: Tensor | Sequence, *, instead: str = "") -> Tensor:
    """A tensor of whole numbers; `instead` says what to do with booleans."""
    try:
        numbers = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise MaskError(f"{mask} needs whole numbers as {name}; it was given {values!r}") from None
    if not numbers.numel():
        return numbers.long()  # an empty list says nothing of its type
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise MaskError(
            f"{mask} needs whole numbers as {name}; these are {numbers.dtype}" + (instead and f". {instead}")
        )
    return numbers


def check_range(mask: str, positions: Tensor, length: int, mend: str) -> None:
    """Positions have to lie in 0..length-1, for a mask that is made for this length."""
    if under_transform():
        return  # they have no values to look at; a look-up beyond the end is then torch's to refuse
    low, high = (int(end) for end in positions.aminmax()) if positions.numel() else (0, -1)
    if low < 0 or high >= length:
        raise MaskError(f"{mask} is for {length} positions, from 0, but queries or keys sit at {low} to {high}: {mend}")


def by_head(mask: Mask, heads: int, grid: Pairs) -> Tensor:
    """The numbers of the heads, (heads, 1, 1), for a mask that differs between them."""
    if not grid.heads:
        raise MaskError(
            f"{mask!r} differs between heads, but query, key and value have no head axis: give "
            "(batch, heads, length, dim), or leave heads out"
        )
    return grid.by_head(heads)
