"""Which cells of a pyramid have a pair that exists: told by the mask for whole cells, looked into where it cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from ...blocks import Blocks
from ...masks import Mask
from ...tiles import FULL, PARTIAL, WHOLE, Grid
from .levels import Levels

CELLS = 2**22
"""Cells, of all heads and sequences that a mask tells apart, that are asked for at a time."""
PAIRS = 2**22
"""Pairs that are looked into at a time."""
STEP = 128
"""Rows are asked for in multiples of so many, as masks made of tiles have them."""


@dataclass(frozen=True, eq=False, slots=True)
class Existing:
    """For each level, the finest first, whether a pair of a cell exists; no levels where all pairs do.

    levels: bool (..., R, C), leading axes broadcastable to `leading`, the axes (*batch, heads) of the weights.
    """

    levels: tuple[Tensor, ...] = ()
    leading: tuple[int, ...] = ()

    @classmethod
    def everywhere(cls) -> Existing:
        """Where all pairs exist, as far as is known."""
        return cls()

    @classmethod
    def by(cls, mask: Mask, grid: Grid, levels: Levels, largest: Tensor) -> Existing:
        """What a mask says of the cells of a grid, exactly.

        Of most cells it says so in O(1), and a cell whose `largest` weight, (*batch, heads, R, C), is above 0 has a
        pair. What is left is looked into: cells that the mask leaves open and whose weights are too small to be told
        from 0.
        """
        finest = _finest(mask, grid, levels, largest)
        found = [finest]
        for rows, columns in levels.shapes[1:]:
            below = found[-1].reshape(-1, *found[-1].shape[-2:])
            below = pad(below, (0, 2 * columns - below.shape[-1], 0, 2 * rows - below.shape[-2]))
            found.append(max_pool2d(below.float(), 2).bool().view(*finest.shape[:-2], rows, columns))
        return cls(tuple(found), tuple(largest.shape[:-2]))

    def of(self, level: int, shape: torch.Size) -> Tensor | None:
        """A level in the shape (B, H, R, C) of its cells; None where all pairs exist."""
        if not self.levels:
            return None
        return self.levels[level].expand(*self.leading, *shape[-2:]).reshape(shape)


def _finest(mask: Mask, grid: Grid, levels: Levels, largest: Tensor) -> Tensor:
    leading, (_, across) = largest.shape[:-2], levels.shapes[0]
    one = mask.keep(grid.tile(slice(0, 1), slice(0, 1))).shape[:-2]
    apart = (*[1] * (len(leading) - len(one)), *one)  # the axes along which the mask tells heads and sequences apart
    at_once = -(-max(1, CELLS // max(1, leading.numel() * across)) * levels.rows // STEP) * STEP
    parts = []
    for start in range(0, levels.queries, at_once):
        rows = slice(start, min(start + at_once, levels.queries))
        verdicts = mask.verdicts(Blocks.of(grid.tile(rows, WHOLE), (levels.rows, levels.columns)))
        first = start // levels.rows
        shown = largest[..., first : first + verdicts.shape[-2], :] > 0
        for axis, size in enumerate(apart):
            if size == 1:  # what one head or sequence shows of the mask holds for all of them
                shown = shown.any(axis, keepdim=True)
        exists = shown | (verdicts == FULL)
        _look(mask, grid, levels, start, exists, (verdicts == PARTIAL) & ~exists)
        parts.append(exists)
    return torch.cat(parts, -2)


def _look(mask: Mask, grid: Grid, levels: Levels, start: int, exists: Tensor, unknown: Tensor) -> None:
    """Write into `exists`, which begins at row `start`, what single pairs say of the unknown cells."""
    high, wide, leading = levels.rows, levels.columns, exists.shape[:-2]
    cells = max(1, PAIRS // (leading.numel() * high * wide))
    for row in unknown.reshape(-1, *unknown.shape[-2:]).any(0).any(-1).nonzero().flatten().tolist():
        top = start + row * high
        rows = slice(top, min(top + high, levels.queries))
        for left in range(0, exists.shape[-1], cells):
            here = slice(left, min(left + cells, exists.shape[-1]))
            if not bool(unknown[..., row, here].any()):
                continue
            columns = slice(here.start * wide, min(here.stop * wide, levels.keys))
            kept = mask.keep(grid.tile(rows, columns)).any(-2)  # over the rows of the cells
            kept = kept.expand(*kept.shape[:-1], columns.stop - columns.start)
            kept = pad(kept, (0, -kept.shape[-1] % wide)).unflatten(-1, (-1, wide)).any(-1)
            exists[..., row, here] |= kept.expand(*leading, kept.shape[-1])
