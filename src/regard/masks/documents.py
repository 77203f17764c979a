"""Document masks: several texts packed into one sequence, each attending only to itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MaskError
from .base import Kept, Mask, Pairs
from .index_checks import check_range, whole_numbers
from .key_spans import KeySpan


@dataclass(frozen=True, eq=False, repr=False)
class Documents(Mask):
    """ids[query position] == ids[key position]."""

    ids: Tensor

    def key_span(self) -> KeySpan | None:
        ids = self.ids.cpu()
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
        return grid.by_query(self.ids_of) == grid.by_key(self.ids_of)

    def ids_of(self, positions: Tensor) -> Tensor:
        """The document ids at the given positions: (*batch, ·)."""
        length = self.ids.shape[-1]
        check_range(repr(self), positions, length, "pass documents() one id for each position")
        try:
            batch = torch.broadcast_shapes(self.ids.shape[:-1], positions.shape[:-1])
        except RuntimeError:
            raise MaskError(
                f"{self!r} has the batch {tuple(self.ids.shape[:-1])}, but positions have the batch "
                f"{tuple(positions.shape[:-1])}: they need to broadcast"
            ) from None
        ids = self.ids.to(positions.device).expand(*batch, length)
        return ids.gather(-1, positions.expand(*batch, positions.shape[-1]))

    def __repr__(self) -> str:
        return f"documents(<{str(self.ids.dtype).removeprefix('torch.')} {tuple(self.ids.shape)}>)"


def documents(ids: Tensor | Sequence[int] | Sequence[Sequence[int]]) -> Mask:
    """Pairs within one document: *ids[query position] == ids[key position]*.

    `causal() & documents(ids)` is for texts packed into one sequence: each attends to itself as if it were alone.

    Shapes: ids is (L,) or (*batch, L), whole numbers; positions are in 0..L-1. Ids need not be sorted, but if they
    are, every tile without a boundary between documents is EMPTY or FULL.

    Raises:
        MaskError: ids are not whole numbers; at evaluation, a position without an id.

    >>> from regard import masks
    >>> masks.documents([7, 7, 9]).dense(3, 3).int()
    tensor([[1, 1, 0],
            [1, 1, 0],
            [0, 0, 1]], dtype=torch.int32)
    """
    numbers = whole_numbers("documents", "ids", ids)
    if not numbers.ndim:
        raise MaskError("documents needs one id for each position, ids of shape (L,) or (*batch, L); it has a number")
    return Documents(numbers)
