"""How a sequence is cut over the processes of a ring: the global positions of each process as a few ranges.

Ranges stay symbolic, so that masks, biases and dropout are evaluated at global positions by the fastest kernels, and
the tiles of a mask are memoized for each shard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise
from typing import Protocol, TypeAlias, runtime_checkable

import torch
from torch import Tensor

from ..core.grid import EMPTY, Blocks, Grid
from ..errors import ConfigurationError, ShapeError
from ..masks import Mask

Pieces: TypeAlias = tuple[range, ...]
"""The global positions of one process, in the order of its rows."""

COUNTED_PAIRS, COUNTED_AT_ONCE = 2**26, 2**22
"""Pairs of a mask that are counted for balance, at most, and so many of them at once."""
BALANCE_TILES = 128
"""Tiles of the keys of a process, in which those that others need are counted."""
CLOSE = 1.05
"""Layouts whose busiest processes differ by less than this factor count as balanced alike."""


@runtime_checkable
class RingLayout(Protocol):
    """A rule for cutting a sequence over processes; hashable and equal by value."""

    def pieces(self, length: int, processes: int) -> Sequence[Sequence[range]]:
        """The global positions of each process, as ranges in the order of its rows."""
        ...


@dataclass(frozen=True)
class Contiguous:
    """Process r has one run of consecutive positions: best for windows, whose neighbours are then few.

    lengths: how many positions each process has; without it they differ by 1 at most.

    >>> Contiguous().pieces(10, 3)
    ((range(0, 4),), (range(4, 7),), (range(7, 10),))
    """

    lengths: tuple[int, ...] | None = None

    def pieces(self, length: int, processes: int) -> tuple[Pieces, ...]:
        """The global positions of each process.

        Raises:
            ShapeError: lengths that are not one for each process, or whose sum is not the sequence's length.
        """
        lengths = even_lengths(length, processes) if self.lengths is None else self.lengths
        if len(lengths) != processes or sum(lengths) != length or min(lengths) < 1:
            raise ShapeError(
                f"{self} cuts {sum(lengths):,} positions for {len(lengths)} processes; it needs at least one position "
                f"for each of {processes} processes, {length:,} in all"
            )
        return tuple((range(start, stop),) for start, stop in pairwise(accumulate(lengths, initial=0)))


@dataclass(frozen=True)
class Zigzag:
    """Process r of P has the chunks r and 2P-1-r of 2P: a causal mask gives all processes equal numbers of pairs.

    Source: zhuzilin/ring-flash-attention; Llama 3 (arXiv 2407.21783, section 3.3.2).

    >>> Zigzag().pieces(8, 2)
    ((range(0, 2), range(6, 8)), (range(2, 6),))
    """

    def pieces(self, length: int, processes: int) -> tuple[Pieces, ...]:
        """The global positions of each process; neighbouring chunks are one range."""
        edges = list(accumulate(even_lengths(length, 2 * processes), initial=0))
        chunks = [range(start, stop) for start, stop in pairwise(edges)]
        return tuple(_joined((chunks[r], chunks[2 * processes - 1 - r])) for r in range(processes))


@dataclass(frozen=True)
class Striped:
    """Process r of P has the positions r, r + P, r + 2P, ... (Brandon et al. 2023, arXiv 2311.09431).

    >>> Striped().pieces(7, 3)
    ((range(0, 7, 3),), (range(1, 7, 3),), (range(2, 7, 3),))
    """

    def pieces(self, length: int, processes: int) -> tuple[Pieces, ...]:
        """The global positions of each process."""
        return tuple((range(r, length, processes),) for r in range(processes))


def even_lengths(length: int, parts: int) -> tuple[int, ...]:
    """`length` cut into parts that differ by 1 at most, the longer ones first."""
    return tuple(length // parts + (part < length % parts) for part in range(parts))


def _joined(pieces: Sequence[range]) -> Pieces:
    """The same positions without empty ranges, consecutive neighbours as one."""
    joined: list[range] = []
    for piece in pieces:
        if joined and piece and joined[-1].step == piece.step == 1 and joined[-1].stop == piece.start:
            joined[-1] = range(joined[-1].start, piece.stop)
        elif piece:
            joined.append(piece)
    return tuple(joined)


@dataclass(frozen=True)
class Shards:
    """The global positions of every process, checked: each of the sequence's positions belongs to one process."""

    pieces: tuple[Pieces, ...]

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        """The number of positions of each process."""
        return tuple(sum(map(len, own)) for own in self.pieces)

    def rows(self, process: int) -> tuple[tuple[slice, range], ...]:
        """The local rows of each piece of a process, with their global positions."""
        edges = accumulate(map(len, self.pieces[process]), initial=0)
        return tuple((slice(*edge), piece) for edge, piece in zip(pairwise(edges), self.pieces[process], strict=True))

    def shifted(self, offset: int) -> Shards:
        """The same, `offset` positions later."""
        return Shards(
            tuple(
                tuple(range(piece.start + offset, piece.stop + offset, piece.step) for piece in own)
                for own in self.pieces
            )
        )

    def teams(self, size: int) -> Shards:
        """The shards of teams of `size` neighbouring processes, which have the positions of all their members."""
        members = (self.pieces[first : first + size] for first in range(0, len(self.pieces), size))
        return Shards(tuple(_joined([piece for own in team for piece in own]) for team in members))

    def positions(self, process: int, device: torch.device | None = None) -> Tensor:
        """The global positions of a process, int64."""
        own = (torch.arange(each.start, each.stop, each.step, device=device) for each in self.pieces[process])
        return torch.cat(list(own))


