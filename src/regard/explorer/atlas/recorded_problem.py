"""What a record keeps of a call, posed as problems again, in no memory but the file's.

What a record says of many heads and sequences, said of one head or one sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from torch import Tensor

from ...biases import Bias
from ...core.grid import Grid
from ...core.intervals import Ternary
from ...core.problem import Problem
from ...core.score_forms import AdditivePairs, DotPairs
from ...errors import AtlasError, ConfigurationError
from ...masks import Mask
from ...masks.base import Kept, Pairs
from .mask_json import read_bias, read_mask


class RecordErrors:
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
class RecordAxes:
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
class HeadSlice:
    """One head of one sequence."""

    axes: RecordAxes
    sequence: int
    head: int

    def of(self, pairs: Tensor) -> Tensor:
        """What (..., m, n) has for it: (m, n)."""
        leading = self.axes.leading
        index = self.sequence * self.axes.heads + self.head if self.axes.has_heads else self.sequence
        pairs = pairs.expand(*leading, *pairs.shape[-2:])
        return pairs[tuple(int(at) for at in np.unravel_index(index, leading))] if leading else pairs


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """All heads of one sequence."""

    axes: RecordAxes
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
class SlicedMask(Mask):
    """A record's mask for a part of the record."""

    mask: Mask
    part: HeadSlice | SequenceSlice

    def keep(self, grid: Pairs) -> Kept:
        kept = self.mask.evaluate(self.part.axes.grid(grid))
        return Ternary(self.part.of(kept.verdicts)) if isinstance(kept, Ternary) else self.part.of(kept)


@dataclass(frozen=True, eq=False)
class SlicedBias(Bias):
    """A record's bias for a part of the record."""

    bias: Bias
    part: HeadSlice | SequenceSlice

    def values(self, grid: Grid) -> Tensor:
        return self.part.of(self.bias.values(self.part.axes.grid(grid)))


@dataclass(frozen=True, eq=False)
class RecordedProblem:
    """The problems of one sequence of a record that has queries and keys."""

    record: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    sequence: int

    def head(self, head: int) -> Problem:
        """One head as a problem of its own, over all rows and columns."""
        group = self.record["heads"] // self.record["key_heads"]
        return self._problem(
            self._array("query")[self.sequence, head],
            self._array("key")[self.sequence, head // group],
            HeadSlice(self._axes, self.sequence, head),
        )

    def whole(self) -> Problem:
        """All heads together."""
        return self._problem(
            self._axes.of(self._array("query"), self.sequence),
            self._axes.of(self._array("key"), self.sequence),
            SequenceSlice(self._axes, self.sequence),
        )

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the rows, (heads, M)."""
        return self._array("lse")[self.sequence]

    def of_sequence(self, name: str) -> Tensor:
        """What the sequence has of positions, which all may have in common."""
        held = self._array(name)
        return held[self.sequence if len(held) > 1 else 0]

    def _problem(self, query: Tensor, key: Tensor, part: HeadSlice | SequenceSlice) -> Problem:
        mask, bias = self._rules
        additive = self.record["score"] == "additive"
        placed = "query_positions" in self.record["arrays"]
        return Problem(
            pairs=AdditivePairs(query, key, self._array("weight"))
            if additive
            else DotPairs(query, key, self.record["scale"]),
            value=key[..., :0],
            mask=None if mask is None else SlicedMask(mask, part),
            bias=None if bias is None else SlicedBias(bias, part),
            softcap=self.record["softcap"],
            query_positions=self.of_sequence("query_positions") if placed else None,
            key_positions=self.of_sequence("key_positions") if placed else None,
        )

    @cached_property
    def _rules(self) -> tuple[Mask | None, Bias | None]:
        mask, bias = self.record["mask"], self.record["bias"]
        return (
            None if mask is None else read_mask(mask, self.arrays),
            None if bias is None else read_bias(bias, self.arrays),
        )

    @property
    def _axes(self) -> RecordAxes:
        return RecordAxes(tuple(self.record["leading"]), self.record["head_axis"], self.record["heads"])

    def _array(self, name: str) -> Tensor:
        return self.arrays[self.record["arrays"][name]]
