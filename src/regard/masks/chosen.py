"""Chosen keys: indices name the keys, or blocks of keys, that each query or block of queries attends to."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.grid import WHOLE, Blocks, Grid
from ..core.intervals import Ternary, Undecided
from ..core.torch_modes import under_transform
from ..errors import MaskError, ShapeError
from .base import Kept, Mask, Pairs
from .index_checks import checked_count, whole_numbers

NONE = -1
"""The index that names no key."""
TABLE_NUMBERS = 2**20
"""The most numbers of a table by which duplicates are found, of as many rows as it has room for."""


@dataclass(frozen=True, eq=False, repr=False)
class Chosen(Mask):
    """Block (key position // columns) is one of those that `indices` names for block (row // rows) of the queries.

    indices: (..., ⌈M / rows⌉ or 1, K) int32, `NONE` for none; perhaps the same one several times. largest: of them;
    None where their values are not read, as that would wait for a device or end a trace.
    """

    indices: Tensor
    rows: int
    columns: int
    largest: int | None

    @property
    def by_position(self) -> bool:
        return False

    def keep(self, grid: Pairs) -> Kept:
        return self._verdicts(grid) if isinstance(grid, Blocks) else grid.by_pair(self._pairs)

    def lists_of(self, queries: int) -> Tensor:
        """The indices, (..., ⌈M / rows⌉ or 1, K), checked to be those of M queries.

        Raises:
            ShapeError: they are of another number of queries.
        """
        has, wanted = self.indices.shape[-2], -(-queries // self.rows)
        if has not in (1, wanted):
            each = "" if self.rows == 1 else f" in blocks of {self.rows}"
            raise ShapeError(
                f"indices has the shape {tuple(self.indices.shape)}, {has} rows, but there are {queries} queries{each}:"
                f" the axis before the last needs the size {wanted}, or 1"
            )
        return self.indices

    def check_keys(self, positions: Tensor) -> None:
        """Raise a MaskError where an index is beyond all keys; off the CPU and under a transform it names none."""
        if self.largest is None or under_transform() or not positions.is_cpu:
            return
        last = int(positions.max()) if positions.numel() else -1
        if self.largest > last // self.columns:
            block = "" if self.columns == 1 else f" in blocks of {self.columns}"
            keys = f"the last key is at position {last}{block}" if positions.numel() else "there are no keys"
            needs = f"numbers from 0 to {last // self.columns}, or {NONE}" if positions.numel() else f"{NONE}"
            raise MaskError(f"{self!r} names {self.largest}, but {keys}: indices needs {needs} for none")

    def _pairs(self, grid: Grid) -> Tensor:
        """Which pairs of a grid exist, (..., m, n)."""
        self.check_keys(grid.key_positions)
        chosen = self._of_rows(grid)
        blocks = grid.key // self.columns
        if not blocks.shape[-1] or not chosen.shape[-1]:
            return torch.zeros(*chosen.shape[:-1], blocks.shape[-1], dtype=torch.bool, device=grid.device)
        if blocks.ndim == 2 and blocks.is_cpu and _rise_by_one(grid.key):  # elsewhere it would wait for the device
            return _marked(chosen, blocks[0])
        return _found(chosen.long(), blocks)

    def _of_rows(self, grid: Grid) -> Tensor:
        """The indices of the rows of a grid, (..., m or 1, K)."""
        indices = self.lists_of(grid.query_positions.shape[-1]).to(grid.device)
        if indices.shape[-2] == 1:
            return indices
        if self.rows == 1:
            return indices[..., grid.rows, :]
        rows = torch.arange(grid.query_positions.shape[-1], device=grid.device)[grid.rows]
        return indices.index_select(-2, rows // self.rows)

    def _verdicts(self, blocks: Blocks) -> Ternary:
        """Tiles with none, some or all of their pairs, by counting the pairs that are named; O(indices + tiles)."""
        grid = blocks.grid
        blocks.cut(torch.zeros(1, 1, device=grid.device))  # undecided of queries that are not those of this call
        queries, keys = grid.shape
        key = grid.key
        if grid.rows != WHOLE or grid.columns != WHOLE or key.ndim > 2 or not keys or not _rise_by_one(key):
            raise Undecided("the pairs of some rows and columns, or keys in any order")
        self.check_keys(grid.key_positions)
        first, (down, across) = int(key[0, 0]), blocks.shape
        height, width = math.gcd(self.rows, blocks.rows), math.gcd(self.columns, blocks.columns, first)
        # The indices of rows and columns so few that each of their blocks lies in one tile.
        rows, columns = -(-queries // height), self.columns // width
        distinct = without_duplicates(self.lists_of(queries).to(grid.device), self.largest)
        named = distinct.long().unsqueeze(-1) * columns + torch.arange(columns, device=grid.device)
        named = named.masked_fill((distinct == NONE).unsqueeze(-1), first // width - 1).flatten(-2) - first // width
        if named.shape[-2] == 1:
            named = named.expand(*named.shape[:-2], rows, -1)
        elif self.rows > height:
            named = named.repeat_interleave(self.rows // height, -2)[..., :rows, :]
        starts = named * width
        size = (keys - starts).clamp(0, width) * (starts >= 0)
        lines = torch.arange(rows, device=grid.device) * height
        size = size * (queries - lines).clamp(max=height).unsqueeze(-1)
        tile = (lines // blocks.rows * across).unsqueeze(-1) + (starts // blocks.columns).clamp(0, across - 1)
        counts = torch.zeros(*named.shape[:-2], down * across, dtype=torch.int64, device=grid.device)
        counts = counts.scatter_add_(-1, tile.flatten(-2), size.flatten(-2)).unflatten(-1, (down, across))
        return Ternary.between(counts == blocks.areas, counts > 0)

    def __repr__(self) -> str:
        shape = tuple(self.indices.shape)
        if self.columns == 1:
            return f"chosen(<{shape}>{f', block={self.rows}' if self.rows > 1 else ''})"
        size = self.columns if self.rows == self.columns else (self.rows, self.columns)
        return f"blocks(<{shape}>, {size})"


def chosen(indices: Tensor, *, block: int = 1) -> Mask:
    """Pairs of query i and the keys at the positions `indices[..., i, :]`: a list of keys for each query.

    Alone, or joined by `&` with masks whose rows are spans of keys (causal, window, padding), it is computed by
    gathering the keys that are named, in time proportional to them. A key that is named several times counts once, and
    -1 names none; a query without a key has output 0. Where a list is longer than the keys that a causal query has, as
    of the k largest scores, `causal() & chosen(indices)` leaves the later ones out.

    Shapes: indices (..., M, K), whole numbers; with `block` (..., ⌈M / block⌉, K), a list for each block of so many
    consecutive queries. Leading axes broadcast to those of the weights, (..., heads, M, N): lists of a batch that all
    heads share are (batch, 1, M, K). In place of the heads there may be the key heads: then the query heads of a group
    share a list, and the keys that it names are read once for all of them. 1 in place of M is one list for all queries.

    Rows are those of the call, as in `where`: query i has row i, wherever it is. A copy is made, which sees no later
    write.

    DeepSeek Sparse Attention (DeepSeek-V3.2, 2025) chooses keys so, for each query.

    Raises:
        MaskError: indices is no tensor of whole numbers with two axes or more, or one of them is below -1; at
            evaluation, one is beyond the last key (on the CPU), or the axis before the last is not of the queries.

    >>> import torch
    >>> from regard import masks
    >>> masks.chosen(torch.tensor([[0, 0, -1], [1, 0, 0], [0, 2, 2]])).dense(3, 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    return _checked("chosen", "indices", indices, checked_count("chosen's block", block, least=1), 1)


def blocks(chosen: Tensor, size: int | tuple[int, int]) -> Mask:
    """Pairs of blocks: each block of queries attends to the blocks of keys that `chosen` names.

    size: the rows and columns of a block, or one number for both, as of `Mask.tiles`; (1, 64) chooses blocks of 64 keys
    for each query. Block b has the keys at the positions b · columns to (b + 1) · columns - 1. Blocks of 64 and more
    rows and columns are computed tile by tile, others as `chosen` is.

    Shapes: chosen (..., ⌈M / rows⌉, K), whole numbers; leading axes, -1 and duplicates as of `masks.chosen`.

    Blocks that a gate chooses for each query are MoBA (Lu et al. 2025, arXiv 2502.13189) and the selected branch of NSA
    (Yuan et al. 2025, arXiv 2502.11089).

    Raises:
        MaskError: as `masks.chosen`; size is not one or two whole numbers of at least 1.

    >>> import torch
    >>> from regard import masks
    >>> masks.blocks(torch.tensor([[0], [1]]), 2).dense(4, 4).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 0, 0],
            [0, 0, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """
    sizes = size if isinstance(size, tuple) else (size, size)
    if len(sizes) != 2:
        raise MaskError(f"blocks' size is {size!r}; it needs rows and columns, or one number for both: (1, 64) or 64")
    rows, columns = (checked_count("blocks' size", number, least=1) for number in sizes)
    return _checked("blocks", "chosen", chosen, rows, columns)


def _checked(mask: str, name: str, indices: Tensor, rows: int, columns: int) -> Chosen:
    indices = whole_numbers(mask, name, indices)
    if indices.ndim < 2:
        axes = "M" if rows == 1 else f"⌈M / {rows}⌉"
        raise MaskError(f"{mask} needs {name} of shape (..., {axes}, K); it has the shape {tuple(indices.shape)}")
    low, high, most = NONE, None, (2**31 - 1) // columns - 1
    if indices.is_cpu and not under_transform():
        low, high = (int(end) for end in indices.aminmax()) if indices.numel() else (NONE, NONE)
    if low < NONE or (high is not None and high > most):
        least = f"the smallest is {low}" if low < NONE else f"the largest is {high}, of blocks of {columns}"
        raise MaskError(f"{mask} needs {name} from 0 to the last key's number, and {NONE} for none; {least}")
    return Chosen(indices.to(torch.int32, copy=True).contiguous(), rows, columns, high)


def without_duplicates(indices: Tensor, largest: int | None) -> Tensor:
    """Indices (..., K) with NONE in place of all but one of those that are the same in a row.

    >>> import torch
    >>> without_duplicates(torch.tensor([[1, 1, -1], [0, 2, 0]]), 2).sort(-1).values
    tensor([[-1, -1,  1],
            [-1,  0,  2]])
    """
    *leading, length = indices.shape
    if length < 2 or not indices.numel():
        return indices
    flat = indices.reshape(-1, length)
    if largest is None or not indices.is_cpu or under_transform() or largest >= TABLE_NUMBERS:
        order = flat.sort(-1)
        again = torch.zeros_like(order.values, dtype=torch.bool)
        again[:, 1:] = order.values[:, 1:] == order.values[:, :-1]
        return flat.masked_fill(torch.zeros_like(again).scatter(-1, order.indices, again), NONE).view(*leading, length)
    height, place = TABLE_NUMBERS // (largest + 2), torch.arange(length, dtype=torch.int32, device=indices.device)
    table, distinct = place.new_empty(min(max(height, 1), len(flat)), largest + 2), torch.empty_like(flat)
    for start in range(0, len(flat), len(table)):
        some = flat[start : start + len(table)]
        at = some.long() + 1
        # Of equal numbers the last that is written stands in the table: the others find another place than their own.
        found = table[: len(some)].scatter_(-1, at, place.expand_as(some)).gather(-1, at)
        distinct[start : start + len(table)] = torch.where(found == place, some, NONE)
    return distinct.view(*leading, length)


def _rise_by_one(positions: Tensor) -> bool:
    """Whether positions (1, n) are known to be n consecutive ones."""
    if under_transform() or positions.ndim != 2:
        return False
    return not positions.shape[-1] or bool((positions[:, 1:] - positions[:, :-1] == 1).all())


def _marked(chosen: Tensor, blocks: Tensor) -> Tensor:
    """Which keys of consecutive positions, in these blocks (n,), are in one of the chosen blocks of each row."""
    first, count = blocks[0], int(blocks[-1] - blocks[0]) + 1
    inside = (chosen >= first) & (chosen < first + count) & (chosen != NONE)
    table = torch.zeros(*chosen.shape[:-1], count + 1, dtype=torch.bool, device=chosen.device)
    table = table.scatter_(-1, torch.where(inside, chosen - first, count), True)[..., :count]
    return table if count == len(blocks) else table.index_select(-1, blocks - first)


def _found(chosen: Tensor, blocks: Tensor) -> Tensor:
    """Which keys, in blocks (..., 1, n), are in one of the chosen blocks (..., m or 1, K) of each row."""
    if torch.compiler.is_compiling():  # graphs that are exported have no operator for a search
        return (chosen.unsqueeze(-1) == blocks.unsqueeze(-2)).any(-2) & (blocks >= 0)
    leading = broadcast_shapes(chosen.shape[:-1], blocks.shape[:-1])
    chosen = chosen.sort(-1).values.expand(*leading, -1).contiguous()
    blocks = blocks.expand(*leading, -1).contiguous()
    at = torch.searchsorted(chosen, blocks).clamp(max=chosen.shape[-1] - 1)
    return (chosen.gather(-1, at) == blocks) & (blocks >= 0)
