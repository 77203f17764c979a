"""Sparse attention patterns: strided, fixed (Sparse Transformer), dilated, global (Longformer), random (BigBird)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from ..core.intervals import look_up
from ..core.tensor_memo import copy_on
from ..errors import MaskError
from ..utils.dataclass_json import DERIVED
from ..utils.numbers import whole_number
from .base import Kept, Mask, Pairs
from .index_checks import check_known_ranges, check_range, checked_count, head_indices, whole_numbers
from .parts import ListedPositions, Part, PeriodicPositions
from .window import Window


@dataclass(frozen=True, repr=False)
class Strided(Mask):
    """(query position - key position) mod stride == 0."""

    stride: int

    @property
    def by_distance(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[Part, ...]:
        return (Part(None, step=self.stride),) if self.stride > 1 else ()

    def keep(self, grid: Pairs) -> Kept:
        return (grid.query - grid.key) % self.stride == 0

    def __repr__(self) -> str:
        return f"strided({self.stride})"


@dataclass(frozen=True, repr=False)
class Fixed(Mask):
    """Same block, or the key is among the last `summary` positions of its block."""

    block: int
    summary: int

    @property
    def parts(self) -> tuple[Part, ...]:
        if not 0 < self.summary <= self.block // 2:  # none, or too many for a selection of columns
            return ()
        same_block = Fixed(self.block, 0)
        return Part(same_block), Part(~same_block, columns=PeriodicPositions(self.block, self.block - self.summary))

    def keep(self, grid: Pairs) -> Kept:
        same_block = grid.query // self.block == grid.key // self.block
        return same_block | (grid.key % self.block >= self.block - self.summary)

    def __repr__(self) -> str:
        return f"fixed({self.block}, {self.summary})"


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """query position - key position = step · t for some t in -after..before."""

    before: int
    step: int
    after: int

    @property
    def by_distance(self) -> bool:
        return True

    @property
    def parts(self) -> tuple[Part, ...]:
        if self.step == 1:
            return ()
        return (Part(Window(self.before * self.step, self.after * self.step), step=self.step),)

    def keep(self, grid: Pairs) -> Kept:
        distance = grid.query - grid.key
        near = (distance <= self.before * self.step) & (distance >= -self.after * self.step)
        return near & (distance % self.step == 0)

    def __repr__(self) -> str:
        return f"dilated({self.before}, {self.step}{f', after={self.after}' if self.after else ''})"


def strided(stride: int) -> Mask:
    """Pairs whose distance is a multiple of the stride: *(query position - key position) mod stride == 0*.

    Sparse Transformer's strided attention is `causal() & (window(before=stride) | strided(stride))` (Child et al.
    2019, arXiv 1904.10509, section 4.3: A(1) = {max(0, i - l), ..., i} and A(2) = {j : (i - j) mod l = 0}, for
    different heads or, as here, merged).

    Raises:
        MaskError: a stride below 1, above 2⁶³ - 1 or not a whole number.

    >>> from regard import masks
    >>> masks.strided(2).dense(3, 3).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    return Strided(checked_count("strided's stride", stride, least=1))


