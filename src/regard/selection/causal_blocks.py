"""What is decided of blocks of keys before any score: the later ones, and those that a query sees in any case."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ..core.grid import WHOLE
from ..core.torch_modes import no_mode_active

MAX_TABLES = 64
"""The number of memoized tables."""
MAX_NUMBERS = 2**16
"""The most numbers of one."""


@dataclass(frozen=True, slots=True)
class CausalBlocks:
    """Blocks of `size` keys, for queries at the last positions of the keys.

    local: so many blocks up to the query's own, and initial: so many at the beginning, are seen in any case.
    """

    queries: int
    keys: int
    size: int
    local: int = 0
    initial: int = 0

    def decide(self, scores: Tensor, rows: slice) -> Tensor:
        """The scores of some rows, (..., m, blocks), with -infinity for blocks that begin after the query.

        Blocks that are seen in any case have infinity.
        """
        start, stop = (0, self.queries) if rows == WHOLE else (rows.start, rows.stop)
        numbers = (stop - start) * scores.shape[-1]
        if torch.compiler.is_compiling() or not no_mode_active() or not scores.is_cpu or numbers > MAX_NUMBERS:
            undecided, decided = _tables(self, start, stop, scores.shape[-1], scores.device)
        else:
            undecided, decided = _memoized_tables(self, start, stop, scores.shape[-1])
        return torch.where(undecided, scores, decided)


def _tables(blocks: CausalBlocks, start: int, stop: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Which blocks are left to their scores, and infinity or -infinity for the others: (m, count) each."""
    first = blocks.keys - blocks.queries
    own = torch.arange(first + start, first + stop, device=device).unsqueeze(-1) // blocks.size
    block = torch.arange(count, device=device)
    later = block > own
    always = ~later & ((block > own - blocks.local) | (block < blocks.initial))
    infinity = torch.full((), float("inf"), device=device)
    return ~(later | always), torch.where(later, -infinity, infinity)


@lru_cache(MAX_TABLES)
def _memoized_tables(blocks: CausalBlocks, start: int, stop: int, count: int) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):
        return _tables(blocks, start, stop, count, torch.device("cpu"))
