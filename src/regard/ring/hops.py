"""Which keys each process of a ring needs of each other one, and the blocks of pairs that it computes with them.

Every process computes the same plan from the mask and the global positions, so that nothing is negotiated: keys that no
query attends to are not sent, and a hop without any is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from ..core.grid import FULL, Blocks, Grid
from ..core.problem import Problem
from ..masks import Mask
from ..tiles.memo import memoize
from .layout import Shards, tiles_with_pairs

KEY_TILE = 64
"""Keys that are sent or left out together."""
QUERY_TILES = 128
"""Tiles of the queries of one piece, at most, over which the mask is evaluated."""
MAX_SPANS = 4
"""Spans of keys sent of one piece, at most: beyond, the keys between the closest ones are sent as well."""


@dataclass(frozen=True, slots=True)
class PairBlock:
    """A rectangle of query-key pairs: local rows, columns of the received keys, and their global positions.

    is_full: the mask has all of the pairs, and need not be evaluated.
    """

    rows: slice
    columns: slice
    query_positions: range
    key_positions: range
    is_full: bool = False

    def among(self, start: int, stop: int) -> PairBlock:
        """The block over the received keys start..stop-1 alone, whose columns are counted from `start`."""
        first, last = (min(max(edge, start), stop) for edge in (self.columns.start, self.columns.stop))
        positions = self.key_positions[first - self.columns.start : last - self.columns.start]
        return replace(self, columns=slice(first - start, last - start), key_positions=positions)


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of the ring: what this process sends, what it receives, and the pairs that it then computes.

    sent and received: local rows of the sender's keys, in the order in which they travel; () for no message. The first
    hop is over the process's own keys, which do not travel: its columns are local rows.
    """

    destination: int
    sent: tuple[slice, ...]
    source: int
    received: tuple[slice, ...]
    blocks: tuple[PairBlock, ...]

    def part(self, sent: tuple[int, int] | None, received: tuple[int, int] | None) -> Hop:
        """The hop over one of some equal parts of the keys sent, and one of those received: (index, parts) or None."""
        start, stop = _part_bounds(count(self.received), received)
        blocks = (block.among(start, stop) for block in self.blocks)
        return Hop(
            self.destination,
            among(self.sent, *_part_bounds(count(self.sent), sent)),
            self.source,
            among(self.received, start, stop),
            tuple(block for block in blocks if len(block.key_positions)),
        )


@dataclass(frozen=True, slots=True)
class HopPlan:
    """The hops of one process, one for each process of the ring, the first of them over its own keys."""

    rank: int
    hops: tuple[Hop, ...]

    @property
    def keys_sent(self) -> int:
        """How many keys this process sends, to all others together."""
        return sum(count(hop.sent) for hop in self.hops if hop.destination != self.rank)

    @property
    def sources(self) -> tuple[int, ...]:
        """The other processes whose keys this one receives."""
        return tuple(hop.source for hop in self.hops if hop.received and hop.source != self.rank)


def count(spans: Sequence[slice]) -> int:
    """The number of rows in some spans.

    >>> count([slice(0, 3), slice(10, 12)])
    5
    """
    return sum(span.stop - span.start for span in spans)


def among(spans: Sequence[slice], start: int, stop: int) -> tuple[slice, ...]:
    """The rows start..stop-1 of those in some spans, as spans.

    >>> among([slice(0, 3), slice(10, 12)], 2, 4)
    (slice(2, 3, None), slice(10, 11, None))
    """
    found, before = [], 0
    for span in spans:
        first, last = max(start - before, 0), min(stop - before, span.stop - span.start)
        if first < last:
            found.append(slice(span.start + first, span.start + last))
        before += span.stop - span.start
    return tuple(found)


