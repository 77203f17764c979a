"""What kernels in Triton get: tensors with their strides, a mask, a bias, dropout, each as one named tuple.

A field that is None is a feature that is off: Triton compiles the kernel without it.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TypeAlias

from torch import Tensor

LOG2E = math.log2(math.e)


class StridedRows(NamedTuple):
    """A tensor (B, H, L, ·) whose last axis is contiguous, or (B, H, L): its memory, and the strides of three axes."""

    pointer: Tensor | None
    batch: int = 0
    head: int = 0
    row: int = 0

    @classmethod
    def of(cls, tensor: Tensor | None) -> StridedRows:
        """The tensor and its strides, as they are: see `with_near_rows`."""
        return cls(None) if tensor is None else cls(tensor, *tensor.stride()[:3])


class ScoreScale(NamedTuple):
    """What makes scores of products: factor · product, or cap · tanh(factor · product); both in units of log₂ e.

    sigmoid: b of sigmoid attention for each head, (H,) float32 in the same units; None for other attention. excess: of
    weights that are what scores have above a threshold, or the square of that, (α - 1) / log₂ e, which a score is
    multiplied by; None for other attention. squared: 1 for squares, else None. powers: of weights to any other power,
    α - 1 of each head, (H,) float32, which `excess` does not tell then.
    """

    factor: float
    cap: float | None
    sigmoid: Tensor | None = None
    excess: float | None = None
    squared: int | None = None
    powers: Tensor | None = None

    @classmethod
    def of(cls, scale: float, softcap: float | None) -> ScoreScale:
        """Products times a scale, with a softcap or without."""
        return cls(scale * LOG2E, None) if softcap is None else cls(scale / softcap, softcap * LOG2E)


class MaskArgument(NamedTuple):
    """The tiles that a kernel visits, and which of their pairs exist; all None for a problem without a mask.

    Of each line of tiles, rows or columns, `ranges` (sets, lines, 4) int32 has (first, full, cut, last): all pairs of
    tiles full..cut-1 exist, of tiles first..full-1 and cut..last-1 some. They are numbers of tiles, or of entries of
    `tiles` where there are such. A pair exists that is in its row's span, `spans` (sets, M, 2) int32; or else whose
    bit is set: `numbers` (sets, ⌈M/64⌉, ⌈N/64⌉) int32 has the number of each block among `bits` (·, 64, 2) int32.
    set_batch, set_head: steps from one batch, and from one head, to the set of the next.
    """

    ranges: Tensor | None = None
    tiles: Tensor | None = None
    spans: Tensor | None = None
    numbers: Tensor | None = None
    bits: Tensor | None = None
    set_batch: int = 0
    set_head: int = 0


PairStrides: TypeAlias = tuple[int | None, int | None, int | None, int | None]
"""Of a tensor over pairs, from batch to column; None along axes of size 1."""


class BiasArgument(NamedTuple):
    """A bias by distance, `line`, or over pairs, `pairs`; of either the gradient, where it is asked for, to add to.

    line: in units of log₂ e, number j - i of what it points to for pair (i, j), padded by a tile at both ends.
    line_gradient: likewise, without padding. pairs: (B or 1, H or 1, M or 1, N or 1); its gradient is float32.
    """

    line: Tensor | None = None
    line_head: int = 0
    line_gradient: Tensor | None = None
    line_gradient_head: int = 0
    pairs: Tensor | None = None
    pairs_strides: PairStrides | None = None
    pairs_gradient: Tensor | None = None
    pairs_gradient_strides: PairStrides | None = None


class ListsArgument(NamedTuple):
    """The keys that are listed for blocks of `rows` queries, of each of `heads` heads with lists, or shared by these.

    indices: (B or 1, heads or 1, lists, ·) int32, contiguous, without duplicates; batch, head: its strides, 0 where it
    is shared. Entry i names the keys i · columns - first and the `columns` - 1 after it; those below 0, and from N on,
    are none. length: columns · entries of a list. spans: (B or 1, M, 2) int32, the first key of a row and the one after
    its last; None for all keys.
    """

    indices: Tensor
    batch: int
    head: int
    heads: int
    lists: int
    rows: int
    length: int
    columns: int
    first: int
    spans: Tensor | None = None
    spans_batch: int = 0


class DropoutArgument(NamedTuple):
    """Hashes of rows (B, H, M) and columns (B or 1, N), int32; the weights whose mixed sum is below are dropped."""

    rows: Tensor | None = None
    columns: Tensor | None = None
    columns_batch: int = 0
    threshold: int = 0
    keep: float = 1.0


MOST_STRIDE = 2**24
"""Rows further apart are copied: within a tile, kernels count in int32."""


def with_near_rows(tensor: Tensor) -> Tensor:
    """The tensor, copied unless the numbers of its last axis are neighbours, and its rows not too far apart."""
    near = tensor.stride(-2) < MOST_STRIDE and (tensor.shape[-1] <= 1 or tensor.stride(-1) == 1)
    return tensor if near else tensor.contiguous()


def with_aligned_rows(tensor: Tensor) -> Tensor:
    """`with_near_rows`, whose rows begin where 16 bytes do, and are a multiple of 16 numbers apart: else copied.

    Kernels read 16 bytes at once then. Where they cannot know that, loads of one number each take all registers.
    """
    rows = with_near_rows(tensor)
    if rows.stride(-2) % 16 == 0 and rows.data_ptr() % 16 == 0:
        return rows
    *leading, dim = rows.shape
    return rows.new_empty(*leading, -(-dim // 16) * 16)[..., :dim].copy_(rows)


def pair_strides(pairs: Tensor) -> PairStrides:
    """The strides of a tensor (B or 1, H or 1, M or 1, N or 1)."""
    batch, head, row, column = (
        None if size == 1 else stride for size, stride in zip(pairs.shape, pairs.stride(), strict=True)
    )
    return batch, head, row, column
