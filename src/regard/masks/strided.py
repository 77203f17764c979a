"""Strided, fixed and dilated: keys at regular distances."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import MaskError
from .base import Kept, Mask, Pairs
from .numbers import count


@dataclass(frozen=True, repr=False)
class Strided(Mask):
    """(query position - key position) mod stride == 0."""

    stride: int

    @property
    def by_distance(self) -> bool:
        return True

    def keep(self, grid: Pairs) -> Kept:
        return (grid.query - grid.key) % self.stride == 0

    def __repr__(self) -> str:
        return f"strided({self.stride})"


@dataclass(frozen=True, repr=False)
class Fixed(Mask):
    """The key is in the query's block, or among the last positions of its own block."""

    block: int
    summary: int

    def keep(self, grid: Pairs) -> Kept:
        same_block = grid.query // self.block == grid.key // self.block
        return same_block | (grid.key % self.block >= self.block - self.summary)

    def __repr__(self) -> str:
        return f"fixed({self.block}, {self.summary})"


@dataclass(frozen=True, repr=False)
class Dilated(Mask):
    """query position - key position is step · t for some t in -after..before."""

    before: int
    step: int
    after: int

    @property
    def by_distance(self) -> bool:
        return True

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
        MaskError: a stride that is below 1 or no whole number.

    >>> from regard import masks
    >>> masks.strided(2).dense(3, 3).int()
    tensor([[1, 0, 1],
            [0, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    return Strided(count("strided's stride", stride, least=1))


def fixed(block: int, summary: int) -> Mask:
    """Pairs within one block of positions, and all pairs whose key is among the last `summary` ones of its block.

    The formula: *⌊query / block⌋ == ⌊key / block⌋ or key mod block >= block - summary*. Sparse Transformer's fixed
    attention is `causal() & fixed(block, summary)` (Child et al. 2019, arXiv 1904.10509, section 4.3: l = block,
    c = summary; A(1) and A(2), for different heads or, as here, merged. There the columns of A(2) are written
    t = l - c and {j mod l in {t, t + 1, ..., l}}; positions here count from 0, so they are l - c..l - 1.)

    Raises:
        MaskError: a block below 1, a summary below 0 or above the block, or one that is no whole number.

    >>> from regard import masks
    >>> masks.fixed(2, 1).dense(4, 4).int()
    tensor([[1, 1, 0, 1],
            [1, 1, 0, 1],
            [0, 1, 1, 1],
            [0, 1, 1, 1]], dtype=torch.int32)
    """
    block, summary = count("fixed's block", block, least=1), count("fixed's summary", summary)
    if summary > block:
        raise MaskError(
            f"fixed's summary is {summary}, more than the {block} positions of a block: it needs 0 to {block}"
        )
    return Fixed(block, summary)


def dilated(before: int, step: int, after: int = 0) -> Mask:
    """Pairs whose key sits at *query position - step · t* for t in the closed interval -after..before.

    Longformer's dilated window (Beltagy et al. 2020, arXiv 2004.05150, section 3.1): a window with gaps of step - 1.

    Raises:
        MaskError: a step below 1, a count below 0, or one that is no whole number.

    >>> from regard import masks
    >>> masks.dilated(1, 2).dense(4, 4).int()
    tensor([[1, 0, 0, 0],
            [0, 1, 0, 0],
            [1, 0, 1, 0],
            [0, 1, 0, 1]], dtype=torch.int32)
    """
    return Dilated(
        count("dilated's before", before), count("dilated's step", step, least=1), count("dilated's after", after)
    )