def _part_bounds(rows: int, part: tuple[int, int] | None) -> tuple[int, int]:
    """The first row of a part (index, parts) and the row after its last, at multiples of KEY_TILE; None has none."""
    if part is None:
        return 0, 0
    index, parts = part
    size = -(-rows // (parts * KEY_TILE)) * KEY_TILE
    return min(index * size, rows), min((index + 1) * size, rows)


def plan_limits() -> str:
    """The constants by which each process computes the plan, as text."""
    return f"{KEY_TILE} keys in at most {MAX_SPANS} spans, at most {QUERY_TILES} of queries"


def plan_hops(problem: Problem, queries: Shards, keys: Shards, rank: int) -> HopPlan:
    """The hops of a process, memoized for each mask and each pair of shards.

    Step s of the ring of P processes: keys go from rank to rank + s mod P, straight to the process that needs them.
    """

    def compute() -> HopPlan:
        processes, hops = len(queries.pieces), []
        for step in range(processes):
            destination, source = (rank + step) % processes, (rank - step) % processes
            received, blocks = _needed(problem, queries, rank, keys, source)
            sent = received if not step else _needed(problem, queries, destination, keys, rank)[0]
            hops.append(Hop(destination, sent, source, received, blocks))
        return HopPlan(rank, tuple(hops))

    return memoize(problem, ("hops", queries, keys, rank), compute)


def _needed(
    problem: Problem, queries: Shards, reader: int, keys: Shards, owner: int
) -> tuple[tuple[slice, ...], tuple[PairBlock, ...]]:
    """The owner's keys that queries of the reader attend to, and the blocks of pairs over them; all of its own keys."""
    spans: list[slice] = []
    blocks: list[PairBlock] = []
    before = 0
    where = {"heads": problem.heads, "device": problem.value.device}
    for key_rows, key_positions in keys.rows(owner):
        verdicts = [
            (
                rows,
                positions,
                tiles_with_pairs(problem.mask, positions, key_positions, (_query_tile(positions), KEY_TILE), **where),
            )
            for rows, positions in queries.rows(reader)
        ]
        for span in _spans(torch.stack([found.any(0) for *_, found in verdicts]).any(0), len(key_positions)):
            here = slice(key_rows.start + span.start, key_rows.start + span.stop)
            columns = here if reader == owner else slice(before, before + len(key_positions[span]))
            tiles = slice(span.start // KEY_TILE, -(-span.stop // KEY_TILE))
            for rows, positions, found in verdicts:
                used = _extent(found[:, tiles].any(1), _query_tile(positions), len(positions))
                if used is not None:
                    local = slice(rows.start + used.start, rows.start + used.stop)
                    pairs = positions[used], key_positions[span]
                    blocks.append(PairBlock(local, columns, *pairs, _is_full(problem.mask, *pairs, **where)))
            spans.append(here)
            before = columns.stop
    if reader == owner:
        spans = [slice(0, keys.lengths[owner])] if blocks else []
    return _joined(spans), tuple(blocks)


def _is_full(mask: Mask | None, queries: range, keys: range, *, heads: bool, device: torch.device) -> bool:
    """Whether the mask has all pairs of some queries and keys, for every batch and head, as far as intervals tell."""
    if mask is None:
        return True
    grid = Grid.from_lengths(
        len(queries), len(keys), query_positions=queries, key_positions=keys, heads=heads, device=device
    )
    return bool((mask.verdicts(Blocks.from_grid(grid, (len(queries), len(keys)))) == FULL).all())


def _joined(spans: list[slice]) -> tuple[slice, ...]:
    """The same rows, neighbouring spans as one, which is sent without a copy."""
    joined: list[slice] = []
    for span in spans:
        if joined and joined[-1].stop == span.start:
            joined[-1] = slice(joined[-1].start, span.stop)
        else:
            joined.append(span)
    return tuple(joined)


def _query_tile(positions: range) -> int:
    return max(-(-len(positions) // QUERY_TILES), KEY_TILE)


def _spans(tiles: Tensor, length: int) -> list[slice]:
    """The positions of the tiles that are True as at most MAX_SPANS spans: the smallest gaps are closed."""
    edges = torch.cat([tiles.new_zeros(1), tiles, tiles.new_zeros(1)]).int().diff().nonzero().flatten().tolist()
    runs = list(zip(edges[::2], edges[1::2], strict=True))
    while len(runs) > MAX_SPANS:
        gaps = [following[0] - run[1] for run, following in pairwise(runs)]
        at = gaps.index(min(gaps))
        runs[at : at + 2] = [(runs[at][0], runs[at + 1][1])]
    return [slice(start * KEY_TILE, min(stop * KEY_TILE, length)) for start, stop in runs]


def _extent(tiles: Tensor, size: int, length: int) -> slice | None:
    """The positions from the first to the last tile that is True; None if none is."""
    found = tiles.nonzero().flatten()
    return slice(int(found[0]) * size, min(int(found[-1] + 1) * size, length)) if len(found) else None
