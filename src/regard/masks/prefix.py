"""Prefix masks: every query attends to the first keys."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from .base import Kept, Mask, Pairs
from .index_checks import checked_count
from .key_spans import KeySpan
from .padding import checked_lengths, keys_before


@dataclass(frozen=True, repr=False)
class Prefix(Mask):
    """Key position < length."""

    length: int

    def key_span(self) -> KeySpan:
        return lambda queries: (None, self.length)

    def keep(self, grid: Pairs) -> Kept:
        return grid.key < self.length

    def __repr__(self) -> str:
        return f"prefix({self.length})"


@dataclass(frozen=True, eq=False, repr=False)
class PrefixPerBatch(Mask):
    """Key position < length, per sequence of the batch."""

    lengths: Tensor

    def keep(self, grid: Pairs) -> Kept:
        return keys_before(self.lengths, grid)

    def __repr__(self) -> str:
        return f"prefix({self.lengths.tolist()})"


def prefix(length: int | Tensor | Sequence[int]) -> Mask:
    """Pairs with *key position < length*: every query attends to keys 0..length-1.

    `causal() | prefix(p)` is the prefix language model (Raffel et al. 2020, arXiv 1910.10683, section 3.2.1);
    `causal() & (window(before=w) | prefix(4))` keeps StreamingLLM's four attention sinks (Xiao et al. 2024, arXiv
    2309.17453, section 3.2; there positions are counted within the cache, here they are those of the text).

    Shapes: length is a number, or (*batch).

    A tensor is not copied: each call sees what was written to it, as in `where`. Anything else is.

    Raises:
        MaskError: a length that is negative, above 2⁶³ - 1 or not a whole number.

    >>> from regard import masks
    >>> (masks.causal() | masks.prefix(2)).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [1, 1, 1]], dtype=torch.int32)
    """
    if isinstance(length, int):
        return Prefix(checked_count("prefix's length", length))
    return PrefixPerBatch(checked_lengths("prefix", "lengths", length))
