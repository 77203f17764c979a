"""NaN and infinity in linear attention: they reach the rows that attend to them, and no others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.finite import all_finite, waits
from ..core.torch_modes import under_dispatch_mode, under_transform
from .document_batches import DocumentBatches


@dataclass(frozen=True, eq=False)
class NonfiniteRows:
    """Rows with NaN or infinity, which are computed as 0, and after which the rows that attend to them become NaN.

    A product with 0 would carry NaN to rows that do not attend to it. Shapes: query (B, H, M), key (B, Hk, N), bool;
    keep as `kept_keys` returns it.
    """

    query: Tensor
    key: Tensor
    keep: Tensor | None

    @classmethod
    def find(
        cls, query: Tensor, key: Tensor, value: Tensor, gates: Sequence[Tensor | None], keep: Tensor | None
    ) -> NonfiniteRows | None:
        """The rows of tensors (B, heads, length, ·) and of gates of keys; None where all numbers are found finite.

        A single row of each needs no care: no product with 0 is between them. gates: (B, Hk, N) or (B, Hk, N, ·) each.
        """
        if query.shape[2] == key.shape[2] == 1 and keep is None:
            return None
        finite = not (is_traced() or waits(query)) and all_finite(query, key) and all_finite(value)
        if finite and all(gate is None or all_finite(gate) for gate in gates):
            return None
        bad = ~(key.isfinite().all(-1) & value.isfinite().all(-1))
        for gate in gates:
            if gate is not None:
                bad = bad | ~(gate.isfinite().all(-1) if gate.ndim == 4 else gate.isfinite())
        return cls(~query.isfinite().all(-1), bad, keep)

    def mark_rows(
        self,
        output: Tensor,
        causal: bool,
        documents: DocumentBatches | None,
        elsewhere: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """The output (B, H, M, Dv) with NaN in the rows that attend to such a key, or are such a query.

        elsewhere: of keys of other processes, whether a row attends to such a key, and to any key: bool (B, Hk, M).
        """
        queries = self.query.shape[-1]
        sees_bad = _attends_to(self.key, queries, causal, documents)
        exists = torch.ones_like(self.key) if self.keep is None else self.keep.expand_as(self.key)
        sees_any = _attends_to(exists, queries, causal, documents)
        if elsewhere is not None:
            sees_bad, sees_any = sees_bad | elsewhere[0], sees_any | elsewhere[1]
        group = self.query.shape[1] // max(self.key.shape[1], 1)
        sees_bad, sees_any = (seen.repeat_interleave(group, 1) for seen in (sees_bad, sees_any))
        return output.masked_fill((sees_bad | (self.query & sees_any)).unsqueeze(-1), torch.nan)

    def mark_state(self, state: Tensor) -> Tensor:
        """The state (B, Hk, D, Dv) with NaN where a key was such a row."""
        return state.masked_fill(self.key.any(-1)[..., None, None], torch.nan)


def _attends_to(marked: Tensor, queries: int, causal: bool, documents: DocumentBatches | None) -> Tensor:
    """Whether each query attends to a marked key: bool (B, Hk, N) to (B, Hk, M)."""

    def attends(marked: Tensor, exists: Tensor | None = None) -> Tensor:
        marked = marked if exists is None else marked & exists.unsqueeze(-1)
        return marked.cumsum(2) > 0 if causal else marked.any(2, keepdim=True).expand_as(marked)

    if documents is not None:
        return documents.map(attends, [marked.unsqueeze(-1)]).squeeze(-1)
    if causal:
        return attends(marked.unsqueeze(-1)).squeeze(-1)
    return marked.any(2, keepdim=True).expand(*marked.shape[:2], queries)


def is_traced() -> bool:
    """Whether tensors may have no values, as under torch.compile, torch.func and FakeTensorMode."""
    return under_transform() or under_dispatch_mode()
