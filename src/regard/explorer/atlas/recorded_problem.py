"""Rebuild `Problem`s of one head or one sequence from a memory-mapped record."""

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
from ...core.normalizer import Normalizer
from ...core.problem import Problem
from ...core.score_forms import AdditivePairs, DecayedDotPairs, DotPairs, PairForm
from ...errors import AtlasError, ConfigurationError
from ...masks import Mask
from ...masks.base import Kept, Pairs
from .mask_json import read_bias, read_mask
from .normalizer_json import read_normalizer


class RecordErrors:
    """Context manager that turns any error in evaluating a record's mask or bias into an AtlasError."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, AtlasError) or not isinstance(error, Exception):
            return
        if isinstance(error, ConfigurationError) and error.__cause__ is None:  # else a formula that failed
            raise AtlasError(str(error)) from None
        raise AtlasError(
            f"the mask, bias or positions that the atlas has of {self.name!r} do not fit: {error}"
        ) from None


@dataclass(frozen=True, slots=True)
class RecordAxes:
    """Batch and head axes that a record's mask and bias broadcast to."""

    leading: tuple[int, ...]
    has_heads: bool
    heads: int

    def grid(self, grid: Any) -> Any:
        """The same grid with the head axis of the record."""
        if not isinstance(grid, Grid):
            return replace(grid, grid=replace(grid.grid, heads=self.has_heads))
        return replace(grid, heads=self.has_heads)

    def select(self, tensor: Tensor, sequence: int) -> Tensor:
        """Select one sequence of (B, heads, ...): (1, heads, ...), or (1, ...) without a head axis."""
        return tensor[sequence : sequence + 1] if self.has_heads else tensor[sequence]


@dataclass(frozen=True, slots=True)
class HeadSlice:
    """Selects one head of one sequence from a mask or bias."""

    axes: RecordAxes
    sequence: int
    head: int

    def select_parameters(self, normalizer: Normalizer) -> Normalizer:
        """The normalizer with the numbers of the head."""
        return normalizer.of_head(self.head)

    def select(self, pairs: Tensor) -> Tensor:
        """Select from (..., m, n): (m, n)."""
        leading = self.axes.leading
        index = self.sequence * self.axes.heads + self.head if self.axes.has_heads else self.sequence
        pairs = pairs.expand(*leading, *pairs.shape[-2:])
        return pairs[tuple(int(at) for at in np.unravel_index(index, leading))] if leading else pairs


@dataclass(frozen=True, slots=True)
class SequenceSlice:
    """Selects all heads of one sequence from a mask or bias."""

    axes: RecordAxes
    sequence: int

    def select_parameters(self, normalizer: Normalizer) -> Normalizer:
        """The normalizer itself, of all heads."""
        return normalizer

    def select(self, pairs: Tensor) -> Tensor:
        """Select from (..., m, n): (heads or 1, m, n), or (m, n) where heads share it."""
        leading, has_heads = self.axes.leading, self.axes.has_heads
        batch = leading[:-1] if has_heads else leading
        if pairs.ndim <= 2 + has_heads:
            return pairs
        pairs = pairs[(None,) * (len(leading) + 2 - pairs.ndim)]
        at = zip(np.unravel_index(self.sequence, batch), pairs.shape, strict=False)
        return pairs[tuple(int(place) if size > 1 else 0 for place, size in at)]


@dataclass(frozen=True, eq=False)
class SlicedMask(Mask):
    """A record's mask, sliced to one head or one sequence."""

    mask: Mask
    part: HeadSlice | SequenceSlice

    @property
    def by_position(self) -> bool:
        return False

    def keep(self, grid: Pairs) -> Kept:
        kept = self.mask.evaluate(self.part.axes.grid(grid))
        return Ternary(self.part.select(kept.verdicts)) if isinstance(kept, Ternary) else self.part.select(kept)


@dataclass(frozen=True, eq=False)
class SlicedBias(Bias):
    """A record's bias, sliced to one head or one sequence."""

    bias: Bias
    part: HeadSlice | SequenceSlice

    def values(self, grid: Grid) -> Tensor:
        return self.part.select(self.bias.values(self.part.axes.grid(grid)))


@dataclass(frozen=True, eq=False)
class RecordedProblem:
    """Builds `Problem`s of one sequence from a record's stored queries and keys."""

    record: Mapping[str, Any]
    arrays: Mapping[str, Tensor]
    sequence: int

    def head(self, head: int) -> Problem:
        """The problem of one head over all rows and columns."""
        group = self.record["heads"] // self.record["key_heads"]
        return self._problem(
            self._array("query")[self.sequence, head],
            self._array("key")[self.sequence, head // group],
            HeadSlice(self._axes, self.sequence, head),
        )

    def whole(self) -> Problem:
        """The problem of all heads."""
        return self._problem(
            self._axes.select(self._array("query"), self.sequence),
            self._axes.select(self._array("key"), self.sequence),
            SequenceSlice(self._axes, self.sequence),
        )

    @property
    def lse(self) -> Tensor:
        """The log-sum-exp of the rows, (heads, M)."""
        return self._array("lse")[self.sequence]

    def sequence_positions(self, name: str) -> Tensor:
        """The positions of the sequence, which all sequences may share."""
        held = self._array(name)
        return held[self.sequence if len(held) > 1 else 0]

    def _problem(self, query: Tensor, key: Tensor, part: HeadSlice | SequenceSlice) -> Problem:
        mask, bias = self._rules
        placed = "query_positions" in self.record["arrays"]
        return Problem(
            pairs=self._pairs(query, key),
            value=key[..., :0],
            mask=None if mask is None else SlicedMask(mask, part),
            bias=None if bias is None else SlicedBias(bias, part),
            softcap=self.record["softcap"],
            normalizer=None if self._normalizer is None else part.select_parameters(self._normalizer),
            query_positions=self.sequence_positions("query_positions") if placed else None,
            key_positions=self.sequence_positions("key_positions") if placed else None,
        )

    def _pairs(self, query: Tensor, key: Tensor) -> PairForm:
        match self.record["score"]:
            case "additive":
                return AdditivePairs(query, key, self._array("weight"))
            case "decayed dot":
                return DecayedDotPairs(query, key, self.record["features"])
            case _:
                return DotPairs(query, key, self.record["scale"])

    @cached_property
    def _rules(self) -> tuple[Mask | None, Bias | None]:
        mask, bias = self.record["mask"], self.record["bias"]
        return (
            None if mask is None else read_mask(mask, self.arrays),
            None if bias is None else read_bias(bias, self.arrays),
        )

    @cached_property
    def _normalizer(self) -> Normalizer | None:
        return read_normalizer(self.record, self.arrays)

    @property
    def _axes(self) -> RecordAxes:
        return RecordAxes(tuple(self.record["leading"]), self.record["head_axis"], self.record["heads"])

    def _array(self, name: str) -> Tensor:
        return self.arrays[self.record["arrays"][name]]
