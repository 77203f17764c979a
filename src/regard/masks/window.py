"""Sliding windows: a limited distance between query and key."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Kept, Mask, Pairs
from .index_checks import checked_count
from .key_spans import KeySpan

MOST_DISTANT = 2**62
"""The widest side of a window whose spans are computed."""


@dataclass(frozen=True, repr=False)
class Window(Mask):
    """-after <= query position - key position <= before."""

    before: int | None
    after: int | None

    @property
    def by_distance(self) -> bool:
        return True

    def key_span(self) -> KeySpan | None:
        before, after = self.before, self.after
        if max(before or 0, after or 0) > MOST_DISTANT:  # a sum with a position would leave int64
            return None
        return lambda queries: (
            None if before is None else torch.arange(queries.start - before, queries.stop - before, device="cpu"),
            None if after is None else torch.arange(queries.start + after + 1, queries.stop + after + 1, device="cpu"),
        )

    def keep(self, grid: Pairs) -> Kept:
        before, after, distance = self.before, self.after, grid.query - grid.key
        if after is None:
            return _all_pairs(grid) if before is None else distance <= before
        return distance >= -after if before is None else (distance >= -after) & (distance <= before)

    def __repr__(self) -> str:
        sides = {"before": self.before, "after": self.after}
        return f"window({', '.join(f'{side}={limit}' for side, limit in sides.items() if limit is not None)})"


def _all_pairs(grid: Pairs) -> Kept:
    return grid.by_query(lambda positions: torch.ones_like(positions, dtype=torch.bool))


def window(before: int | None = None, after: int | None = None) -> Mask:
    """Pairs with *-after <= query position - key position <= before*, a closed interval.

    `before` and `after` count the neighbours on each side, without the position itself; None = unlimited. So
    `causal() & window(before=511)` attends to 512 keys, which Mistral calls a window of 512 (Jiang et al. 2023, arXiv
    2310.06825, section 2), and `window(256, 256)` is Longformer's window of 512, which is 513 keys with the position
    itself (Beltagy et al. 2020, arXiv 2004.05150, section 3.1).

    Raises:
        MaskError: a count that is negative, above 2⁶³ - 1 or not a whole number.

    >>> from regard import masks
    >>> masks.window(before=1, after=0).dense(3, 3).int()
    tensor([[1, 0, 0],
            [1, 1, 0],
            [0, 1, 1]], dtype=torch.int32)
    """
    return Window(
        None if before is None else checked_count("window's before", before),
        None if after is None else checked_count("window's after", after),
    )
