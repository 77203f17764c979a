"""Document masks: several texts packed into one sequence, each attending only to itself or to a text of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..core.broadcasting import broadcast_shapes
from ..core.tensor_memo import copy_on
from ..errors import MaskError
from .base import Kept, Mask, Pairs
from .index_checks import check_has_heads, check_known_ranges, check_range, whole_numbers
from .key_spans import KeySpan

CPU = torch.device("cpu")
MEND, MEND_KEYS = (
    "pass documents() one id for each position",
    "pass documents() one id in key_ids for each key position",
)
Ids: TypeAlias = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Sequence[Sequence[int]]]


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """ids[query position] == ids[key position]."""

    ids: Tensor

    @property
    def heads(self) -> int:
        """The number of heads that have ids of their own; 1 where all have the same."""
        return self.ids.shape[-2] if self.ids.ndim > 2 else 1

    def key_span(self) -> KeySpan | None:
        ids = copy_on(self.ids, CPU)
        if ids.ndim > 1 or (ids[1:] < ids[:-1]).any():
            return None
        first, last = torch.tensor([[0], [len(ids)]], device="cpu")
        edges = torch.cat([first, (ids[1:] != ids[:-1]).nonzero().flatten() + 1, last])

        def span(queries: range) -> tuple[Tensor, Tensor]:
            limits = torch.tensor([queries.start, queries.stop - 1], device="cpu")
            first, last = torch.searchsorted(edges, limits, right=True).tolist()
            starts, ends = edges[first - 1 : last], edges[first : last + 1]
            many = ends.clamp(max=queries.stop) - starts.clamp(min=queries.start)
            return starts.repeat_interleave(many), ends.repeat_interleave(many)

        return span

    def keep(self, grid: Pairs) -> Kept:
        if per_head := self.ids.ndim > 2:
            check_has_heads(self, grid)
        length = self.ids.shape[-1]
        check_known_ranges(repr(self), grid, (length, length), (MEND, MEND))
        return grid.by_query(self.ids_of, per_head=per_head) == grid.by_key(self.ids_of, per_head=per_head)

    def ids_of(self, positions: Tensor) -> Tensor:
        """The ids at positions (*batch, ·): (*batch, ·), or (*batch, heads, ·) where heads have their own."""
        return _ids_at(self, self.ids, positions, MEND)

    def __repr__(self) -> str:
        return f"documents({_shown(self.ids)})"


@dataclass(frozen=True, eq=False, repr=False)
class CrossDocuments(Mask):
    """query_ids[query position] == key_ids[key position]."""

    query_ids: Tensor
    key_ids: Tensor

    def key_span(self) -> KeySpan | None:
        of_queries, of_keys = copy_on(self.query_ids, CPU), copy_on(self.key_ids, CPU).contiguous()
        if of_queries.ndim > 1 or of_keys.ndim > 1 or (of_keys[1:] < of_keys[:-1]).any():
            return None

        def span(queries: range) -> tuple[Tensor, Tensor]:
            ids = of_queries[queries.start : queries.stop].contiguous()
            return torch.searchsorted(of_keys, ids), torch.searchsorted(of_keys, ids, right=True)

        return span

    def keep(self, grid: Pairs) -> Kept:
        lengths = self.query_ids.shape[-1], self.key_ids.shape[-1]
        check_known_ranges(repr(self), grid, lengths, (self._mend_queries(), MEND_KEYS))
        by_query, by_key = self.query_ids.ndim > 2, self.key_ids.ndim > 2
        if by_query or by_key:
            check_has_heads(self, grid)
        return grid.by_query(self._of_queries, per_head=by_query) == grid.by_key(self._of_keys, per_head=by_key)

    def _mend_queries(self) -> str:
        length = self.query_ids.shape[-1]
        return (
            f"query_ids are for the query positions 0..{length - 1}: give the queries these, as query_positions="
            f"range({length}); without them they are at the last positions of the keys"
        )

    def _of_queries(self, positions: Tensor) -> Tensor:
        return _ids_at(self, self.query_ids, positions, self._mend_queries())

    def _of_keys(self, positions: Tensor) -> Tensor:
        return _ids_at(self, self.key_ids, positions, MEND_KEYS)

    def __repr__(self) -> str:
        return f"documents({_shown(self.query_ids)}, {_shown(self.key_ids)})"


def documents(ids: Ids, key_ids: Ids | None = None) -> Mask:
    """Pairs within one document: *ids[query position] == ids[key position]*, or *== key_ids[key position]*.

    `causal() & documents(ids)` is for texts packed into one sequence: each attends to itself as if it were alone. With
    `key_ids` queries and keys are different sequences, packed each in its own way, as in cross-attention: a query
    attends to the keys that have its id, none where there are none. Query ids are read at query positions: pass
    `query_positions=range(M)` to `attention`, which without it places queries at the last positions of the keys;
    `regard.nn.Attention` places those of cross-attention at 0..M-1.

    Shapes: ids (L,), (batch, L), or (*batch, heads, L) for ids that differ between heads, as clusters do; heads may be
    1. They are whole numbers, for positions 0..L-1. `key_ids` likewise, of any other length. Ids need not be sorted,
    but if they are, every tile without a boundary between documents is EMPTY or FULL.

    A tensor is not copied: each call sees what was written to it, as in `where`. Anything else is.

    Raises:
        MaskError: ids are not whole numbers; at evaluation, a position without an id, or ids of heads where there is no
            head axis.

    >>> from regard import masks
    >>> masks.documents([7, 7, 9]).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    >>> masks.documents([7, 9], [7, 7, 8, 9]).dense(2, 4, query_positions=range(2)).int()
    tensor([[1, 1, 0, 0],
            [0, 0, 0, 1]], dtype=torch.int32)
    """
    if key_ids is None:
        return Documents(_checked("ids", ids))
    return CrossDocuments(_checked("query ids", ids), _checked("key_ids", key_ids))


def _checked(name: str, ids: Ids) -> Tensor:
    numbers = whole_numbers("documents", name, ids)
    if not numbers.ndim:
        raise MaskError(
            f"documents needs one id for each position, {name} of shape (L,), (batch, L) or (*batch, heads, L); it has "
            "a number"
        )
    return numbers


def _ids_at(mask: Mask, ids: Tensor, positions: Tensor, mend: str) -> Tensor:
    """The ids at positions (*batch, ·): (*batch, ·), or (*batch, heads, ·) for ids with an axis of heads."""
    length = ids.shape[-1]
    check_range(repr(mask), positions, length, mend)
    if ids.ndim > 2 and positions.ndim > 1:
        positions = positions.unsqueeze(-2)
    try:
        leading = broadcast_shapes(ids.shape[:-1], positions.shape[:-1])
    except RuntimeError:
        has, sits = ids.shape[:-1], positions.shape[:-1]
        of_heads = " and heads" if ids.ndim > 2 else ""
        raise MaskError(
            f"{mask!r} has the batch{of_heads} {tuple(has)}, but positions have the batch{of_heads} {tuple(sits)}: "
            "they need to broadcast"
        ) from None
    ids = copy_on(ids, positions.device).expand(*leading, length)
    return ids.gather(-1, positions.expand(*leading, positions.shape[-1]))


def _shown(ids: Tensor) -> str:
    return f"<{str(ids.dtype).removeprefix('torch.')} {tuple(ids.shape)}>"
