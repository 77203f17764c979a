"""What a record says of many heads and sequences, said of one head or one sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ...biases import Bias
from ...errors import AtlasError, ConfigurationError
from ...intervals import Ternary
from ...masks import Mask
from ...masks.base import Kept, Pairs
from ...tiles import Grid


class Faults:
    """What goes wrong where a file says which pairs exist, as an AtlasError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, AtlasError) or not isinstance(error, Exception):
            return
        if isinstance(error, ConfigurationError):
            raise AtlasError(str(error)) from None
        raise AtlasError(
            f"the mask, bias or positions that the atlas has of {self.name!r} do not fit: {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class Axes:
    """The leading axes that a record's mask and bias know, and the way to one head of one sequence."""

    leading: tuple[int, ...]
    has_heads: bool
    heads: int

    def grid(self, grid: Any) -> Any:
        """A grid of one head as one of the record."""
        if not isinstance(grid, Grid):
            return replace(grid, grid=replace(grid.grid, heads=self.has_heads))
        return replace(grid, heads=self.has_heads)

    def one(self, pairs: Tensor, which: tuple[int, int]) -> Tensor:
        """What (..., m, n) has for a sequence and a head."""
        index = which[0] * self.heads + which[1] if self.has_heads else which[0]
        pairs = pairs.expand(*self.leading, *pairs.shape[-2:])
        return pairs[tuple(int(at) for at in np.unravel_index(index, self.leading))] if self.leading else pairs

    def of(self, tensor: Tensor, sequence: int) -> Tensor:
        """One sequence of (B, heads, ...), a batch of one: (1, heads, ...), or (1, ...) without an axis for heads."""
        return tensor[sequence : sequence + 1] if self.has_heads else tensor[sequence]

    def all_heads(self, pairs: Tensor, sequence: int) -> Tensor:
        """What (..., m, n) has for the heads of a sequence: (heads or 1, m, n), or (m, n) where all have the same."""
        batch = self.leading[:-1] if self.has_heads else self.leading
        if pairs.ndim <= 2 + self.has_heads:
            return pairs
        pairs = pairs[(None,) * (len(self.leading) + 2 - pairs.ndim)]
        at = zip(np.unravel_index(sequence, batch), pairs.shape, strict=False)
        return pairs[tuple(int(place) if size > 1 else 0 for place, size in at)]


@dataclass(frozen=True, eq=False)
class OneMask(Mask):
    """A record's mask for one head of one sequence."""

    mask: Mask
    axes: Axes
    which: tuple[int, int]

    def keep(self, grid: Pairs) -> Kept:
        return self.axes.one(self.mask.keep(self.axes.grid(grid)), self.which)


@dataclass(frozen=True, eq=False)
class OneBias(Bias):
    """A record's bias for one head of one sequence."""

    bias: Bias
    axes: Axes
    which: tuple[int, int]

    def values(self, grid: Grid) -> Tensor:
        return self.axes.one(self.bias.values(self.axes.grid(grid)), self.which)


@dataclass(frozen=True, eq=False)
class SequenceMask(Mask):
    """A record's mask for all heads of one sequence."""

    mask: Mask
    axes: Axes
    sequence: int

    def keep(self, grid: Pairs) -> Kept:
        kept = self.mask.keep(self.axes.grid(grid))
        if isinstance(kept, Ternary):
            return Ternary(self.axes.all_heads(kept.verdicts, self.sequence))
        return self.axes.all_heads(kept, self.sequence)


@dataclass(frozen=True, eq=False)
class SequenceBias(Bias):
    """A record's bias for all heads of one sequence."""

    bias: Bias
    axes: Axes
    sequence: int

    def values(self, grid: Grid) -> Tensor:
        return self.axes.all_heads(self.bias.values(self.axes.grid(grid)), self.sequence)
