"""Biases whose numbers of a row depend on all keys of the row: they are computed for whole rows, a few at a time."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor

from ..core.grid import WHOLE, Grid
from .distance_tables import CallBias

if TYPE_CHECKING:
    from ..masks import Mask


class RowBias(CallBias):
    """A bias from tensors of one call, whose numbers follow from a whole row; `of_rows` computes some rows.

    query (..., heads, M, D) is one of its tensors, whose heads the mask is for. mask: that of the call, also where the
    keys are computed in parts by other masks.
    """

    query: Tensor
    mask: Mask | None

    @abstractmethod
    def of_rows(self, grid: Grid, keep: Tensor | None) -> Tensor:
        """The numbers of some rows over their keys, (..., heads, m, n), differentiable in the bias's tensors.

        grid: some rows, and columns 0..n-1, beyond which they attend to nothing. keep (..., heads or 1, m, n): the
        pairs that exist; None for all.
        """

    def values(self, grid: Grid) -> Tensor:
        rows = grid.tile(grid.rows, WHOLE)
        keep = None if self.mask is None else self.mask.evaluate(rows)
        heads = self.query.shape[-3] if grid.heads else 1
        if keep is not None and grid.heads and keep.ndim > 2 and keep.shape[-3] not in (1, heads):
            keep = keep.repeat_interleave(heads // keep.shape[-3], -3)
        return self.of_rows(rows, keep)[..., grid.columns]
