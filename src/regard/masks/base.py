"""What every mask is: a small value that says which pairs exist, with `&`, `|` and `~`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MaskError
from ..tiles import Grid, broadcast_together


class Mask(ABC):
    """Which pairs of query and key exist; True = attend, always.

    A mask is a symbol, not a tensor: it knows positions, never kernels. Subclasses are final and say `keep`.
    """

    @abstractmethod
    def keep(self, grid: Grid) -> Tensor:
        """The pairs of a grid that exist: bool, broadcastable to (..., heads, M, N)."""

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

    def keep(self, grid: Grid) -> Tensor:
        left, right = _together(self, grid)
        return left & right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Not)} & {_operand(self.right, Not)}"


@dataclass(frozen=True, repr=False)
class Or(Mask):
    """Pairs that either mask keeps."""

    left: Mask
    right: Mask

    def keep(self, grid: Grid) -> Tensor:
        left, right = _together(self, grid)
        return left | right

    def __repr__(self) -> str:
        return f"{_operand(self.left, And, Or, Not)} | {_operand(self.right, And, Not)}"


@dataclass(frozen=True, repr=False)
class Not(Mask):
    """Pairs that the mask does not keep."""

    mask: Mask

    def keep(self, grid: Grid) -> Tensor:
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


def _together(both: And | Or, grid: Grid) -> tuple[Tensor, Tensor]:
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
