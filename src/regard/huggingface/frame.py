"""Where the queries and the keys of one layer sit, as transformers counts them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Frame:
    """M queries from position `query_offset` on, and N keys from `key_offset` on: a cache may have dropped the first.

    A static cache has keys beyond the last query, not yet written. Masks read here count from the first key that is
    there: keys sit at 0..N-1, queries at first..last.
    """

    batch: int
    queries: int
    keys: int
    query_offset: int
    key_offset: int
    device: torch.device

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """That of a mask over it: (batch, 1, M, N), the same for all heads."""
        return self.batch, 1, self.queries, self.keys

    @property
    def first(self) -> int:
        """The position of the first query, where the first key has position 0."""
        return self.query_offset - self.key_offset

    @property
    def last(self) -> int:
        """The position of the last query, where the first key has position 0."""
        return self.first + self.queries - 1

    @property
    def query_positions(self) -> Tensor | None:
        """Positions of the queries, (M,); None where they are the last M of the keys, as attention takes it."""
        if self.last == self.keys - 1:
            return None
        return torch.arange(self.first, self.last + 1, device=self.device)
