"""Pooled pyramids over attention maps: level sizes, one byte per cell, and which cells contain an unmasked pair."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import max_pool2d, pad

from ...core.grid import WHOLE, Blocks, Grid
from ...core.intervals import FULL, PARTIAL
from ...masks import Mask

COARSEST = 64
"""The last level has at most so many rows and columns of cells."""
FINEST = 1024
"""The first level has at most so many."""
SHARE = 1.5
"""The pyramid takes at most so many times the bytes of q and k, or what a level of COARSEST² takes."""


@dataclass(frozen=True, slots=True)
class PyramidLevels:
    """Sizes of a pyramid over `queries` × `keys` pairs; cells of level l have rows · 2^l × columns · 2^l pairs."""

    queries: int
    keys: int
    rows: int
    columns: int

    @classmethod
    def fitting(cls, queries: int, keys: int, room: float) -> PyramidLevels:
        """The finest pyramid that fits into `room` bytes for each head.

        Cells are powers of two. A map of at most 64 rows or columns has cells of 1 there; others have 2 at least.
        """
        rows, columns = (_least(length) for length in (queries, keys))
        while 8 / 3 * _cells(queries, rows) * _cells(keys, columns) > room:
            down, across = _cells(queries, rows), _cells(keys, columns)
            if max(down, across) <= COARSEST:
                break
            rows *= 1 + (down >= across)
            columns *= 1 + (across >= down)
        return cls(queries, keys, rows, columns)

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """(rows, columns) of each level, the finest first; each is half of the one before, rounded up."""
        shapes = [(_cells(self.queries, self.rows), _cells(self.keys, self.columns))]
        while max(shapes[-1]) > COARSEST:
            shapes.append((-(-shapes[-1][0] // 2), -(-shapes[-1][1] // 2)))
        return tuple(shapes)

    def cell(self, level: int) -> tuple[int, int]:
        """Queries and keys in one cell of a level; the last cells may have fewer."""
        return self.rows << level, self.columns << level

    def pairs(self, level: int) -> Tensor:
        """The number of pairs in each cell, (rows, columns), float32."""
        sizes = [
            (length - torch.arange(cells) * cell).clamp(max=cell)
            for length, cells, cell in zip((self.queries, self.keys), self.shapes[level], self.cell(level), strict=True)
        ]
        return (sizes[0][:, None] * sizes[1]).float()


def _least(length: int) -> int:
    """The smallest side of a cell for a map of this length."""
    if length <= COARSEST:
        return 1
    cell = 2
    while _cells(length, cell) > FINEST:
        cell *= 2
    return cell


def _cells(length: int, cell: int) -> int:
    return -(-length // cell)


def pyramid(finest: Tensor, levels: PyramidLevels, reduce: str) -> list[Tensor]:
    """Pool the finest level to all levels (B, H, R, C), by maxima, or by means of the finest level's sums."""
    found = [finest]
    for rows, columns in levels.shapes[1:]:
        below = found[-1]
        # Zeros are neutral: no sum and no maximum here is below 0.
        below = torch.nn.functional.pad(below, (0, 2 * columns - below.shape[-1], 0, 2 * rows - below.shape[-2]))
        pooled = max_pool2d(below, 2) if reduce == "max" else below.unflatten(-1, (columns, 2)).sum(-1)
        found.append(pooled if reduce == "max" else pooled.unflatten(-2, (rows, 2)).sum(-2))
    if reduce == "max":
        return found
    return [sums / levels.pairs(level).to(sums.device) for level, sums in enumerate(found)]


