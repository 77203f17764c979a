"""Random blocks: a few blocks of keys for each block of queries."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..errors import MaskError
from ..intervals import look_up
from .base import Kept, Mask, Pairs
from .numbers import by_head, check_range
from .numbers import count as checked


@dataclass(frozen=True, repr=False)
class RandomBlocks(Mask):
    """The block of the key is among those drawn for the block of the query."""

    length: int
    block: int
    number: int
    seed: int
    heads: int | None
    drawn: Tensor = field(init=False, compare=False)  # (heads or 1, blocks, blocks)

    def __post_init__(self) -> None:
        blocks = -(-self.length // self.block)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.zeros(1 if self.heads is None else self.heads, blocks, blocks, dtype=torch.bool)
        for head in drawn:
            head.scatter_(-1, torch.rand(blocks, blocks, generator=generator).topk(self.number).indices, True)
        object.__setattr__(self, "drawn", drawn)

    def keep(self, grid: Pairs) -> Kept:
        head = 0 if self.heads is None else by_head(self, self.heads, grid)
        return look_up(self.drawn.to(grid.device), (head, grid.by_query(self._block), grid.by_key(self._block)))

    def _block(self, positions: Tensor) -> Tensor:
        """The blocks that positions are in."""
        check_range(repr(self), positions, self.length, "give random_blocks() a greater length")
        return positions // self.block

    def __repr__(self) -> str:
        options = (f", seed={self.seed}" if self.seed else "") + (f", heads={self.heads}" if self.heads else "")
        return f"random_blocks({self.length}, {self.block}, {self.number}{options})"


def random_blocks(length: int, block: int, count: int, *, seed: int = 0, heads: int | None = None) -> Mask:
    """Pairs of blocks drawn at random: each block of queries attends to `count` different blocks of keys.

    Positions 0..length-1 are cut to ⌈length / block⌉ blocks; each block of queries gets `count` of these without
    repetition, the same for every batch, and for every head unless `heads` says how many heads get their own. The
    same arguments always draw the same blocks, on every device.

    BigBird's random attention (Zaheer et al. 2020, arXiv 2007.14062, appendix D). There the drawn blocks leave out
    those of window and global tokens; here they may fall together, and `|` joins all three.

    Raises:
        MaskError: a number below its least, a count above the number of blocks, or one that is no whole number; when
            used, a position outside 0..length-1.

    >>> from regard import masks
    >>> masks.random_blocks(6, 2, 1, seed=1).dense(6, 6)[::2, ::2].sum(1)
    tensor([1, 1, 1])
    """
    block, length = checked("random_blocks' block", block, least=1), checked("random_blocks' length", length)
    checked("random_blocks' count", count)
    checked("random_blocks' seed", seed)
    if heads is not None:
        checked("random_blocks' heads", heads, least=1)
    blocks = -(-length // block)
    if count > blocks:
        raise MaskError(
            f"random_blocks' count is {count}, but {length} positions make {blocks} blocks of {block}: it needs 0 to "
            f"{blocks}"
        )
    return RandomBlocks(length, block, count, seed, heads)
