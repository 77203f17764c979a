"""A mask stored by tiles of 128 × 128: EMPTY, FULL, or PARTIAL with one bit for each pair."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.grid import Blocks, Grid
from ...core.intervals import EMPTY, FULL, PARTIAL, Ternary
from ...errors import AtlasError
from ...masks import Mask
from ...masks.base import Kept, Pairs

SIDE = 128
"""Rows and columns of a tile."""
AT_ONCE = 1024
"""Tiles whose bits are unpacked together: 16 MB."""
MOST_BITS = 2**26
"""The most bytes that the bits of one mask may take."""


@dataclass(frozen=True, eq=False, repr=False)
class BitmapMask(Mask):
    """A mask as verdicts and bits of tiles over row and column indices; it does not depend on positions.

    marks: uint8 (..., ⌈M/128⌉, ⌈N/128⌉), as of `Mask.tiles`. bits: uint8 (P, 128, 16), those of the PARTIAL tiles in
    their order; beyond the last row or column they are 0. Leading axes broadcast to those of the weights.
    """

    marks: Tensor
    bits: Tensor

    @cached_property
    def numbers(self) -> Tensor:
        """Index into `bits` of each PARTIAL tile, in the shape of `marks`."""
        partial = self.marks == PARTIAL
        return (partial.flatten().cumsum(0) - 1).view(partial.shape)

    def keep(self, grid: Pairs) -> Kept:
        if isinstance(grid, Blocks):
            return self._block_verdicts(grid)
        rows, columns = _ranges(grid)
        shown = self._any_and_every(rows, columns, (1, 1))[0]
        above, left = rows.start % SIDE, columns.start % SIDE
        return shown[..., above : above + len(rows), left : left + len(columns)]

    def _block_verdicts(self, blocks: Blocks) -> Ternary:
        """Verdicts on blocks; PARTIAL where blocks and tiles do not nest."""
        rows, columns = _ranges(blocks.grid)
        sizes = blocks.rows, blocks.columns
        within = min(sizes[0], SIDE), min(sizes[1], SIDE)
        fit = all(SIDE % part == size % part == 0 for size, part in zip(sizes, within, strict=True))
        if not fit or rows.start % SIDE or columns.start % SIDE:
            return Ternary(torch.full((*self.marks.shape[:-2], *blocks.shape), PARTIAL, dtype=torch.int8))
        some, every = self._any_and_every(rows, columns, within)
        # Beyond the last row or column there is nothing: no block exists as a whole because of it, nor less than whole.
        for axis, length, size, part in zip((-2, -1), (len(rows), len(columns)), sizes, within, strict=True):
            some, every = (of.narrow(axis, 0, -(-length // part)) for of in (some, every))
            some = _joined(some, axis, size // part, False).any(axis)
            every = _joined(every, axis, size // part, True).all(axis)
        return Ternary.between(every, some)

    def _any_and_every(self, rows: range, columns: range, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Whether any pair, and whether every pair, exists in each part of `size` rows and columns of the tiles.

        Bits beyond the last row or column do not exist: a part that reaches there does not exist as a whole.
        """
        down, across = _tiles(rows), _tiles(columns)
        verdicts, numbers = (of[..., down, across] for of in (self.marks, self.numbers))
        parts = SIDE // size[0], SIDE // size[1]
        some, every = (
            of[..., None, None].repeat(*[1] * verdicts.ndim, *parts) for of in (verdicts != EMPTY, verdicts == FULL)
        )
        partial = (verdicts == PARTIAL).nonzero()
        for few in partial.split(AT_ONCE):
            at = tuple(few.T)
            bits = torch.from_numpy(np.unpackbits(self.bits[numbers[at]].numpy(), axis=-1)).bool()
            bits = bits.view(-1, parts[0], size[0], parts[1], size[1])
            some[at], every[at] = bits.any(-1).any(2), bits.all(-1).all(2)
        return tuple(of.transpose(-3, -2).flatten(-4, -3).flatten(-2) for of in (some, every))  # type: ignore[return-value]

    def __repr__(self) -> str:
        return f"tiles(<{tuple(self.marks.shape)} of {SIDE} × {SIDE}>)"


def tiled(mask: Mask, grid: Grid) -> BitmapMask:
    """Convert any mask on a grid to a `BitmapMask`.

    Raises:
        AtlasError: the bits of its mixed tiles would take more than MOST_BITS.
    """
    blocks = Blocks.of(grid, SIDE)
    verdicts = mask.verdicts(blocks)
    count = int((verdicts == PARTIAL).sum())
    if count * SIDE * SIDE // 8 > MOST_BITS:
        raise AtlasError(
            f"the mask {mask!r} has no symbol that an atlas can hold, and is mixed in {count:,} tiles of {SIDE} × "
            f"{SIDE}, {count * SIDE * SIDE // 8 / 1e6:,.0f} MB of bits; at most {MOST_BITS / 1e6:,.0f} MB are kept: "
            "say it by masks such as causal(), window() and documents(), or record fewer sequences at a time"
        )
    bits = torch.zeros(count, SIDE, SIDE, dtype=torch.bool)
    leading = verdicts.shape[:-2]
    order = (verdicts == PARTIAL).cpu()
    numbers = (order.flatten().cumsum(0) - 1).view(order.shape)
    for row, column in order.reshape(-1, *verdicts.shape[-2:]).any(0).nonzero().tolist():
        tile = blocks.tile(row, column)
        kept = mask.evaluate(tile)
        height, width = tile.shape
        mixed = order[..., row, column]
        bits[numbers[..., row, column][mixed], :height, :width] = kept.expand(*leading, height, width).cpu()[mixed]
    packed = np.packbits(bits.numpy(), axis=-1) if count else np.zeros((0, SIDE, SIDE // 8), dtype=np.uint8)
    return BitmapMask(verdicts.to(torch.uint8).cpu().contiguous(), torch.from_numpy(packed))


def _joined(parts: Tensor, axis: int, count: int, filling: bool) -> Tensor:
    """Group the entries along an axis by `count`, padding the last group with `filling`."""
    short = -parts.shape[axis] % count
    parts = pad(parts, (0, short) if axis == -1 else (0, 0, 0, short), value=filling)
    return parts.unflatten(axis, (-1, count))


def _ranges(grid: Grid) -> tuple[range, range]:
    queries, keys = grid.query_positions.shape[-1], grid.key_positions.shape[-1]
    return range(queries)[grid.rows], range(keys)[grid.columns]


def _tiles(stretch: range) -> slice:
    return slice(stretch.start // SIDE, -(-stretch.stop // SIDE))
