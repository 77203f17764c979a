"""A mask as an atlas keeps one that has no symbol: a verdict on each tile, and the bits of those that are mixed."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...blocks import Blocks
from ...errors import AtlasError
from ...intervals import Ternary
from ...masks import Mask
from ...masks.base import Kept, Pairs
from ...tiles import FULL, PARTIAL, Grid

SIDE = 128
"""Rows and columns of a tile."""
MOST_BITS = 2**26
"""The most bytes that the bits of one mask may take."""


@dataclass(frozen=True, eq=False, repr=False)
class TiledMask(Mask):
    """Which pairs exist, by rows and columns and not by positions.

    marks: uint8 (..., ⌈M/128⌉, ⌈N/128⌉), as of `Mask.tiles`. bits: uint8 (P, 128, 16), those of the PARTIAL tiles in
    their order; beyond the last row or column they are 0. Leading axes broadcast to those of the weights.
    """

    marks: Tensor
    bits: Tensor

    @cached_property
    def numbers(self) -> Tensor:
        """Which of the bits belong to a tile that is PARTIAL."""
        partial = self.marks == PARTIAL
        return (partial.flatten().cumsum(0) - 1).view(partial.shape)

    def keep(self, grid: Pairs) -> Kept:
        if isinstance(grid, Blocks):
            known = torch.zeros(grid.shape, dtype=torch.bool)
            return Ternary.between(known, ~known)
        queries, keys = grid.query_positions.shape[-1], grid.key_positions.shape[-1]
        rows, columns = range(queries)[grid.rows], range(keys)[grid.columns]
        down, across = _tiles(rows), _tiles(columns)
        verdicts, numbers = (of[..., down, across] for of in (self.marks, self.numbers))
        shown = (verdicts == FULL)[..., None, None].repeat(*[1] * verdicts.ndim, SIDE, SIDE)
        partial = verdicts == PARTIAL
        bits = self.bits[numbers[partial]]
        shown[partial] = torch.from_numpy(np.unpackbits(bits.numpy(), axis=-1)).bool()
        shown = shown.transpose(-3, -2).flatten(-4, -3).flatten(-2)
        above, left = down.start * SIDE, across.start * SIDE
        return shown[..., rows.start - above : rows.stop - above, columns.start - left : columns.stop - left]

    def __repr__(self) -> str:
        return f"tiles(<{tuple(self.marks.shape)} of {SIDE} × {SIDE}>)"


def tiled(mask: Mask, grid: Grid) -> TiledMask:
    """Any mask on the pairs of a grid, by its tiles.

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
        kept = mask.keep(tile)
        height, width = tile.shape
        mixed = order[..., row, column]
        bits[numbers[..., row, column][mixed], :height, :width] = kept.expand(*leading, height, width).cpu()[mixed]
    packed = np.packbits(bits.numpy(), axis=-1) if count else np.zeros((0, SIDE, SIDE // 8), dtype=np.uint8)
    return TiledMask(verdicts.to(torch.uint8).cpu().contiguous(), torch.from_numpy(packed))


def _tiles(stretch: range) -> slice:
    return slice(stretch.start // SIDE, -(-stretch.stop // SIDE))
