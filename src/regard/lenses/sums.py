"""Sums over rows and over columns of the weights."""

from __future__ import annotations

from .. import native
from .base import Frame, Tile


class RowTerms:
    """Σ_j w_ij · log₂ w_ij of each row: `sums` (B, H, M)."""

    terms = True

    def __init__(self, frame: Frame) -> None:
        self.sums = frame.zeros(frame.queries)

    def add(self, tile: Tile) -> None:
        if tile.terms is not None:
            self.sums[tile.batch, :, tile.rows].add_(tile.terms.sum(-1))

    def native(self) -> native.RowTerms:
        return native.RowTerms(self.sums)


class ColumnSums:
    """Σ_i w_ij of each column: `sums` (B, H, N)."""

    terms = False

    def __init__(self, frame: Frame) -> None:
        self.sums = frame.zeros(frame.keys)

    def add(self, tile: Tile) -> None:
        self.sums[tile.batch, :, tile.columns].add_(tile.weights.sum(-2))

    def native(self) -> native.ColumnSums:
        return native.ColumnSums(self.sums)
