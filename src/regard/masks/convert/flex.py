"""FlexAttention's mask_mod and BlockMask, from masks and to them.

One pair at a time: a mask's formula asked by indices, as FlexAttention asks a mask_mod.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias, cast

import torch
from torch import Tensor

from ...core.grid import Blocks, Grid
from ...core.intervals import FULL, PARTIAL, look_up
from ...errors import MaskError
from ..base import Kept, Mask, Pairs, as_mask
from ..index_checks import by_head, check_range
from ..mask_mod import MaskMod, from_mod
from .torch_tensors import four_axes

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

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


def to_mask_mod(
    mask: Mask,
    queries: int,
    keys: int,
    *,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    device: torch.device | None = None,
) -> MaskMod:
    """A mask_mod(b, h, q_idx, kv_idx) of FlexAttention that says what the mask says, for M queries and N keys.

    FlexAttention counts queries and keys from 0; the function puts them at their positions, which unless told are
    0..N-1 for keys and the last M of these for queries. So `causal()` shows the last query all keys, also where M < N.

    The function reads tables of O(M + N), and the tensors that the mask is made of. It takes single indices or
    tensors of them that broadcast; torch may map it, as `create_block_mask` does, or compile it.

    Raises:
        MaskError: a mask with more than one axis of batches.

    Source: Dong et al. 2024, arXiv 2412.05496.

    >>> from regard import masks
    >>> last = torch.tensor(1)
    >>> masks.to_mask_mod(masks.causal(), 2, 6)(None, None, last, torch.arange(6))
    tensor([True, True, True, True, True, True])
    """
    grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
    return _asked(as_mask(mask), grid)[0]


def to_block_mask(
    mask: Mask,
    queries: int,
    keys: int,
    size: int | tuple[int, int] = 128,
    *,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
    device: torch.device | None = None,
) -> BlockMask:
    """A BlockMask of FlexAttention, made from `mask.tiles`: no pair is looked at, and no n² memory taken.

    FULL tiles are its full blocks, PARTIAL ones its blocks with `to_mask_mod(mask)`; `size` is the rows and columns of
    a block, or one number for both. Its axes of batch and heads have the size 1 unless the mask depends on them, and
    then serve any. As in torch, a block that goes over the end is never full.

    Where interval arithmetic tells all, the blocks are those of `create_block_mask`; else there are more, and
    FlexAttention comes to the same result, with more work.

    Raises:
        MaskError: a mask with more than one axis of batches.
        ShapeError: a size that is no whole number of at least 1.

    >>> from regard import masks
    >>> masks.to_block_mask(masks.causal() & masks.window(before=255), 512, 512).to_dense()
    tensor([[[[1, 0, 0, 0],
              [1, 1, 0, 0],
              [1, 1, 1, 0],
              [0, 1, 1, 1]]]], dtype=torch.int32)
    """
    from torch.nn.attention.flex_attention import BlockMask  # brings the compiler, which few need

    grid = Grid.of(queries, keys, query_positions=query_positions, key_positions=key_positions, device=device)
    mask_mod, leading = _asked(as_mask(mask), grid)
    blocks = Blocks.of(grid, size)
    tiles = four_axes("FlexAttention", mask.verdicts(blocks)).expand(*leading, -1, -1)
    whole = blocks.areas == blocks.rows * blocks.columns
    tiles = tiles.where((tiles != FULL) | whole, PARTIAL)
    return BlockMask.from_kv_blocks(
        *_listed(tiles == PARTIAL),
        *_listed(tiles == FULL),
        BLOCK_SIZE=(blocks.rows, blocks.columns),
        mask_mod=mask_mod,
        seq_lengths=(queries, keys),
    )


def from_block_mask(block_mask: BlockMask) -> Mask:
    """The mask that a BlockMask stands for: all pairs of its full blocks, and of its other blocks what mask_mod keeps.

    Rows become positions: its keys sit at 0..N-1 and its queries at the last M of these. An axis of batch or heads of
    the size 1 serves any number, and mask_mod is asked about the first.

    Raises:
        MaskError: it is no BlockMask; when used, a position is outside of it, or mask_mod cannot be evaluated.

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
    partial = _unlisted(block_mask.kv_num_blocks, block_mask.kv_indices)
    kept = BlockLayout(partial, lengths, size) & _shifted(block_mask.mask_mod, partial.shape, lengths)
    if block_mask.full_kv_num_blocks is None or block_mask.full_kv_indices is None:
        return kept
    full = _unlisted(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    return BlockLayout(full, lengths, size) | kept


@dataclass(frozen=True, eq=False, repr=False)
class BlockLayout(Mask):
    """The pair's block is among those that a table marks: bool (batch|1, heads|1, rows of blocks, columns)."""

    blocks: Tensor
    lengths: tuple[int, int]
    size: tuple[int, int]

    def keep(self, grid: Pairs) -> Kept:
        batch, heads = self.blocks.shape[:2]
        numbers = torch.arange(batch, device=grid.device)[:, None, None]
        index = (
            grid.per_batch(numbers) if batch > 1 else 0,
            by_head(self, heads, grid) if heads > 1 else 0,
            grid.by_query(lambda positions: self._block(positions - (self.lengths[1] - self.lengths[0]), 0)),
            grid.by_key(lambda positions: self._block(positions, 1)),
        )
        return cast(Kept, look_up(self.blocks.to(grid.device), index))  # a table of booleans

    def _block(self, indices: Tensor, side: int) -> Tensor:
        """The rows or columns of blocks that rows or columns of pairs are in."""
        check_range(repr(self), indices, self.lengths[side], "make a BlockMask of these lengths")
        return indices // self.size[side]

    def __repr__(self) -> str:
        return f"block_layout(<{int(self.blocks.sum())} of {tuple(self.blocks.shape)}>)"


def _asked(mask: Mask, grid: Grid) -> tuple[MaskMod, torch.Size]:
    """The mask, asked by indices, and the axes of batch and heads that it has: (batch | 1, heads | 1)."""
    first = First(grid)
    leading = four_axes("FlexAttention", mask.evaluate(first)).shape[:2]  # type: ignore[call-overload]
    tables = first.tables

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        return mask.evaluate(Pair(grid, iter(tables), (b, h, q_idx, kv_idx)))  # type: ignore[call-overload]

    return mask_mod, leading


def _shifted(mask_mod: MaskMod, shape: torch.Size, lengths: tuple[int, int]) -> Mask:
    """A mask_mod of rows, as a mask of positions."""
    offset, (batch, heads) = lengths[1] - lengths[0], shape[:2]
    first = torch.zeros((), dtype=torch.int64)

    def block_mask(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return mask_mod(b if batch > 1 else first, h if heads > 1 else first, q - offset if offset else q, k)

    block_mask.__name__ = getattr(mask_mod, "__name__", None) or block_mask.__name__
    return from_mod(block_mask, batch=batch if batch > 1 else None, heads=heads if heads > 1 else None)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks each row has, and their columns, these first: int32, as a BlockMask keeps them."""
    counts = blocks.sum(-1, dtype=torch.int32)
    return counts, blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True).int()


def _unlisted(counts: Tensor, indices: Tensor) -> Tensor:
    """Blocks as booleans, (batch|1, heads|1, rows, columns); indices after the first `counts` say nothing."""
    columns = indices.shape[-1]
    named = torch.arange(columns, device=indices.device) < counts[..., None]
    spare = torch.zeros(*indices.shape[:-1], columns + 1, dtype=torch.bool, device=indices.device)
    marked = spare.scatter(-1, indices.long().where(named, columns), torch.ones_like(named))
    return four_axes("FlexAttention", marked[..., :columns])
