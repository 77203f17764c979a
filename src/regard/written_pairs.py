"""Small calls whose mask has other numbers each time: which pairs exist is written for the call, and kept for it alone.

Lists of keys, and ids of each head or sequence, are found anew for each call, so that what is memoized of a mask would
serve it once. Of these masks only the kind is known before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .backends.base import ShortRows
from .biases import Bias
from .core.score_forms import DotPairs, PairForm
from .kernels.short import PreparedCall
from .masks import Mask
from .masks.base import And
from .masks.causal import Causal
from .masks.chosen import Chosen
from .masks.documents import CrossDocuments, Documents
from .masks.tensor_mask import TensorMask
from .tiles.pair_terms import PairTerms


class WrittenPairs(ABC):
    """The pairs of a mask with tensors, which each call writes, for queries at the last positions of the keys."""

    @property
    @abstractmethod
    def kind(self) -> tuple[Any, ...]:
        """All but the numbers."""

    @abstractmethod
    def fits(self, shape: Sequence[int], of_keys: Sequence[int]) -> bool:
        """Whether they are of queries (B, H, M, ·) and keys (B, Hk, N, ·): else the mask says what is wrong."""

    @abstractmethod
    def keep(self, maker: ShortRows, heads: int, queries: int, keys: int) -> Tensor:
        """Which pairs exist, (B or 1, H or 1, M, N) bool, of so many heads and queries, and of keys that they fit."""


@dataclass(frozen=True, eq=False, slots=True)
class ListedPairs(WrittenPairs):
    """The pairs that lists name, and which of them are causal."""

    lists: Chosen
    causal: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        return Chosen, self.lists.indices.shape, self.lists.rows, self.lists.columns, self.causal

    def fits(self, shape: Sequence[int], of_keys: Sequence[int]) -> bool:
        lists, (*leading, has, _) = self.lists, self.lists.indices.shape
        (batch, heads, queries), (key_heads, keys) = shape[:3], of_keys[1:3]
        if len(leading) > 2 or has not in (1, -(-queries // lists.rows)) or not lists.indices.is_cpu:
            return False
        if lists.largest is None or lists.largest > (keys - 1) // lists.columns:
            return False
        of_heads, of_batch = ([1, 1, *leading])[:-3:-1]
        return of_batch in (1, batch) and of_heads in (1, heads, key_heads)

    def keep(self, maker: ShortRows, heads: int, queries: int, keys: int) -> Tensor:
        indices = self.lists.indices
        while indices.ndim < 4:
            indices = indices.unsqueeze(0)
        if indices.shape[1] not in (1, heads):  # of key heads, each for a group of heads
            indices = indices.repeat_interleave(heads // indices.shape[1], 1)
        rows = self.lists.rows if indices.shape[2] > 1 else queries
        return maker.listed_pairs(indices, rows, self.lists.columns, queries, keys, causal=self.causal)


@dataclass(frozen=True, eq=False, slots=True)
class EqualIds(WrittenPairs):
    """The pairs of queries and keys with equal ids, of each sequence or head its own, and which of them are causal."""

    query_ids: Tensor
    key_ids: Tensor
    causal: bool

    @property
    def kind(self) -> tuple[Any, ...]:
        return Documents, self.query_ids.shape, self.key_ids.shape, self.causal

    def fits(self, shape: Sequence[int], of_keys: Sequence[int]) -> bool:
        (batch, heads, queries, _), (_, key_heads, keys, _), of_heads = shape, of_keys, 1
        if queries > keys:
            return False
        for ids in (self.query_ids,) if self.key_ids is self.query_ids else (self.query_ids, self.key_ids):
            if not (type(ids) is Tensor and torch._C._has_storage(ids) and ids.is_cpu and ids.ndim <= 3):
                return False
            *leading, length = ids.shape
            if length < keys or (leading and leading[0] not in (1, batch)):
                return False
            own = leading[1] if len(leading) > 1 else 1
            if own not in (1, heads, key_heads) or 1 != own != of_heads != 1:
                return False
            of_heads = max(own, of_heads)
        return True

    def keep(self, maker: ShortRows, heads: int, queries: int, keys: int) -> Tensor:
        query_ids = _ids_at(self.query_ids, range(keys - queries, keys), heads)
        key_ids = query_ids
        if self.key_ids is not self.query_ids or queries < keys:
            key_ids = _ids_at(self.key_ids, range(keys), heads)
        return maker.equal_ids(query_ids, key_ids, causal=self.causal)


def _ids_at(ids: Tensor, positions: range, heads: int) -> Tensor:
    """Ids (L,), (B or 1, L) or (B or 1, H or Hk or 1, L) at positions: (B or 1, H or 1, ·) int64, rows contiguous."""
    if ids.ndim < 3:
        ids = ids.unsqueeze(-2) if ids.ndim == 2 else ids[None, None]
    if len(positions) < ids.shape[2]:
        ids = ids.narrow(2, positions.start, len(positions))
    if ids.shape[1] not in (1, heads):  # of key heads, each for a group of heads
        ids = ids.repeat_interleave(heads // ids.shape[1], 1)
    if ids.dtype is not torch.int64:
        ids = ids.long()
    return ids if ids.stride(2) == 1 else ids.contiguous()


def written_pairs(mask: Mask) -> WrittenPairs | None:
    """Those of lists, or of ids that differ between sequences or heads, alone or with `masks.causal()`; None of others.

    Ids of one row have spans of keys, where they are sorted, which a kernel reads in their place.
    """
    causal = False
    if type(mask) is And:
        left, right = mask.left, mask.right
        if type(left) is Causal:
            mask, causal = right, True
        elif type(right) is Causal:
            mask, causal = left, True
    if type(mask) is Chosen:
        return ListedPairs(mask, causal)
    if type(mask) is Documents:
        return EqualIds(mask.ids, mask.ids, causal) if mask.ids.ndim > 1 else None
    if type(mask) is CrossDocuments:
        differ = mask.query_ids.ndim > 1 or mask.key_ids.ndim > 1
        return EqualIds(mask.query_ids, mask.key_ids, causal) if differ else None
    return None


@dataclass(frozen=True, eq=False, slots=True)
class PreparedWritingCall:
    """What is known of calls of a kind whose mask has other numbers each time."""

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
        written = None if mask is None else written_pairs(mask)
        if written is None:
            raise AssertionError("a call of another kind")
        keep = written.keep(self.maker, query.shape[1], query.shape[2], value.shape[2])
        if learned:  # gradients are of these pairs, whatever is written to the tensors of the mask
            mask = TensorMask(keep)
        terms = PairTerms(None, None, keep)
        return self.without_mask.run_with(terms, query, key, value, mask, bias, sinks, learned=learned)
