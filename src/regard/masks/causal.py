"""The causal mask: key position <= query position."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .base import Kept, Mask, Pairs
from .key_spans import KeySpan


@dataclass(frozen=True, repr=False)
class Causal(Mask):
    """Key position <= query position."""

    @property
    def by_distance(self) -> bool:
        return True

    def key_span(self) -> KeySpan:
        return lambda queries: (None, torch.arange(queries.start + 1, queries.stop + 1, device="cpu"))

    def keep(self, grid: Pairs) -> Kept:
        return grid.key <= grid.query

    def __repr__(self) -> str:
        return "causal()"


def causal() -> Mask:
    """Pairs with *key position <= query position* (Vaswani et al. 2017, arXiv 1706.03762, section 3.2.3).

    By default the M queries have the last M positions of the keys, so that a single query after a cache of N keys
    attends to all of them. torch's `is_causal` aligns queries to the first keys instead: pass
    `query_positions=torch.arange(M)` for that.

    >>> from regard import masks
    >>> masks.causal().dense(2, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    return Causal()
