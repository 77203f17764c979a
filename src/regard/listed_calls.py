"""Small calls whose mask lists keys: which pairs exist is written at once, and kept for the call alone.

Lists are found anew for each call, so that what is memoized of a mask would serve it once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor

from .backends.base import ShortRows
from .biases import Bias
from .core.score_forms import DotPairs, PairForm
from .kernels.short import PreparedCall
from .masks import Mask
from .masks.base import And
from .masks.causal import Causal
from .masks.chosen import Chosen
from .tiles.pair_terms import PairTerms


@dataclass(frozen=True, eq=False, slots=True)
class ListedPairs:
    """The pairs that lists name, and which of them are causal, for queries at the last positions of the keys."""

    lists: Chosen
    causal: bool

    @classmethod
    def from_mask(cls, mask: Mask) -> ListedPairs | None:
        """Those of `masks.chosen` or `masks.blocks`, alone or joined to `masks.causal()`; None of any other mask."""
        if type(mask) is Chosen:
            return cls(mask, False)
        if type(mask) is And:
            left, right = mask.left, mask.right
            if type(left) is Causal and type(right) is Chosen:
                return cls(right, True)
            if type(left) is Chosen and type(right) is Causal:
                return cls(left, True)
        return None

    @property
    def kind(self) -> tuple[Any, ...]:
        """All but the numbers."""
        return self.lists.indices.shape, self.lists.rows, self.lists.columns, self.causal

    def fits(self, shape: Sequence[int], of_keys: Sequence[int]) -> bool:
        """Whether lists are of queries (B, H, M, ·), and name keys (B, Hk, N, ·): else a mask says what is wrong."""
        lists, (*leading, has, _) = self.lists, self.lists.indices.shape
        (batch, heads, queries), (key_heads, keys) = shape[:3], of_keys[1:3]
        if len(leading) > 2 or has not in (1, -(-queries // lists.rows)) or not lists.indices.is_cpu:
            return False
        if lists.largest is None or lists.largest > (keys - 1) // lists.columns:
            return False
        of_heads, of_batch = ([1, 1, *leading])[:-3:-1]
        return of_batch in (1, batch) and of_heads in (1, heads, key_heads)

    def keep(self, maker: ShortRows, heads: int, queries: int, keys: int) -> Tensor:
        """Which pairs exist, (B or 1, H or 1, M, N) bool, of so many heads and queries, and of keys that it fits."""
        indices = self.lists.indices
        while indices.ndim < 4:
            indices = indices.unsqueeze(0)
        if indices.shape[1] not in (1, heads):  # of key heads, each for a group of heads
            indices = indices.repeat_interleave(heads // indices.shape[1], 1)
        rows = self.lists.rows if indices.shape[2] > 1 else queries
        return maker.listed_pairs(indices, rows, self.lists.columns, queries, keys, causal=self.causal)


@dataclass(frozen=True, eq=False, slots=True)
class PreparedListedCall:
    """What is known of calls of a kind whose mask has other lists each time."""

    without_mask: PreparedCall
    maker: ShortRows

    def takes(self, pairs: PairForm) -> TypeGuard[DotPairs]:
        """Whether the pair form that a score gives is of these calls."""
        return self.without_mask.takes(pairs)

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        bias: Bias | None,
        sinks: Tensor | None,
        *,
        learned: bool,
    ) -> Tensor | None:
        """The output of such a call, which has no bias, as `PreparedCall.run`."""
        listed = None if mask is None else ListedPairs.from_mask(mask)
        if listed is None:
            raise AssertionError("a call of another kind")
        keep = listed.keep(self.maker, query.shape[1], query.shape[2], value.shape[2])
        terms = PairTerms(None, None, keep)
        return self.without_mask.run_with(terms, query, key, value, mask, bias, sinks, learned=learned)
