"""Causal: no key later than the query."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Kept, Mask, Pairs


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """Key position <= query position."""

    @property
    def by_distance(self) -> bool:
        return True

    def keep(self, grid: Pairs) -> Kept:
        return grid.key <= grid.query

    def __repr__(self) -> str:
        return "causal()"


def causal() -> Mask:
    """Pairs with *key position <= query position* (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3).

    Queries sit at the last M of the keys' positions unless the call gives positions, so that one query after a
    cache of N keys sees all of them. torch's `is_causal` aligns to the start instead: give
    `query_positions=torch.arange(M)` for that.

    >>> from regard import masks
    >>> masks.causal().dense(2, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return Causal()
