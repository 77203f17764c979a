"""Which keys each process of a ring needs of each other one, and the blocks of pairs that it computes with them.

Every process computes the same plan from the mask and the global positions, so that nothing is negotiated: keys that no
query attends to are not sent, and a hop without any is not made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from ..core.problem import Problem
from ..kernels.mask_tiles import memoize
from .layout import Shards, tiles_with_pairs

KEY_TILE = 64
"""Keys that are sent or left out together."""
QUERY_TILES = 128
"""Tiles of the queries of one piece, at most, over which the mask is evaluated."""
MAX_SPANS = 4
"""Spans of keys sent of one piece, at most: beyond, the keys between the closest ones are sent as well."""


@dataclass(frozen=True, slots=True)
class PairBlock:
    """A rectangle of query-key pairs: local rows, columns of the received keys, and their global positions."""

    rows: slice
    columns: slice
    query_positions: range
    key_positions: range


@dataclass(frozen=True, slots=True)
class Hop:
    """One step of the ring: what this process sends, what it receives, and the pairs that it then computes.

    sent and received: local rows of the sender's keys, in the order in which they travel; () for no message.
    """

    destination: int
    sent: tuple[slice, ...]
    source: int
    received: tuple[slice, ...]
    blocks: tuple[PairBlock, ...]


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
    """The owner's keys that queries of the reader attend to, and the blocks of pairs over them."""
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
            columns = slice(before, before + span.stop - span.start)
            tiles = slice(span.start // KEY_TILE, -(-span.stop // KEY_TILE))
            for rows, positions, found in verdicts:
                used = _extent(found[:, tiles].any(1), _query_tile(positions), len(positions))
                if used is not None:
                    local = slice(rows.start + used.start, rows.start + used.stop)
                    blocks.append(PairBlock(local, columns, positions[used], key_positions[span]))
            spans.append(slice(key_rows.start + span.start, key_rows.start + span.stop))
            before = columns.stop
    return tuple(spans), tuple(blocks)


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