def fixed(block: int, summary: int) -> Mask:
    """Pairs within one block of positions, and all pairs whose key is among the last `summary` ones of its block.

    The formula: *⌊query / block⌋ == ⌊key / block⌋ or key mod block >= block - summary*. Sparse Transformer's fixed
    attention is `causal() & fixed(block, summary)` (Child et al. 2019, arXiv 1904.10509, section 4.3: l = block,
    c = summary; A(1) and A(2), for different heads or, as here, merged. There the columns of A(2) are written
    t = l - c and {j mod l in {t, t + 1, ..., l}}; positions here count from 0, so they are l - c..l - 1.)

    Raises:
        MaskError: a block below 1, a summary below 0 or above the block, or one that is not a whole number.

    >>> from regard import masks
    >>> masks.fixed(2, 1).dense(4, 4).int()
    tensor([[1, 1, 0, 1],
            [1, 1, 0, 1],
            [0, 1, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    block, summary = checked_count("fixed's block", block, least=1), checked_count("fixed's summary", summary)
    if summary > block:
        raise MaskError(
            f"fixed's summary is {summary}, more than the {block} positions of a block: it needs 0 to {block}"
        )
    return Fixed(block, summary)


def dilated(before: int, step: int, after: int = 0) -> Mask:
    """Pairs with *key position = query position - step · t* for t in the closed interval -after..before.

    Longformer's dilated window (Beltagy et al. 2020, arXiv 2004.05150, section 3.1): a window with gaps of step - 1.

    Raises:
        MaskError: a step below 1, a count below 0, one that is not a whole number, or step · count above 2⁶³ - 1.

    >>> from regard import masks
    >>> masks.dilated(1, 2).dense(4, 4).int()
    tensor([[1, 0, 0, 0],
            [0, 1, 0, 0],
            [1, 0, 1, 0],
            [0, 1, 0, 1]], dtype=torch.int32)
    """
    before, after = checked_count("dilated's before", before), checked_count("dilated's after", after)
    step = checked_count("dilated's step", step, least=1)
    checked_count("dilated's step times before and after", step * max(before, after))
    return Dilated(before, step, after)


@dataclass(frozen=True, repr=False)
class GlobalTokens(Mask):
    """Query position or key position in `indices`."""

    indices: tuple[int, ...]

    @property
    def positions(self) -> ListedPositions:
        """The positions of the global tokens."""
        return ListedPositions(self.indices)

    @property
    def parts(self) -> tuple[Part, ...]:
        return Part(None, columns=self.positions), Part(~GlobalKeys(self.indices), rows=self.positions)

    def keep(self, grid: Pairs) -> Kept:
        return grid.by_query(self.positions.contains) | grid.by_key(self.positions.contains)

    def __repr__(self) -> str:
        return f"global_tokens({list(self.indices)})"


@dataclass(frozen=True, repr=False)
class GlobalKeys(Mask):
    """Key position in `indices`."""

    indices: tuple[int, ...]

    def keep(self, grid: Pairs) -> Kept:
        return grid.by_key(ListedPositions(self.indices).contains)

    def __repr__(self) -> str:
        return f"global_keys({list(self.indices)})"


def global_tokens(indices: Tensor | Sequence[int]) -> Mask:
    """Pairs with a global token on either side: *query position in indices or key position in indices*.

    Longformer's global attention (Beltagy et al. 2020, arXiv 2004.05150, section 3.1), which is symmetric, and
    BigBird's (Zaheer et al. 2020, arXiv 2007.14062, section 2, internal construction).

    Shapes: indices is (G,), whole numbers >= 0.

    Raises:
        MaskError: indices are not one axis of whole numbers, or one of them is negative.

    >>> from regard import masks
    >>> masks.global_tokens([1]).dense(3, 3).int()
    tensor([[0, 1, 0],
            [1, 1, 1],
            [0, 1, 0]], dtype=torch.int32)
    """
    numbers = whole_numbers("global_tokens", "indices", indices)
    if numbers.ndim != 1:
        raise MaskError(f"global_tokens needs indices of shape (G,); these have the shape {tuple(numbers.shape)}")
    if numbers.numel() and int(numbers.min()) < 0:
        raise MaskError(
            f"global_tokens needs positions of at least 0; the smallest here is {int(numbers.min())}. The last of n "
            "positions is n - 1"
        )
    return GlobalTokens(tuple(numbers.tolist()))


MEND_BLOCKS = "pass random_blocks() a greater length"


@dataclass(frozen=True, repr=False)
class RandomBlocks(Mask):
    """The key's block is one of those drawn for the query's block."""

    length: int
    block: int
    number: int
    seed: int
    heads: int | None
    # [heads or 1, query blocks, key blocks]; given where the mask goes through an operator, so that none is drawn there
    drawn: Tensor = field(default=None, compare=False, metadata=DERIVED)  # type: ignore[assignment]  # drawn below

    def __post_init__(self) -> None:
        if self.drawn is not None:
            return
        blocks = -(-self.length // self.block)
        generator = torch.Generator().manual_seed(self.seed)
        drawn = torch.zeros(1 if self.heads is None else self.heads, blocks, blocks, dtype=torch.bool)
        for head in drawn:
            head.scatter_(-1, torch.rand(blocks, blocks, generator=generator).topk(self.number).indices, True)
        object.__setattr__(self, "drawn", drawn)

    def keep(self, grid: Pairs) -> Kept:
        check_known_ranges(repr(self), grid, (self.length, self.length), (MEND_BLOCKS, MEND_BLOCKS))
        head = 0 if self.heads is None else head_indices(self, self.heads, grid)
        index = (head, grid.by_query(self._block), grid.by_key(self._block))
        return cast(Kept, look_up(copy_on(self.drawn, grid.device), index))  # a table of booleans

    def _block(self, positions: Tensor) -> Tensor:
        """The block index of each position."""
        check_range(repr(self), positions, self.length, MEND_BLOCKS)
        return positions // self.block

    def __repr__(self) -> str:
        options = (f", seed={self.seed}" if self.seed else "") + (f", heads={self.heads}" if self.heads else "")
        return f"random_blocks({self.length}, {self.block}, {self.number}{options})"


def random_blocks(length: int, block: int, count: int, *, seed: int = 0, heads: int | None = None) -> Mask:
    """Pairs of blocks drawn at random: each block of queries attends to `count` different blocks of keys.

    Positions 0..length-1 are split into ⌈length / block⌉ blocks; each block of queries gets `count` of them without
    repetition, the same for every batch, and for every head unless `heads` is the number of heads that get their own.
    The same arguments draw the same blocks on every device.

    BigBird's random attention (Zaheer et al. 2020, arXiv 2007.14062, appendix D). There the random blocks exclude
    those of window and global tokens; here they may coincide, and `|` combines all three.

    Raises:
        MaskError: a number below its minimum, a count above the number of blocks, or one that is not a whole number;
            at evaluation, a position outside 0..length-1.

    >>> from regard import masks
    >>> masks.random_blocks(6, 2, 1, seed=1).dense(6, 6)[::2, ::2].sum(1)
    tensor([1, 1, 1])
    """
    block, length = (
        checked_count("random_blocks' block", block, least=1),
        checked_count("random_blocks' length", length),
    )
    checked_count("random_blocks' count", count)
    whole_number("random_blocks' seed", seed, least=0, error=MaskError)
    if heads is not None:
        checked_count("random_blocks' heads", heads, least=1)
    blocks = -(-length // block)
    if count > blocks:
        raise MaskError(
            f"random_blocks' count is {count}, but {length} positions make {blocks} blocks of {block}: it needs 0 to "
            f"{blocks}"
        )
    return RandomBlocks(length, block, count, seed, heads)
