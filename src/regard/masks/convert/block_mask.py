"""Conversion between masks and FlexAttention's mask_mod and BlockMask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from ...core.grid import Blocks, Grid
from ...core.intervals import FULL, PARTIAL, look_up
from ...core.tensor_memo import copy_on
from ...core.torch_modes import under_transform
from ...errors import MaskError
from ..base import Kept, Mask, Pairs, as_mask
from ..index_checks import head_indices
from ..mask_mod import MaskMod, from_mod
from .torch_tensors import four_axes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

Indices: TypeAlias = tuple[Tensor, Tensor, Tensor, Tensor]  # batch, head, row and column


@dataclass(frozen=True, eq=False)
class IndexedTable:
    """Values over some of batch, heads, rows and columns, without the axes along which they are constant."""

    values: Tensor
    axes: tuple[int, ...]

    @classmethod
    def from_4d(cls, four: Tensor) -> IndexedTable:
        """A tensor (batch | 1, heads | 1, M | 1, N | 1) without its axes of size 1."""
        axes = tuple(axis for axis, size in enumerate(four.shape) if size != 1)
        return cls(four.reshape([four.shape[axis] for axis in axes]), axes)

    def lookup(self, indices: Indices) -> Tensor:
        """The value for one pair."""
        return self.values[tuple(indices[axis] for axis in self.axes)] if self.axes else self.values


@dataclass(frozen=True, eq=False)
class TabledGrid(ABC):
    """A grid that passes each of its tensors through `_replace`, so that a mask's formula can be turned into tables.

    A formula queries its grid for the same tensors in the same order each time: `TableRecorder` stores them as tables,
    `TableReader` looks single pairs up in these.
    """

    grid: Grid

    @abstractmethod
    def _replace(self, whole: Callable[[], Tensor]) -> Tensor:
        """The replacement of `whole()`, the tensor over the whole grid, in a mask's formula."""

    @property
    def heads(self) -> bool:
        """Whether the weights have a head axis."""
        return self.grid.heads

    @property
    def device(self) -> torch.device:
        """The device of the positions."""
        return self.grid.device

    @property
    def query(self) -> Tensor:
        """Positions of the queries."""
        return self._replace(lambda: self.grid.query)

    @property
    def key(self) -> Tensor:
        """Positions of the keys."""
        return self._replace(lambda: self.grid.key)

    def by_query(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Tensor:
        """A function of the positions of the queries."""
        return self._replace(lambda: self.grid.by_query(function, per_head=per_head))

    def by_key(self, function: Callable[[Tensor], Tensor], *, per_head: bool = False) -> Tensor:
        """A function of the positions of the keys."""
        return self._replace(lambda: self.grid.by_key(function, per_head=per_head))

    def by_head(self, heads: int) -> Tensor:
        """The indices of the heads."""
        return self._replace(lambda: self.grid.by_head(heads))

    def per_batch(self, pairs: Tensor) -> Tensor:
        """A tensor with one entry per batch row."""
        return self._replace(lambda: self.grid.per_batch(pairs))

    def by_pair(self, function: Callable[[Grid], Tensor]) -> Tensor:
        """A function of the pairs, as a table over all of them."""
        return self._replace(lambda: self.grid.by_pair(function))

    def cut(self, pairs: Tensor) -> Tensor:
        """A tensor over all pairs."""
        return self._replace(lambda: self.grid.cut(pairs))


def _as_4d(pairs: Tensor) -> Tensor:
    return four_axes("FlexAttention", pairs)


@dataclass(frozen=True, eq=False)
class TableRecorder(TabledGrid):
    """The first pair of a grid; records the tables that the formula queries, in order.

    as_4d: a tensor over pairs as (batch | 1, heads | 1, M | 1, N | 1), by default one with at most these axes.
    """

    tables: list[IndexedTable] = field(default_factory=list)
    as_4d: Callable[[Tensor], Tensor] = _as_4d

    def _replace(self, whole: Callable[[], Tensor]) -> Tensor:
        pairs = whole()
        self.tables.append(IndexedTable.from_4d(self.as_4d(pairs)))
        return pairs[..., :1, :1]


@dataclass(frozen=True, eq=False)
class TableReader(TabledGrid):
    """A single pair of a grid, selected by its indices, whose tensors are read from recorded tables.

    Its tensors have no axes. They are look-ups and nothing else, so that the indices may be mapped over or compiled.
    """

    tables: Iterator[IndexedTable]
    indices: Indices

    def _replace(self, whole: Callable[[], Tensor]) -> Tensor:
        return next(self.tables).lookup(self.indices)


def to_mask_mod(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    query_positions: Tensor | range | None = None,
    key_positions: Tensor | range | None = None,
    device: torch.device | None = None,
) -> MaskMod:
    """The mask as a mask_mod(b, h, q_idx, kv_idx) of FlexAttention, for M queries and N keys.

    FlexAttention passes row and column indices from 0; the function maps them to positions, by default 0..N-1 for keys
    and the last M of these for queries. So with `causal()` the last query attends to all keys, also for M < N.

    The function reads tables of size O(M + N), and the tensors that the mask holds. It takes single indices or
    tensors of them that broadcast; torch may map it, as `create_block_mask` does, or compile it.

    Raises:
        MaskError: a mask with more than one batch axis.

    Source: Dong et al. 2024, arXiv 2412.05496.

    >>> from regard import masks
    >>> last = torch.tensor(1)
    >>> masks.to_mask_mod(masks.causal(), 2, 6)(None, None, last, torch.arange(6))
    tensor([True, True, True, True, True, True])
    """
    grid = Grid.from_lengths(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
    recorder = TableRecorder(grid)
    _evaluate(as_mask(mask), recorder)
    return mask_mod_of_tables(mask, grid, recorder.tables)


def to_block_mask(
    mask: Mask,
    queries: int,
    keys: int,
    size: int | tuple[int, int] = 128,
    *,
    query_positions: Tensor | range | None = None,
    key_positions: Tensor | range | None = None,
    device: torch.device | None = None,
) -> BlockMask:
    """The mask as a BlockMask of FlexAttention, computed from `mask.tiles` without a tensor over all pairs.

    FULL tiles become full blocks, PARTIAL ones blocks with `to_mask_mod(mask)`; `size` is the rows and columns of a
    block, or one number for both. The axes of batch and heads have size 1, which broadcasts, unless the mask depends
    on them. As in torch, a block that extends past the end is never full.

    If interval arithmetic decides every tile, the blocks are those of `create_block_mask`; otherwise there are more,
    and FlexAttention computes the same result with more work.

    Raises:
        MaskError: a mask with more than one batch axis.
        ShapeError: a size that is not a whole number of at least 1.

    >>> from regard import masks
    >>> masks.to_block_mask(masks.causal() & masks.window(before=255), 512, 512).to_dense()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [1, 1, 1, 0],
              [0, 1, 1, 1]]]], dtype=torch.int32)
    """
    grid = Grid.from_lengths(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
    recorder = TableRecorder(grid)
    leading = _as_4d(_evaluate(as_mask(mask), recorder)).shape[:2]
    blocks = Blocks.from_grid(grid, size)
    lists = BlockLists.from_verdicts(_as_4d(mask.verdicts(blocks)).expand(*leading, -1, -1), blocks)
    return lists.block_mask(mask_mod_of_tables(mask, grid, recorder.tables))


@dataclass(frozen=True, eq=False)
class BlockLists:
    """The tensors of a BlockMask: its partial and its full blocks, listed by row (kv) and by column (q).

    Each is a pair of int32 tensors: the number of blocks (batch | 1, heads | 1, rows), and their columns (..., rows,
    columns), of which the first ones count.
    """

    kv: tuple[Tensor, Tensor]
    full_kv: tuple[Tensor, Tensor]
    q: tuple[Tensor, Tensor]
    full_q: tuple[Tensor, Tensor]
    size: tuple[int, int]
    lengths: tuple[int, int]

    @classmethod
    def from_verdicts(cls, verdicts: Tensor, blocks: Blocks) -> BlockLists:
        """The lists of the verdicts (batch | 1, heads | 1, rows, columns) on blocks.

        As in torch, a block that extends past the end is never full.
        """
        whole = blocks.areas == blocks.rows * blocks.columns
        full, partial = (verdicts == FULL) & whole, (verdicts == PARTIAL) | ((verdicts == FULL) & ~whole)
        lists = (_to_kv_blocks(each) for each in (partial, full, partial.mT, full.mT))
        return cls(*lists, size=(blocks.rows, blocks.columns), lengths=blocks.grid.shape)

    def block_mask(self, mask_mod: MaskMod) -> BlockMask:
        """A BlockMask of these blocks; mask_mod is evaluated in the partial ones."""
        from torch.nn.attention.flex_attention import BlockMask  # imports torch's compiler, which few need

        return BlockMask(
            self.lengths, *self.kv, *self.full_kv, *self.q, *self.full_q, BLOCK_SIZE=self.size, mask_mod=mask_mod
        )


def mask_mod_of_tables(mask: Mask, grid: Grid, tables: Sequence[IndexedTable]) -> MaskMod:
    """The mask as a mask_mod that reads the tables which a `TableRecorder` of the same grid has recorded."""

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return _evaluate(mask, TableReader(grid, iter(tables), (b, h, q_idx, kv_idx)))

    return mask_mod


def record_tables(mask: Mask, grid: Grid, as_4d: Callable[[Tensor], Tensor]) -> list[IndexedTable]:
    """The tables that `mask_mod_of_tables` needs; `as_4d` as in `TableRecorder`."""
    recorder = TableRecorder(grid, as_4d=as_4d)
    _evaluate(mask, recorder)
    return recorder.tables


def _evaluate(mask: Mask, grid: TabledGrid) -> Tensor:
    return mask.evaluate(grid)  # type: ignore[call-overload]  # has what a formula asks of a Grid


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask of a BlockMask: all pairs of its full blocks, and the pairs of its other blocks where mask_mod is True.

    Rows and columns become positions: keys are at 0..N-1 and queries at the last M of these, which is the default of
    `attention`; leave `query_positions` out. A batch or head axis of size 1 broadcasts, and mask_mod is evaluated with
    index 0.

    Raises:
        MaskError: not a BlockMask; a slice of one; at evaluation, a position outside it, or a mask_mod that fails.

    >>> from torch.nn.attention.flex_attention import create_block_mask
    >>> from regard import masks
    >>> block_mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 3, 3, device="cpu")
    >>> masks.from_block_mask(block_mask).dense(3, 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        raise MaskError(
            f"from_block_mask needs a BlockMask of FlexAttention; this is a {type(block_mask).__name__}. A mask_mod "
            "goes to masks.from_mod"
        )
    lengths, size = block_mask.seq_lengths, block_mask.BLOCK_SIZE
    _refuse_slice(block_mask)
    partial = _from_kv_blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    kept = BlockLayout(partial, lengths, size) & _mask_of_positions(block_mask.mask_mod, partial.shape, lengths)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return kept
    full = _from_kv_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return BlockLayout(full, lengths, size) | kept


def _refuse_slice(block_mask: BlockMask) -> None:
    """Raise a MaskError for a BlockMask that was made by [...]: it keeps its lengths, but not its mask_mod."""
    queries, rows = block_mask.seq_lengths[0], block_mask.kv_num_blocks.shape[-1]
    needed = -(-queries // block_mask.BLOCK_SIZE[0])
    if rows != needed:
        raise MaskError(
            f"this BlockMask has {rows} of the {needed} rows of blocks of its {queries} queries: it is a slice. "
            "Convert the whole BlockMask, and give attention the query_positions of the rows that it computes"
        )
    if getattr(block_mask.mask_mod, "__name__", "") == "_sliced_mask_mod_error":
        raise MaskError(
            "this BlockMask is a slice, which torch leaves without a mask_mod: convert the whole BlockMask, or set the "
            "slice's mask_mod first, to a function of the batches and heads of the slice"
        )


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(Mask):
    """Pairs in the blocks where a table is True: bool (batch|1, heads|1, rows of blocks, columns of blocks)."""

    blocks: Tensor
    lengths: tuple[int, int]
    size: tuple[int, int]

    def keep(self, grid: Pairs) -> Kept:
        batch, heads = self.blocks.shape[:2]
        batches = torch.arange(batch, device=grid.device)[:, None, None]
        index = (
            grid.per_batch(batches) if batch > 1 else 0,
            head_indices(self, heads, grid) if heads > 1 else 0,
            grid.by_query(self._row_of_blocks),
            grid.by_key(self._column_of_blocks),
        )
        return cast(Kept, look_up(copy_on(self.blocks, grid.device), index))  # a table of booleans

    def _row_of_blocks(self, positions: Tensor) -> Tensor:
        """The row of blocks of each query position; the first query is at N - M."""
        queries, keys = self.lengths
        self._check("queries", positions, keys - queries)
        return (positions - (keys - queries)) // self.size[0]

    def _column_of_blocks(self, positions: Tensor) -> Tensor:
        """The column of blocks of each key position."""
        self._check("keys", positions, 0)
        return positions // self.size[1]

    def _check(self, side: str, positions: Tensor, first: int) -> None:
        """Raise a MaskError for positions outside first..N-1."""
        if under_transform() or not positions.numel():
            return  # no values to check
        queries, keys = self.lengths
        low, high = (int(end) for end in positions.aminmax())
        if low < first or high >= keys:
            raise MaskError(
                f"{self!r} is made from a BlockMask of {queries} queries and {keys} keys, whose {side} have the "
                f"positions {first} to {keys - 1}, but one is at {low if low < first else high}: if that is a row or "
                "column of the BlockMask, leave query_positions and key_positions out; else make one of these lengths"
            )

    def __repr__(self) -> str:
        return f"block_layout(<{int(self.blocks.sum())} of {tuple(self.blocks.shape)}>)"


def _mask_of_positions(mask_mod: MaskMod, shape: torch.Size, lengths: tuple[int, int]) -> Mask:
    """A mask_mod of rows and columns, as a mask of positions."""
    offset, (batch, heads) = lengths[1] - lengths[0], shape[:2]
    first = torch.zeros((), dtype=torch.int64)

    def block_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b if batch > 1 else first, h if heads > 1 else first, q - offset if offset else q, k)

    block_mask.__name__ = getattr(mask_mod, "__name__", None) or block_mask.__name__
    return from_mod(block_mask, batch=batch if batch > 1 else None, heads=heads if heads > 1 else None)


def _to_kv_blocks(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Bool blocks as kv_num_blocks and kv_indices of a BlockMask, int32: per row the number of blocks and columns."""
    counts = blocks.sum(-1, dtype=torch.int32)
    row, column = blocks.reshape(-1, blocks.shape[-1]).nonzero().unbind(-1)
    first = counts.flatten().cumsum(0) - counts.flatten()  # the number of blocks in the rows before
    listed = torch.zeros(blocks.shape, dtype=torch.int32, device=blocks.device)
    place = torch.arange(len(row), device=blocks.device) - first[row]
    listed.view(-1, blocks.shape[-1])[row, place] = column.int()
    return counts, listed


def _from_kv_blocks(counts: Tensor, indices: Tensor) -> Tensor:
    """kv_num_blocks and kv_indices as bool blocks, (batch|1, heads|1, rows, columns).

    In each row, only the first `counts` indices are valid.
    """
    columns = indices.shape[-1]
    valid = torch.arange(columns, device=indices.device) < counts[..., None]
    spare = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    marked = spare.scatter(-1, indices.long().where(valid, columns), torch.ones_like(valid))
    return four_axes("FlexAttention", marked[..., :columns])
