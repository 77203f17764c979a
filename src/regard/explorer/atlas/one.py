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
    """The leading axes that a record's mask and bias know."""

    leading: tuple[int, ...]
    has_heads: bool
    heads: int

    def grid(self, grid: Any) -> Any:
        """A grid of one head as one of the record."""
        if not isinstance(grid, Grid):
            return replace(grid, grid=replace(grid.grid, heads=self.has_heads))
        return replace(grid, heads=self.has_heads)

    def of(self, tensor: Tensor, sequence: int) -> Tensor:
        """One sequence of (B, heads, ...), a batch of one: (1, heads, ...), or (1, ...) without an axis for heads."""
        return tensor[sequence : sequence + 1] if self.has_heads else tensor[sequence]


@dataclass(frozen=True, slots=True)
class OneHead:
    """One head of one sequence."""

    axes: Axes
    sequence: int
    head: int

    def of(self, pairs: Tensor) -> Tensor:
        """What (..., m, n) has for it: (m, n)."""
        leading = self.axes.leading
        index = self.sequence * self.axes.heads + self.head if self.axes.has_heads else self.sequence
        pairs = pairs.expand(*leading, *pairs.shape[-2:])
        return pairs[tuple(int(at) for at in np.unravel_index(index, leading))] if leading else pairs


@dataclass(frozen=True, slots=True)
class OneSequence:
    """All heads of one sequence."""

    axes: Axes
    sequence: int

    def of(self, pairs: Tensor) -> Tensor:
        """What (..., m, n) has for them: (heads or 1, m, n), or (m, n) where all have the same."""
        leading, has_heads = self.axes.leading, self.axes.has_heads
        batch = leading[:-1] if has_heads else leading
        if pairs.ndim <= 2 + has_heads:
            return pairs
        pairs = pairs[(None,) * (len(leading) + 2 - pairs.ndim)]
        at = zip(np.unravel_index(self.sequence, batch), pairs.shape, strict=False)
        return pairs[tuple(int(place) if size > 1 else 0 for place, size in at)]


@dataclass(frozen=True, eq=False)
class MaskOf(Mask):
    """A record's mask for a part of the record."""

    mask: Mask
    part: OneHead | OneSequence

    def keep(self, grid: Pairs) -> Kept:
        kept = self.mask.keep(self.part.axes.grid(grid))
        return Ternary(self.part.of(kept.verdicts)) if isinstance(kept, Ternary) else self.part.of(kept)


@dataclass(frozen=True, eq=False)
class BiasOf(Bias):
    """A record's bias for a part of the record."""

    bias: Bias
    part: OneHead | OneSequence

    def values(self, grid: Grid) -> Tensor:
        return self.part.of(self.bias.values(self.part.axes.grid(grid)))
