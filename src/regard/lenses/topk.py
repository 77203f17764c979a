"""The largest weights of each row, and where they are."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from .. import native
from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Frame, Reduction, Tile, check_memory

GROUP, LANES = 16, 32
"""Of GROUP · LANES columns in a row those that are LANES apart are a group: its largest stands for it at first, since a
row's k largest lie in the k groups that lead, and a maximum takes far less time for a number than a topk does.
"""
HELD = 2**24
"""The most weights that wait at once for their row's largest to be chosen."""
SORTED = 1024
"""The most that native code chooses: it keeps them sorted, which takes time in proportion to how many they are."""


class Top(NamedTuple):
    """weights (..., heads, M, k), the largest first, and the columns that they are in, int64."""

    weights: Tensor
    columns: Tensor


@dataclass(frozen=True)
class TopK:
    """The k largest weights of each row and their columns, from the largest: `Top(weights, columns)`.

    Shapes: both (..., heads, M, k). A row with fewer keys, and so also one where k is more than N, is filled up with
    weight 0 and column -1; a key whose weight is too small for the number format, exactly 0, is none. Of equal weights
    any may come first. Columns are indices of keys, not their positions. Memory: k numbers a row.

    A row that attends to NaN has weights NaN and columns -1. With dropout: the weights before it. Computed without
    autograd.

    Raises:
        ConfigurationError: k is no whole number of at least 1; when used, one that the device has no memory for.

    >>> import torch, regard
    >>> top = regard.lenses.TopK(2)
    >>> q, k = torch.ones(3, 1), torch.tensor([[2.0], [3.0], [1.0]])
    >>> regard.observe(q, k, k, top, mask=regard.masks.causal())[top].columns
    tensor([[ 0, -1],
            [ 1,  0],
            [ 1,  0]])
    """

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool) or self.k < 1:
            raise ConfigurationError(f"TopK needs k as a whole number of at least 1, such as 8; it is {self.k!r}")

    def start(self, problem: Problem) -> _Largest:
        """Begin to look."""
        frame = Frame.of(problem)
        check_memory(
            "TopK of {} weights",
            problem,
            (frame.queries, self.k),
            each=frame.itemsize + torch.int64.itemsize,
            instead="ask for fewer of each row, such as TopK(8)",
        )
        return _Largest(frame, self.k)


class _Largest:
    """The k largest of each row so far, and the weights of the present rows that have not been looked at yet."""

    terms = False

    def __init__(self, frame: Frame, k: int) -> None:
        self.frame, self.k = frame, k
        sizes = frame.batch, frame.heads, frame.queries, k
        self.weights = torch.zeros(sizes, dtype=frame.dtype, device=frame.device)
        self.columns = torch.full(sizes, -1, device=frame.device)
        self.waiting: _Waiting | None = None

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: Tile) -> None:
        if self.waiting is not None and not self.waiting.takes(tile):
            self._choose(self.waiting)
            self.waiting = self.waiting.emptied(tile)
        if self.waiting is None:
            self.waiting = _Waiting(tile)
        self.waiting.add(tile)

    def native(self) -> native.Largest | None:
        """Where they are few enough to be kept sorted."""
        return native.Largest(self.weights, self.columns) if self.k <= SORTED else None

    def finish(self, problem: Problem, lse: Tensor) -> Top:
        if self.waiting is not None:
            self._choose(self.waiting)
        broken = self.frame.broken(lse).unsqueeze(-1)
        none = broken | (self.weights == 0)
        return Top(
            self.frame.shown(self.weights.masked_fill_(broken, math.nan)),
            self.frame.shown(self.columns.masked_fill_(none, -1)),
        )

    def _choose(self, waiting: _Waiting) -> None:
        """Make the k largest so far those of all so far."""
        weights, columns = (of[waiting.batch, :, waiting.rows] for of in (self.weights, self.columns))
        new = waiting.largest_of(self.k)
        largest, at = torch.cat([weights, new.weights], -1).topk(self.k)
        columns.copy_(torch.cat([columns, new.columns], -1).gather(-1, at))
        weights.copy_(largest)


class _Waiting:
    """Weights of some rows, side by side, and the columns that they are of."""

    def __init__(self, tile: Tile) -> None:
        leading, width = tile.weights.shape[:3], tile.weights.shape[3]
        chunk = GROUP * LANES
        most = -(-max(HELD // max(leading.numel(), 1), width) // chunk) * chunk
        self.weights = tile.weights.new_empty(*leading, most)
        self.columns = torch.zeros(most, dtype=torch.long, device=tile.weights.device)
        self.batch, self.rows, self.filled = tile.batch, tile.rows, 0

    def emptied(self, tile: Tile) -> _Waiting | None:
        """The same memory for a new tile, if it fits."""
        if self.weights.shape[:3] != tile.weights.shape[:3] or tile.weights.shape[3] > self.weights.shape[3]:
            return None
        self.batch, self.rows, self.filled = tile.batch, tile.rows, 0
        return self

    def takes(self, tile: Tile) -> bool:
        """Whether a tile is of the same rows, and finds room."""
        same = tile.rows == self.rows and tile.batch == self.batch
        return same and self.filled + tile.weights.shape[3] <= self.weights.shape[3]

    def add(self, tile: Tile) -> None:
        """Put a tile beside what is there."""
        here = slice(self.filled, self.filled + tile.weights.shape[3])
        self.weights[..., here] = tile.weights
        torch.arange(tile.columns.start, tile.columns.stop, out=self.columns[here])
        self.filled = here.stop

    def largest_of(self, k: int) -> Top:
        """The k largest of each row, or all there are."""
        chunks = -(-self.filled // (GROUP * LANES))
        weights = self.weights[..., : chunks * GROUP * LANES]
        weights[..., self.filled :] = 0.0
        if chunks * LANES <= k:
            largest, at = weights.topk(min(k, weights.shape[-1]))
            return Top(largest, self.columns[at])
        groups = weights.unflatten(-1, (chunks, GROUP, LANES)).amax(-2).flatten(-2)  # [b, H, m, chunks · LANES]
        leading = groups.topk(k, sorted=False).indices
        first = leading // LANES * (GROUP * LANES) + leading % LANES
        members = (first.unsqueeze(-1) + LANES * torch.arange(GROUP, device=first.device)).flatten(-2)
        largest, at = weights.gather(-1, members).topk(k)
        return Top(largest, self.columns[members.gather(-1, at)])
