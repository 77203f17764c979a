"""One pair at a time: a mask's formula asked by indices, as FlexAttention asks a mask_mod."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from ...tiles import Grid
from .tensors import four_axes

Indices: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # batch, head, row and column


@dataclass(frozen=True, eq=False)
class Table:
    """Values over some of batch, heads, rows and columns; it has no axis for those that they are the same for."""

    values: Tensor
    axes: tuple[int, ...]

    @classmethod
    def of(cls, pairs: Tensor) -> Table:
        """A tensor that broadcasts over (batch, heads, M, N), without its axes of size 1."""
        four = four_axes("FlexAttention", pairs)
        axes = tuple(axis for axis, size in enumerate(four.shape) if size != 1)
        return cls(four.reshape([four.shape[axis] for axis in axes]), axes)

    def at(self, indices: Indices) -> Tensor:
        """The value for one pair."""
        return self.values[tuple(indices[axis] for axis in self.axes)] if self.axes else self.values


@dataclass(frozen=True, eq=False)
class Asked(ABC):
    """A grid whose every answer passes through `_answer`, which is told how the whole grid would come to it."""

    grid: Grid

    @abstractmethod
    def _answer(self, whole: Callable[[], Tensor]) -> Tensor: ...

    @property
    def heads(self) -> bool:
        """There is an index for the head."""
        return True

    @property
    def device(self) -> torch.device:
        """Where the positions are."""
        return self.grid.device

    @property
    def query(self) -> Tensor:
        """Positions of the queries."""
        return self._answer(lambda: self.grid.query)

    @property
    def key(self) -> Tensor:
        """Positions of the keys."""
        return self._answer(lambda: self.grid.key)

    def by_query(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function says of the positions of the queries."""
        return self._answer(lambda: self.grid.by_query(function))

    def by_key(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """What a function says of the positions of the keys."""
        return self._answer(lambda: self.grid.by_key(function))

    def by_head(self, heads: int) -> Tensor:
        """The numbers of the heads."""
        return self._answer(lambda: self.grid.by_head(heads))

    def per_batch(self, pairs: Tensor) -> Tensor:
        """What is told for each of the batch."""
        return self._answer(lambda: self.grid.per_batch(pairs))

    def cut(self, pairs: Tensor) -> Tensor:
        """A tensor over all pairs."""
        return self._answer(lambda: self.grid.cut(pairs))


@dataclass(frozen=True, eq=False)
class First(Asked):
    """The first pair, which keeps all that the formula asks about the others, in the order in which it asks."""

    tables: list[Table] = field(default_factory=list)

    def _answer(self, whole: Callable[[], Tensor]) -> Tensor:
        pairs = whole()
        self.tables.append(Table.of(pairs))
        return pairs[..., :1, :1]


@dataclass(frozen=True, eq=False)
class Pair(Asked):
    """Any one pair: the same formula asks the same in the same order, and is answered from what was kept.

    The answers have no axes. They are look-ups and nothing else, so that the indices may be mapped over or compiled.
    """

    tables: Iterator[Table]
    indices: Indices

    def _answer(self, whole: Callable[[], Tensor]) -> Tensor:
        return next(self.tables).at(self.indices)
