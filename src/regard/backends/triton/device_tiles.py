"""The tiles of a mask on the device, for kernels with tiles of any size: spans of rows, or blocks with bits.

Where rows are spans of keys, all is computed on the device from two numbers a row, and nothing is read back: not even
the lengths of a padded batch. Of other masks, the verdicts on blocks of 64 × 64 pairs are known on the CPU; the blocks
that the mask cuts get a bit for each pair. A mask and a size have their tiles computed once: `tiles.memo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.batched_problem import BatchedProblem
from ...core.intervals import EMPTY, FULL, PARTIAL
from ...tiles.dense_mask import is_one_causal_query
from ...tiles.mask_tiles import verdicts_by_head
from ...tiles.memo import memoize
from ...tiles.row_spans import has_spans, key_spans
from .kernel_arguments import MaskArgument

BLOCK = 64
"""Rows and columns of a block with bits."""
NONE, ALL = 0, 1
"""The numbers of a block without pairs, and of one with all; the blocks that the mask cuts come after them."""


@dataclass(eq=False)
class SpanTiles:
    """The tiles of a mask whose rows are spans: (sets, M, 2) int32, one set for all batches or one for each."""

    spans: Tensor
    keys: int
    _found: dict[tuple[str, int, int], MaskArgument] = field(default_factory=dict)

    def of_rows(self, rows: int, columns: int) -> MaskArgument:
        """For a kernel whose programs have a tile of rows each, and go over tiles of columns."""
        return self._memoized("rows", rows, columns)

    def of_columns(self, rows: int, columns: int) -> MaskArgument:
        """For a kernel whose programs have a tile of columns each, and go over tiles of rows."""
        return self._memoized("columns", rows, columns)

    def _memoized(self, by: str, rows: int, columns: int) -> MaskArgument:
        key = by, rows, columns
        if key not in self._found:
            ranges = self._row_ranges(rows, columns) if by == "rows" else self._column_ranges(rows, columns)
            sets = len(self.spans)
            self._found[key] = MaskArgument(ranges, spans=self.spans, set_batch=int(sets > 1))
        return self._found[key]

    def _limits(self, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of each tile of rows the keys that some row attends to, lowest..highest-1, and all rows, begin..end-1."""
        begin, end = self.spans.unbind(-1)
        empty, beyond = begin >= end, -begin.shape[-1] % rows

        def tiled(limit: Tensor, filler: int) -> Tensor:
            return pad(limit, (0, beyond), value=filler).unflatten(-1, (-1, rows))

        lowest, highest = tiled(begin.masked_fill(empty, self.keys), self.keys), tiled(end.masked_fill(empty, 0), 0)
        latest, earliest = tiled(begin.masked_fill(empty, self.keys), 0), tiled(end, self.keys)
        return lowest.amin(-1), highest.amax(-1), latest.amax(-1), earliest.amin(-1)

    def _row_ranges(self, rows: int, columns: int) -> Tensor:
        lowest, highest, begin, end = self._limits(rows)
        first = lowest // columns
        last = torch.maximum((highest + columns - 1) // columns, first)
        full = torch.minimum(torch.maximum((begin + columns - 1) // columns, first), last)
        cut = torch.maximum(torch.minimum(end // columns, last), full)
        return torch.stack((first, full, cut, last), -1).int().contiguous()

    def _column_ranges(self, rows: int, columns: int) -> Tensor:
        """Between the first and the last tile of rows with pairs, the first stretch of those with all pairs."""
        left = torch.arange(0, self.keys, columns, device=self.spans.device)[:, None]
        lowest, highest, begin, end = (limit[:, None] for limit in self._limits(rows))
        some = (lowest < left + columns) & (highest > left)  # [sets, columns of tiles, rows of tiles]
        every = some & (begin <= left) & (end >= left + columns)
        count = some.shape[-1]
        at = torch.arange(count, device=self.spans.device)
        first = torch.where(some, at, count).amin(-1)
        last = torch.where(some, at + 1, 0).amax(-1)
        full = torch.minimum(torch.where(every, at, count).amin(-1), last)
        cut = torch.minimum(torch.where(every | (at < full[..., None]), count, at).amin(-1), last)
        first, cut = torch.minimum(first, last), torch.maximum(cut, full)
        return torch.stack((first, full, cut, last), -1).int().contiguous()


@dataclass(eq=False)
class BitTiles:
    """The tiles of any other mask.

    verdicts: (sets, ⌈M/64⌉, ⌈N/64⌉), on the CPU. numbers, bits, set_batch, set_head: as in `MaskArgument`.
    """

    verdicts: np.ndarray
    numbers: Tensor
    bits: Tensor
    shape: tuple[int, int]
    set_batch: int
    set_head: int
    _found: dict[tuple[str, int, int], MaskArgument] = field(default_factory=dict)

    def of_rows(self, rows: int, columns: int) -> MaskArgument:
        """For a kernel whose programs have a tile of rows each, and go over tiles of columns."""
        return self._memoized("rows", rows, columns)

    def of_columns(self, rows: int, columns: int) -> MaskArgument:
        """For a kernel whose programs have a tile of columns each, and go over tiles of rows."""
        return self._memoized("columns", rows, columns)

    def _memoized(self, by: str, rows: int, columns: int) -> MaskArgument:
        key = by, rows, columns
        if key not in self._found:
            some, every = self._tiles(rows, columns)
            if by == "columns":
                some, every = some.swapaxes(1, 2), every.swapaxes(1, 2)
            ranges, tiles = (on_device(each, self.bits.device) for each in _lists(some, every))
            self._found[key] = MaskArgument(ranges, tiles, None, self.numbers, self.bits, self.set_batch, self.set_head)
        return self._found[key]

    def _tiles(self, rows: int, columns: int) -> tuple[np.ndarray, np.ndarray]:
        """Which tiles have some pair, and which all; (sets, R, C). A tile that goes beyond the last key has not all."""
        some, every = self.verdicts != EMPTY, self.verdicts == FULL
        for axis, size, length in ((1, rows, self.shape[0]), (2, columns, self.shape[1])):
            some = _of_size(some, axis, size, length, np.logical_or)
            every = _of_size(every, axis, size, length, np.logical_and)
        every[:, :, self.shape[1] // columns :] = False
        return some, every


@dataclass(frozen=True, eq=False)
class AllTiles:
    """The tiles of a problem without a mask: kernels count them themselves."""

    def of_rows(self, rows: int, columns: int) -> MaskArgument:
        """No list."""
        return MaskArgument()

    of_columns = of_rows


def device_tiles(batched: BatchedProblem) -> AllTiles | SpanTiles | BitTiles:
    """The tiles of the mask of a problem, for the batches that it has."""
    problem, device = batched.problem, batched.value.device
    if problem.mask is None or is_one_causal_query(problem) or not batched.value.numel() or not problem.queries:
        return AllTiles()
    batch = batched.batch.indices(problem.batch.numel())[:2]

    mask = problem.mask

    def compute() -> SpanTiles | BitTiles:
        with torch.inference_mode(mode=False):
            return _span_tiles(batched) if has_spans(mask, problem) else _bit_tiles(batched)

    return memoize(problem, ("device tiles", device, batch), compute)


def _span_tiles(batched: BatchedProblem) -> SpanTiles:
    spans = key_spans(batched.problem, batched.value.device)
    if spans is None:
        raise AssertionError("rows of a mask that has spans are none")
    return SpanTiles(spans if len(spans) == 1 else spans[batched.batch].contiguous(), batched.problem.keys)


def _bit_tiles(batched: BatchedProblem) -> BitTiles:
    verdicts = verdicts_by_head(batched.problem, (BLOCK, BLOCK))  # [B or 1, H or 1, R, C]
    verdicts = verdicts if len(verdicts) == 1 else verdicts[batched.batch]
    some = batched.keep(slice(0, 1), slice(0, 1))  # perhaps with more axes: a function may have no verdicts
    leading = np.broadcast_shapes(verdicts.shape[:2], () if some is None else tuple(some.shape[:2]))
    batches, heads = leading
    verdicts = np.broadcast_to(verdicts, (*leading, *verdicts.shape[2:])).reshape(-1, *verdicts.shape[2:])
    numbers = np.where(verdicts == FULL, ALL, NONE).astype(np.int32)
    # Numbered block row by block row, so that the blocks of one are written at once.
    row, which, column = (verdicts == PARTIAL).swapaxes(0, 1).nonzero()
    numbers[which, row, column] = ALL + 1 + np.arange(len(row))
    device = batched.value.device
    bits = torch.zeros(ALL + 1 + len(row), BLOCK, 2, dtype=torch.int32, device=device)
    bits[ALL] = -1
    edges, columns = np.searchsorted(row, np.arange(verdicts.shape[1] + 1)), verdicts.shape[2]
    chosen = on_device((which * columns + column).astype(np.int64), device)
    for block in range(verdicts.shape[1]):
        start, stop = edges[block], edges[block + 1]
        if start < stop:
            words = _row_words(batched, block, columns, (batches, heads))
            bits[ALL + 1 + start : ALL + 1 + stop] = words[chosen[start:stop]]
    shape = batched.shape[2:]
    return BitTiles(verdicts, on_device(numbers, device), bits, shape, heads if batches > 1 else 0, int(heads > 1))


def _row_words(batched: BatchedProblem, block: int, columns: int, leading: tuple[int, int]) -> Tensor:
    """The bits of all blocks of a block row, (sets · C, 64, 2) int32."""
    queries, keys = batched.shape[2:]
    rows = slice(block * BLOCK, min((block + 1) * BLOCK, queries))
    keep = batched.keep(rows, slice(0, keys))
    if keep is None:
        raise AssertionError("a problem with a mask has no pairs to ask for")
    count = rows.stop - rows.start
    whole = keep.expand(*leading, count, keys).flatten(0, 1)
    whole = pad(whole, (0, columns * BLOCK - keys, 0, BLOCK - count))
    bit = torch.arange(32, device=keep.device, dtype=torch.int64)
    words = (whole.unflatten(-1, (columns, 2, 32)).long() << bit).sum(-1)  # [sets, 64, C, 2]
    return words.to(torch.int32).movedim(1, 2).flatten(0, 1)


def _of_size(blocks: np.ndarray, axis: int, size: int, length: int, joined: np.ufunc) -> np.ndarray:
    """What holds of tiles of another size along an axis, from what holds of blocks."""
    if size < BLOCK:
        return np.repeat(blocks, BLOCK // size, axis).take(np.arange(-(-length // size)), axis)
    starts = np.arange(0, blocks.shape[axis], size // BLOCK)
    return joined.reduceat(blocks, starts, axis) if len(starts) else blocks


def _lists(some: np.ndarray, every: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The entries of each line, full tiles before cut ones, as (sets, lines, 4) ranges and numbers of tiles."""
    found = [kind.nonzero() for kind in (every, some & ~every)]
    line = np.concatenate([which * some.shape[1] + at for which, at, _ in found])
    kind, tile = np.repeat([0, 1], [len(each[0]) for each in found]), np.concatenate([each[2] for each in found])
    order = np.lexsort((tile, kind, line))
    counts = (every.sum(-1).ravel(), some.sum(-1).ravel())
    last = np.cumsum(counts[1])
    first = last - counts[1]
    ranges = np.stack((first, first, first + counts[0], last), -1).reshape(*some.shape[:2], 4)
    return ranges.astype(np.int32), tile[order].astype(np.int32)


def on_device(numbers: np.ndarray, device: torch.device) -> Tensor:
    """A copy of an array on a device, which is not waited for."""
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(device, non_blocking=True, copy=True)
