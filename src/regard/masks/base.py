"""What every mask is: a small value that says which pairs exist, with `&`, `|` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import torch
from torch import Tensor

from ..core.grid import Blocks, Grid, broadcast_together
from ..core.intervals import FULL, PARTIAL, Ternary
from ..errors import MaskError
from .drawing import Drawing, draw

Pairs: TypeAlias = Grid | Blocks
Kept: TypeAlias = Any  # bool tensors for a Grid, a Ternary for Blocks


class Mask(ABC):
    """Which pairs of query and key exist; True = attend, always.

    A mask is a symbol, not a tensor: it knows positions, never kernels. Subclasses are final and say `keep`: their
    formula, once, for the pairs of a grid and for its tiles.
    """

    @property
    def by_distance(self) -> bool:
        """Whether all it asks of a pair is *query position - key position*: what it keeps is alike along diagonals."""
        return False

    @overload
    def keep(self, grid: Grid) -> Tensor: ...

    @overload
    def keep(self, grid: Blocks) -> Ternary: ...

    @abstractmethod
    def keep(self, grid: Pairs) -> Tensor | Ternary:
        """Which pairs of a grid exist: bool, broadcastable to (..., heads, M, N).

        Of blocks it says the same per tile, as far as intervals of positions tell: a `Ternary`.
        """

    def dense(
        self,
        queries: int,
        keys: int,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """The mask as booleans, (M, N), with (batch, heads) in front where it depends on them; True = attend.

        Keys sit at 0..N-1 and queries at the last M of these, unless positions say otherwise.
        """
        grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
        keep = self.keep(grid)
        return keep.expand(*keep.shape[:-2], queries, keys)

    def tiles(
        self,
        queries: int,
        keys: int,
        size: int | tuple[int, int] = 128,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        device: torch.device | None = None,
    ) -> Tensor:
        """What exists in each tile, 0 EMPTY, 1 PARTIAL or 2 FULL: int8 (⌈M/rows⌉, ⌈N/columns⌉), in front as `dense`.

        `size` is the rows and columns of a tile, or one number for both; tiles at the end are smaller. EMPTY and FULL
        are never wrong, PARTIAL may be either. It takes O(M + N + number of tiles), and for a mask made of a tensor
        also O(its size).

        Raises:
            ShapeError: a size that is no whole number of at least 1.

        >>> from regard import masks
        >>> masks.causal().tiles(256, 384)
        tensor([[2, 1, 0],
                [2, 2, 1]], dtype=torch.int8)
        """
        grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
        return self.verdicts(Blocks.of(grid, size))

    def verdicts(self, blocks: Blocks) -> Tensor:
        """The tiles of a grid, every axis of tiles at its full size: int8 (..., ⌈M/rows⌉, ⌈N/columns⌉)."""
        verdicts = self.keep(blocks).verdicts
        return verdicts.expand(*verdicts.shape[:-2], *blocks.shape)

    def density(
        self,
        queries: int,
        keys: int,
        size: int | tuple[int, int] = 128,
        *,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
        device: torch.device | None = None,
    ) -> float:
        """The share of the pairs that exist, exactly, over batch and heads; 0.0 where there are no pairs.

        Only tiles that are PARTIAL are looked into, one at a time.

        >>> from regard import masks
        >>> masks.causal().density(4, 4)
        0.625
        """
        grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
        blocks = Blocks.of(grid, size)
        verdicts = self.verdicts(blocks)
        leading = verdicts.shape[:-2]
        kept = int(((verdicts == FULL) * blocks.areas).sum())
        for row, column in (verdicts == PARTIAL).unsqueeze(0).flatten(0, -3).any(0).nonzero().tolist():
            tile = blocks.tile(row, column)
            some = (verdicts[..., row, column] == PARTIAL)[..., None, None]
            kept += int((self.keep(tile) & some).expand(*leading, *tile.shape).sum())
        pairs = leading.numel() * queries * keys
        return kept / pairs if pairs else 0.0

    def draw(
        self,
        queries: int,
        keys: int,
        *,
        batch: int = 0,
        head: int = 0,
        query_positions: Tensor | None = None,
        key_positions: Tensor | None = None,
    ) -> Drawing:
        """The mask as a picture: `print` it, or write `draw(M, N).figure().savefig("mask.png")`.

        Where the mask depends on them, `batch` and `head` say which of these is drawn. It takes no n²: a large mask is
        drawn from its tiles.

        Raises:
            MaskError: there is no such number of the batch, or head.
            ShapeError: there are no pairs.

        >>> from regard import masks
        >>> print(masks.causal().draw(3, 6))
        causal()
        3 × 6 pairs; 83.3 % exist
             keys 0   4
        queries 3 ████··
                  █████·
                  ██████
        █ exists  · does not exist
        """
        grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions)
        return draw(self, grid, batch, head)

    def __and__(self, other: Mask) -> Mask:
        return And(self, as_mask(other))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, as_mask(other))

    def __invert__(self) -> Mask:
        return Not(self)

    def __bool__(self) -> bool:
        raise MaskError("a mask has no truth value of its own: combine masks with & | ~, not with and, or, not")


@dataclass(frozen=True, repr=False)
class And(Mask):
    """Pairs that both masks keep."""

    left: Mask
    right: Mask

    @property
    def by_distance(self) -> bool:
        return self.left.by_distance and self.right.by_distance

    def keep(self, grid: Pairs) -> Kept:
        left, right = _together(self, grid)
        return left & right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Not)} & {_operand(self.right, Not)}"


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """Pairs that either mask keeps."""

    left: Mask
    right: Mask

    @property
    def by_distance(self) -> bool:
        return self.left.by_distance and self.right.by_distance

    def keep(self, grid: Pairs) -> Kept:
        left, right = _together(self, grid)
        return left | right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Or, Not)} | {_operand(self.right, And, Not)}"


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Pairs that the mask does not keep."""

    mask: Mask

    @property
    def by_distance(self) -> bool:
        return self.mask.by_distance

    def keep(self, grid: Pairs) -> Kept:
        return ~self.mask.keep(grid)

    def __repr__(self) -> str:
        return f"~{_operand(self.mask, Not)}"


def as_mask(mask: object) -> Mask:
    """A mask as it is; anything else is refused, with the way to say it."""
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor) and mask.dtype == torch.bool:
        raise MaskError(
            "a bool tensor joins a mask through masks.where(keep=tensor), where True = attend, or "
            "masks.where(ignore=tensor), where True = leave out"
        )
    raise MaskError(f"a mask is needed here, such as masks.causal(); this is a {type(mask).__name__}")


def _together(both: And | Or, grid: Pairs) -> tuple[Any, Any]:
    """The pairs that either operand keeps, which have to broadcast."""
    left, right = both.left.keep(grid), both.right.keep(grid)
    if not broadcast_together(left, right):
        raise MaskError(
            f"{both.left!r} has the shape {tuple(left.shape)} and {both.right!r} {tuple(right.shape)} (batch and "
            "heads, queries, keys): they do not broadcast"
        )
    return left, right


def _operand(mask: Mask, *tighter: type[Mask]) -> str:
    """An operand as it was written: in parentheses, unless it binds at least as tightly."""
    bare = not isinstance(mask, And | Or | Not) or isinstance(mask, tighter)
    return repr(mask) if bare else f"({mask!r})"