@lru_cache(maxsize=256)
def place(layout: RingLayout, length: int, processes: int) -> Shards:
    """The shards of a sequence.

    Raises:
        ShapeError: more processes than positions; pieces that are not all positions of the sequence, each once.
        ConfigurationError: what is no layout.
    """
    if isinstance(layout, type) or not isinstance(layout, RingLayout):
        raise ConfigurationError(
            f"layout is {layout!r}; it needs a layout such as regard.ring.Contiguous(), Zigzag() or Striped()"
        )
    if length < processes:
        raise ShapeError(
            f"{length} tokens cannot be cut for {processes} processes, of which each needs at least one: start fewer "
            "processes, or attend with regard.attention in each"
        )
    shards = Shards(tuple(_joined(tuple(own)) for own in layout.pieces(length, processes)))
    every = torch.cat([shards.positions(process) for process in range(len(shards.pieces))])
    complete = every.sort().values.equal(torch.arange(length))
    if len(shards.pieces) != processes or not all(shards.lengths) or not complete:
        raise ShapeError(
            f"{layout!r} gives {len(shards.pieces)} processes the positions {shards.pieces}; each of {processes} "
            f"processes needs at least one position, and each of 0..{length - 1} one process"
        )
    return shards


def balanced(mask: Mask | None, length: int, processes: int) -> RingLayout:
    """The layout in which the busiest process has the fewest query-key pairs, counted by the mask.

    Of layouts of even lengths that are balanced alike (within 5 %), the one whose processes need the fewest keys of
    others. Where none of them is balanced, a contiguous one is cut where the pairs are equal: its lengths differ.

    >>> from regard import masks
    >>> balanced(masks.causal(), 4096, 4), balanced(masks.causal() & masks.window(before=63), 4096, 4)
    (Zigzag(), Contiguous(lengths=None))
    """
    per_row = _pairs_per_row(mask, length)
    cuts = _balanced_cuts(per_row, processes)
    layouts: list[RingLayout] = [Contiguous(), Zigzag(), Striped(), *([Contiguous(cuts)] if cuts else [])]
    every = [place(layout, length, processes) for layout in layouts]
    busiest = [max(float(per_row[own.positions(r)].sum()) for r in range(processes)) for own in every]
    even = [at for at in range(3) if busiest[at] <= CLOSE * min(busiest)]
    return layouts[min(even, key=lambda at: _foreign_keys(mask, every[at])) if even else 3]


def _pairs_per_row(mask: Mask | None, length: int) -> Tensor:
    """How many keys each position attends to, (N,): counted for evenly spaced rows, COUNTED_PAIRS in all."""
    if mask is None:
        return torch.full((length,), float(length), dtype=torch.float64)
    stride = -(-length * length // COUNTED_PAIRS)
    counts = []
    for rows in torch.arange(0, length, stride).split(max(COUNTED_AT_ONCE // length, 1)):
        grid = Grid.from_lengths(len(rows), length, query_positions=rows, key_positions=range(length))
        keep = mask.evaluate(grid)
        counts.append(keep.expand(*keep.shape[:-2], *grid.shape).sum(-1).reshape(-1, len(rows)).double().mean(0))
    return torch.cat(counts).repeat_interleave(stride)[:length]


def _balanced_cuts(per_row: Tensor, processes: int) -> tuple[int, ...] | None:
    """Lengths of contiguous shards with equal numbers of pairs; None where a process would have no position."""
    within = per_row.sum() * torch.arange(1, processes, dtype=torch.float64) / processes
    edges = torch.searchsorted(per_row.cumsum(0), within).add(1).tolist()
    lengths = tuple(stop - start for start, stop in pairwise([0, *edges, len(per_row)]))
    return lengths if min(lengths) >= 1 else None


def _foreign_keys(mask: Mask | None, shards: Shards) -> int:
    """How many keys of other processes all processes need together, in whole tiles."""
    total = 0
    for process, own in enumerate(shards.pieces):
        for other, theirs in enumerate(shards.pieces):
            for keys in theirs if other != process else ():
                size = max(-(-len(keys) // BALANCE_TILES), 1)
                found = [tiles_with_pairs(mask, queries, keys, (len(queries), size)).any(0) for queries in own]
                total += size * int(torch.stack(found).any(0).sum())
    return total


def tiles_with_pairs(
    mask: Mask | None,
    queries: range,
    keys: range,
    size: tuple[int, int],
    *,
    heads: bool = True,
    device: torch.device | None = None,
) -> Tensor:
    """Which tiles of queries and keys may have pairs, for any batch and head: bool (R, C) on the CPU."""
    grid = Grid.from_lengths(
        len(queries), len(keys), query_positions=queries, key_positions=keys, heads=heads, device=device
    )
    blocks = Blocks.from_grid(grid, size)
    if mask is None:
        return torch.ones(blocks.shape, dtype=torch.bool)
    return (mask.verdicts(blocks) != EMPTY).reshape(-1, *blocks.shape).any(0).cpu()
