"""The largest weights of each row, and their columns."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError
from .base import Reduction, RowShard, WeightsLayout, WeightTile, check_memory
from .forms import LargestWeights

GROUP, LANES = 16, 32
"""Of GROUP · LANES consecutive columns, those that are LANES apart form a group. A row's k largest weights lie in the k
groups with the largest maxima, and a maximum takes far less time per number than a topk.
"""
BUFFERED = 2**24
"""The most weights that are collected before a topk over them."""
MOST_NATIVE = 1024
"""The largest k of the C code: it inserts into a sorted list, in time proportional to k."""


class TopKResult(NamedTuple):
    """weights (..., heads, M, k), the largest first, and the columns that they are in, int64."""

    weights: Tensor
    columns: Tensor


@dataclass(frozen=True)
class TopK:
    """The k largest weights of each row and their columns, from the largest: `TopKResult(weights, columns)`.

    Shapes: both (..., heads, M, k). A row with fewer than k keys is padded with weight 0 and column -1, also where
    k > N; a key whose weight underflows to 0 counts as padding. Of equal weights any may come first. Columns are
    indices of keys, not their positions. Memory: k numbers a row.

    A row that attends to NaN has weights NaN and columns -1. Dropout is not applied. No autograd.

    Raises:
        ConfigurationError: k is no whole number of at least 1; when it starts, one that the device has no memory for.

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

    def start(self, problem: Problem) -> _TopKState:
        """The state of one run."""
        layout = WeightsLayout.from_problem(problem)
        check_memory(
            "TopK of {} weights",
            problem,
            (layout.queries, self.k),
            itemsize=layout.result_itemsize + torch.int64.itemsize,
            advice="ask for fewer of each row, such as TopK(8)",
        )
        return _TopKState(layout, self.k)

    def start_shard(self, problem: Problem, shard: RowShard) -> _TopKState:
        """The state of one run over the rows of one process."""
        return self.start(problem)


class _TopKState:
    """The k largest of each row so far, and a buffer of tiles of the current rows that are still to be merged."""

    needs_entropy_terms = False

    def __init__(self, layout: WeightsLayout, k: int) -> None:
        self.layout, self.k = layout, k
        sizes = layout.batch, layout.heads, layout.queries, k
        self.weights = torch.zeros(sizes, dtype=layout.dtype, device=layout.device)
        self.columns = torch.full(sizes, -1, device=layout.device)
        self.buffer: _TileBuffer | None = None

    @property
    def reductions(self) -> tuple[Reduction]:
        return (self,)

    def add(self, tile: WeightTile) -> None:
        if self.buffer is not None and not self.buffer.fits(tile):
            self._merge(self.buffer)
            self.buffer = self.buffer.reused_for(tile)
        if self.buffer is None:
            self.buffer = _TileBuffer(tile)
        self.buffer.add(tile)

    def native(self) -> LargestWeights | None:
        """Supported up to k = MOST_NATIVE."""
        return LargestWeights(self.weights, self.columns) if self.k <= MOST_NATIVE else None

    def finish(self, problem: Problem, lse: Tensor) -> TopKResult:
        if self.buffer is not None:
            self._merge(self.buffer)
        broken = self.layout.nan_rows(lse).unsqueeze(-1)
        none = broken | (self.weights == 0)
        return TopKResult(
            self.layout.to_result(self.weights.masked_fill_(broken, math.nan)),
            self.layout.to_result(self.columns.masked_fill_(none, -1)),
        )

    def _merge(self, buffer: _TileBuffer) -> None:
        """Merge the k largest of the buffer into the k largest so far."""
        weights, columns = (tensor[buffer.batch, :, buffer.rows] for tensor in (self.weights, self.columns))
        new = buffer.topk(self.k)
        largest, places = torch.cat([weights, new.weights], -1).topk(self.k)
        columns.copy_(torch.cat([columns, new.columns], -1).gather(-1, places))
        weights.copy_(largest)


class _TileBuffer:
    """Tiles of the same rows, side by side, and the columns of their weights."""

    def __init__(self, tile: WeightTile) -> None:
        leading, width = tile.weights.shape[:3], tile.weights.shape[3]
        chunk = GROUP * LANES
        most = -(-max(BUFFERED // max(leading.numel(), 1), width) // chunk) * chunk
        self.weights = tile.weights.new_empty(*leading, most)
        self.columns = torch.zeros(most, dtype=torch.long, device=tile.weights.device)
        self.batch, self.rows, self.filled = tile.batch, tile.rows, 0

    def reused_for(self, tile: WeightTile) -> _TileBuffer | None:
        """The emptied buffer for the rows of a new tile; None where its memory is of another size."""
        if self.weights.shape[:3] != tile.weights.shape[:3] or tile.weights.shape[3] > self.weights.shape[3]:
            return None
        self.batch, self.rows, self.filled = tile.batch, tile.rows, 0
        return self

    def fits(self, tile: WeightTile) -> bool:
        """Whether a tile has the same rows, and there is room for it."""
        same = tile.rows == self.rows and tile.batch == self.batch
        return same and self.filled + tile.weights.shape[3] <= self.weights.shape[3]

    def add(self, tile: WeightTile) -> None:
        """Append a tile."""
        here = slice(self.filled, self.filled + tile.weights.shape[3])
        self.weights[..., here] = tile.weights
        step, into = tile.columns.step or 1, self.columns[here]
        torch.arange(tile.columns.start, tile.columns.stop, step, out=into, device=into.device)
        self.filled = here.stop

    def topk(self, k: int) -> TopKResult:
        """The k largest of each row, or all where there are fewer."""
        chunks = -(-self.filled // (GROUP * LANES))
        weights = self.weights[..., : chunks * GROUP * LANES]
        weights[..., self.filled :] = 0.0
        if chunks * LANES <= k:
            largest, places = weights.topk(min(k, weights.shape[-1]))
            return TopKResult(largest, self.columns[places])
        groups = weights.unflatten(-1, (chunks, GROUP, LANES)).amax(-2).flatten(-2)  # [b, H, m, chunks · LANES]
        leading = groups.topk(k, sorted=False).indices
        first = leading // LANES * (GROUP * LANES) + leading % LANES
        members = (first.unsqueeze(-1) + LANES * torch.arange(GROUP, device=first.device)).flatten(-2)
        largest, places = weights.gather(-1, members).topk(k)
        return TopKResult(largest, self.columns[members.gather(-1, places)])
