"""Which tokens exist, and which documents they are of, for what a layer reads of the tokens before each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

from torch import Tensor

from ..core.grid import Grid
from ..errors import MaskError
from ..linear.document_batches import DocumentBatches, document_batches
from ..linear.linear_mask import read_mask
from ..masks import Mask

OfRows: TypeAlias = Callable[[Tensor, Tensor | None], Tensor]
"""A function of rows (batch, length, features), and of what was before them, to as many rows."""


@dataclass(frozen=True, eq=False)
class TokenMask:
    """The tokens (batch or 1, length, 1) that exist, bool, and their documents; None for all, and for one."""

    keep: Tensor | None = None
    documents: DocumentBatches | None = None

    @classmethod
    def from_mask(cls, mask: Mask | Tensor | None, tokens: Tensor) -> TokenMask:
        """Of the mask of a causal call over tokens (batch, length, dim).

        Raises:
            MaskError: a mask that linear attention cannot take, or that differs among heads.
        """
        if mask is None or not tokens.shape[1]:
            return cls()
        parts = read_mask(mask, causal=True)
        keep = parts.keep(Grid.from_lengths(1, tokens.shape[1], heads=True, device=tokens.device))
        if keep is not None and keep.ndim == 3:
            if keep.shape[1] != 1:
                raise MaskError(
                    f"the mask says for {keep.shape[1]} heads which tokens exist, and a convolution or shift needs "
                    "the same for all heads: (batch, 1, 1, N)"
                )
            keep = keep.squeeze(1)
        keep = None if keep is None else keep.expand(keep.shape[0] if keep.ndim == 2 else 1, -1).unsqueeze(-1)
        documents = None if parts.documents is None else document_batches(parts.documents, tokens.unsqueeze(1))
        return cls(keep, documents)

    def hide(self, rows: Tensor) -> Tensor:
        """The rows (batch, length, features) with zeros for tokens that do not exist."""
        return rows if self.keep is None else rows.where(self.keep, 0.0)

    def apply(self, compute: OfRows, rows: Tensor, before: Tensor | None) -> Tensor:
        """The result of `compute(rows, before)`, of each document by itself, and then without what was before."""
        rows = self.hide(rows)
        if self.documents is None:
            return compute(rows, before)

        def of_documents(own: Tensor, _: Tensor) -> Tensor:
            return compute(own.squeeze(1), None).unsqueeze(1)

        return self.documents.map(of_documents, [rows.unsqueeze(1)]).squeeze(1)


ALL_TOKENS = TokenMask()
"""Of a sequence without mask."""
