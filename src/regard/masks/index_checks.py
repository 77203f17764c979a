"""Checks of the whole numbers that masks take: counts, lengths, positions and head indices."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.finite import waits
from ..core.grid import Blocks, Grid
from ..core.torch_modes import under_transform
from ..errors import MaskError
from ..utils.numbers import whole_number

WHOLE_NUMBERS = frozenset((torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8))
LARGEST = 2**63 - 1
"""Positions and their differences are int64."""


def checked_count(name: str, value: object, *, least: int = 0) -> int:
    """A whole number from `least` to 2⁶³ - 1; `name` is the mask and its argument, such as "window's before".

    Raises:
        MaskError: it is not that.
    """
    number = whole_number(name, value, least=least, error=MaskError)
    if number > LARGEST:
        raise MaskError(f"{name} is {number}; it needs at most 2**63 - 1, as positions are 64-bit whole numbers")
    return number


def whole_numbers(mask: str, name: str, values: Tensor | Sequence, *, instead: str = "") -> Tensor:
    """A tensor of whole numbers, a copy unless it was one; `instead` is the advice for booleans.

    Raises:
        MaskError: they are floating-point numbers, complex numbers, booleans or no numbers.
    """
    try:
        numbers = values if isinstance(values, Tensor) else torch.tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise MaskError(f"{mask} needs whole numbers as {name}; it was given {values!r}") from None
    if numbers.dtype in WHOLE_NUMBERS:
        return numbers
    if not numbers.numel():
        return numbers.long()  # an empty list has no type of its own
    if numbers.is_floating_point() or numbers.is_complex() or numbers.dtype == torch.bool:
        raise MaskError(
            f"{mask} needs whole numbers as {name}; these are {numbers.dtype}" + (instead and f". {instead}")
        )
    return numbers


def check_range(mask: str, positions: Tensor, length: int, mend: str) -> None:
    """Raise a MaskError unless positions lie in 0..length-1, for a mask that covers this length.

    Under a transform positions have no values to check, and on a device to read them would wait for it; torch then
    refuses an index that is out of range. `check_known_ranges` checks what is known without.
    """
    if under_transform() or waits(positions):
        return
    low, high = (int(end) for end in positions.aminmax()) if positions.numel() else (0, -1)
    _check_ends(mask, low, high, length, mend)


def check_known_ranges(mask: str, grid: object, lengths: tuple[int, int], mends: tuple[str, str]) -> None:
    """`check_range` of a grid's positions of queries, and of its keys, where they are ranges."""
    pairs = grid.grid if isinstance(grid, Blocks) else grid
    if isinstance(pairs, Grid):
        for positions, length, mend in zip((pairs.query_range, pairs.key_range), lengths, mends, strict=True):
            if positions:
                low, high = min(positions[0], positions[-1]), max(positions[0], positions[-1])
                _check_ends(mask, low, high, length, mend)


def _check_ends(mask: str, low: int, high: int, length: int, mend: str) -> None:
    if low < 0 or high >= length:
        raise MaskError(f"{mask} is for {length} positions, from 0, but queries or keys sit at {low} to {high}: {mend}")


def head_indices(mask: object, heads: int, grid: Grid | Blocks) -> Tensor:
    """The indices of the heads, (heads, 1, 1), for a mask that differs between heads.

    Raises:
        MaskError: the weights have no head axis.
    """
    check_has_heads(mask, grid)
    return grid.by_head(heads)


def check_has_heads(mask: object, grid: Grid | Blocks) -> None:
    """Check that the weights have a head axis, for a mask that differs between heads.

    Raises:
        MaskError: they have none.
    """
    if not grid.heads:
        raise MaskError(
            f"{mask!r} differs between heads, but query, key and value have no head axis: give "
            "(batch, heads, length, dim), or leave heads out"
        )
