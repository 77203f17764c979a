"""What a record says of many heads and sequences, said of one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from ...biases import Bias
from ...errors import AtlasError, ConfigurationError
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