def packed(level: Tensor, exists: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Quantise numbers of at least 0, (B, H, R, C), to bytes; also return the largest of each head, (B, H).

    A number v of a head whose largest is t is kept as b = 1 + round(254 · √(v/t)) and read as t · ((b - 1)/254)²: it is
    off by at most t · (√(v/t)/254 + 1/508²), so that small numbers keep more digits than in equal steps. 0 is kept for
    cells that have no pair, where `exists` is False, and read as NaN.

    >>> import torch
    >>> bytes_, top = packed(torch.tensor([[[[0.0, 0.25, 1.0, 0.0]]]]), torch.tensor([True, True, True, False]))
    >>> bytes_.tolist(), unpacked(bytes_, top).tolist()
    ([[[[1, 128, 255, 0]]]], [[[[0.0, 0.25, 1.0, nan]]]])
    """
    top = level.amax((-2, -1))
    root = (level / top.masked_fill(top == 0, 1.0)[..., None, None]).sqrt_().mul_(254.0).round_()
    bytes_ = root.clamp_(0, 254).add_(1).to(torch.uint8)
    return bytes_ if exists is None else bytes_.mul_(exists), top.float()


def unpacked(bytes_: Tensor, top: Tensor) -> Tensor:
    """Dequantise what `packed` returned, as float32, within its error; NaN for cells without a pair."""
    values = ((bytes_.float() - 1.0) / 254.0).square_() * top[..., None, None]
    return values.masked_fill_(bytes_ == 0, math.nan)


CELLS = 2**22
"""Cells, of all heads and sequences that a mask tells apart, that are asked for at a time."""
PAIRS = 2**22
"""Pairs that are looked into at a time."""
STEP = 128
"""Rows are asked for in multiples of so many, as masks made of tiles have them."""


@dataclass(frozen=True, eq=False, slots=True)
class UnmaskedCells:
    """For each pooled cell: does it contain an unmasked pair? No levels where nothing is masked.

    levels: bool (..., R, C), leading axes broadcastable to `leading`, the axes (*batch, heads) of the weights.
    """

    levels: tuple[Tensor, ...] = ()
    leading: tuple[int, ...] = ()

    @classmethod
    def nothing_masked(cls) -> UnmaskedCells:
        """The value for maps without a mask."""
        return cls()

    @classmethod
    def evaluate(cls, mask: Mask, grid: Grid, levels: PyramidLevels, largest: Tensor) -> UnmaskedCells:
        """Evaluate a mask on the cells of a grid, exactly.

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

    def level(self, level: int, shape: torch.Size) -> Tensor | None:
        """One level expanded to (B, H, R, C); None where nothing is masked."""
        if not self.levels:
            return None
        return self.levels[level].expand(*self.leading, *shape[-2:]).reshape(shape)


def _finest(mask: Mask, grid: Grid, levels: PyramidLevels, largest: Tensor) -> Tensor:
    leading, (_, across) = largest.shape[:-2], levels.shapes[0]
    one = mask.evaluate(grid.tile(slice(0, 1), slice(0, 1))).shape[:-2]
    apart = (*[1] * (len(leading) - len(one)), *one)  # the axes along which the mask tells heads and sequences apart
    at_once = -(-max(1, CELLS // max(1, leading.numel() * across)) * levels.rows // STEP) * STEP
    parts = []
    for start in range(0, levels.queries, at_once):
        rows = slice(start, min(start + at_once, levels.queries))
        verdicts = mask.verdicts(Blocks.from_grid(grid.tile(rows, WHOLE), (levels.rows, levels.columns)))
        first = start // levels.rows
        shown = largest[..., first : first + verdicts.shape[-2], :] > 0
        for axis, size in enumerate(apart):
            if size == 1:  # what one head or sequence shows of the mask holds for all of them
                shown = shown.any(axis, keepdim=True)
        exists = shown | (verdicts == FULL)
        _decide_unknown(mask, grid, levels, start, exists, (verdicts == PARTIAL) & ~exists)
        parts.append(exists)
    return torch.cat(parts, -2)


def _decide_unknown(mask: Mask, grid: Grid, levels: PyramidLevels, start: int, exists: Tensor, unknown: Tensor) -> None:
    """Decide the unknown cells by evaluating the mask on their pairs, and write the result into `exists`."""
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
            kept = mask.evaluate(grid.tile(rows, columns)).any(-2)  # over the rows of the cells
            kept = kept.expand(*kept.shape[:-1], columns.stop - columns.start)
            kept = pad(kept, (0, -kept.shape[-1] % wide)).unflatten(-1, (-1, wide)).any(-1)
            exists[..., row, here] |= kept.expand(*leading, kept.shape[-1])
