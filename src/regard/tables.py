"""Stretches and rectangles of a table: what is in them, in a few steps for each however long they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def extremes(table: Tensor, before: Sequence[Tensor | int], low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest entry in low..high of the last axis, for indices `before` into the axes before it.

    Each stretch is covered by two whose length is a power of two; those are known for every start, from O(L log L).

    >>> extremes(torch.tensor([5, 3, 4, 8]), (), torch.tensor([0, 2]), torch.tensor([2, 2]))
    (tensor([3, 4]), tensor([5, 4]))
    """
    lengths = high - low + 1
    longest = int(lengths.max()) if lengths.numel() else 1
    least, greatest = table, table
    levels = [(least, greatest)]
    for doubled in (2**level for level in range(longest.bit_length() - 1)):
        later = torch.arange(table.shape[-1], device=table.device).add(doubled).clamp(max=table.shape[-1] - 1)
        least, greatest = torch.minimum(least, least[..., later]), torch.maximum(greatest, greatest[..., later])
        levels.append((least, greatest))
    powers = 2 ** torch.arange(len(levels), device=table.device)
    level = torch.searchsorted(powers, lengths, right=True) - 1
    first, second = (level, *before, low), (level, *before, high - powers[level] + 1)
    least, greatest = (torch.stack(kind) for kind in zip(*levels, strict=True))
    return torch.minimum(least[first], least[second]), torch.maximum(greatest[first], greatest[second])


def filled(
    table: Tensor, before: Sequence[Tensor | int], rows: tuple[Tensor, Tensor], columns: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Whether every entry and whether some entry is True, in low..high of the last two axes of a bool table.

    It counts them from sums over all that lies above and to the left: O(size of the table), and four of these for each.

    >>> whole = torch.tensor(0), torch.tensor(1)
    >>> filled(torch.tensor([[True, True], [True, False]]), (), whole, whole)
    (tensor(False), tensor(True))
    """
    sums = table.cumsum(-2, dtype=torch.int32).cumsum(-1, dtype=torch.int32)
    sums = torch.nn.functional.pad(sums, (1, 0, 1, 0))
    (top, bottom), (left, right) = (rows[0], rows[1] + 1), (columns[0], columns[1] + 1)
    held = (
        sums[(*before, bottom, right)]
        - sums[(*before, top, right)]
        - sums[(*before, bottom, left)]
        + sums[(*before, top, left)]
    )
    return held == (bottom - top) * (right - left), held > 0
