"""The segments of a shard, each of them the positions of one piece and one sequence, and their place in the whole.

A piece is a range of consecutive positions that a process has. A sequence is a row of the batch, or a document of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from ..linear.document_batches import DocumentBatches
from .layout import Shards
from .peers import Peers


class Cut(Protocol):
    """A way to cut tensors (batch, heads, n, ...) into parts whose rows are segments, and to join results of these."""

    def split(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[list[Any], Tensor | None]]:
        """Parts (rows, heads, width, ...), and which positions exist in them, (rows, 1, width); None for all."""
        ...

    def join(self, results: Sequence[Tensor], batch: int) -> Tensor:
        """Results (rows, heads, width, ·) as (batch, heads, n, ·)."""
        ...


@dataclass(frozen=True)
class PieceCut:
    """Parts that are the pieces of a shard; their rows are those of the batch."""

    rows: tuple[slice, ...]

    def split(self, tensors: Sequence[Tensor | None]) -> Iterator[tuple[list[Any], None]]:
        """Views of the pieces."""
        for rows in self.rows:
            yield [None if tensor is None else tensor[:, :, rows] for tensor in tensors], None

    def join(self, results: Sequence[Tensor], batch: int) -> Tensor:
        """The pieces after each other."""
        return results[0] if len(results) == 1 else torch.cat([*results], 2)


@dataclass(frozen=True, eq=False)
class Segments:
    """The segments of this process, in the order of the rows of all parts, and the sequences of all processes.

    sizes: rows of each part. present (pieces, sequences): bool, whether a piece has positions of a sequence; a document
    in one piece alone is none of these. entry (segments,): which of this process's present (piece, sequence) a segment
    is, counted in the order of pieces; -1 for a document in one piece alone.
    """

    cut: Cut
    sizes: tuple[int, ...]
    present: Tensor
    entry: Tensor

    @property
    def of_entries(self) -> Tensor:
        """The segment of each entry, (E,)."""
        found = (self.entry >= 0).nonzero().flatten()
        return found[self.entry[found].argsort()]

    def per_part(self, entries: Tensor) -> list[Tensor]:
        """Values of entries (E, ...) as those of the rows of each part; zeros for a document in one piece alone."""
        padded = torch.cat([entries, entries.new_zeros(1, *entries.shape[1:])])
        return [padded[rows] for rows in self.entry.to(entries.device).split(self.sizes)]


def cut_pieces(shards: Shards, rank: int, pieces: Sequence[tuple[int, range]], batch: int) -> Segments:
    """The segments of a shard without documents.

    pieces: the process and the positions of each piece, in the order of positions.
    """
    order = [positions for _, positions in pieces]
    own = shards.rows(rank)
    earlier = sorted(order.index(positions) for _, positions in own)
    entry = [earlier.index(order.index(positions)) * batch + row for _, positions in own for row in range(batch)]
    present = torch.ones(len(pieces), batch, dtype=torch.bool)
    return Segments(PieceCut(tuple(rows for rows, _ in own)), (batch,) * len(own), present, torch.tensor(entry))


@dataclass(frozen=True, eq=False)
class DocumentTable:
    """The documents of a shard's segments: the piece, the row of the batch and the id of each, int64 (segments, 3)."""

    batches: DocumentBatches
    rows: Tensor

    @classmethod
    def from_batches(cls, batches: DocumentBatches, ids: Tensor, piece_of: Tensor) -> DocumentTable:
        """The table of batches of documents with ids (batch, n), whose tokens are in the pieces `piece_of` (n,)."""
        first = torch.cat([index[:, 0] for index in batches.indices]).cpu()
        row, token = first // ids.shape[1], first % ids.shape[1]
        return cls(batches, torch.stack([piece_of[token], row, ids.cpu()[row, token]], 1))

    def gather(self, peers: Peers, counts: Sequence[int], pieces: int) -> Segments:
        """The segments of this process; those of all processes, of which there are `counts`, are gathered."""
        padded = self.rows.new_zeros(max(counts), 3)
        padded[: len(self.rows)] = self.rows
        tables = peers.all_gather(padded.to(peers.device), "while document ids were gathered")
        every = torch.cat([table[:count].cpu() for table, count in zip(tables, counts, strict=True)])
        _, document, times = every[:, 1:].unique(dim=0, return_inverse=True, return_counts=True)
        shared = times > 1
        sequence = (shared.cumsum(0) - 1).masked_fill(~shared, -1)[document]  # of each segment of all processes
        present = torch.zeros(pieces, int(shared.sum()), dtype=torch.bool)
        here = sequence >= 0
        present[every[here, 0], sequence[here]] = True
        first, last = list(pairwise(accumulate(counts, initial=0)))[peers.rank]
        mine, own = sequence[first:last], torch.zeros_like(present)
        inside = mine >= 0
        own[self.rows[inside, 0], mine[inside]] = True
        number = (own.flatten().cumsum(0) - 1).view_as(own)
        entry = torch.full_like(mine, -1)
        entry[inside] = number[self.rows[inside, 0], mine[inside]]
        return Segments(self.batches, tuple(map(len, self.batches.indices)), present, entry)
