"""Gumbel noise of scores, by which the largest is a draw from their softmax."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.dropout import Dropout
from ..core.grid import Grid
from .base import Bias


@dataclass(frozen=True, eq=False, repr=False)
class GumbelNoise(Bias):
    """-log(-log u), u a hash of seed, batch, head and positions in (0, 1): the same in any tile, and nothing is stored.

    seed: an int64 tensor of shape (). batch: the axes in front of heads. heads: how many, None without a head axis.
    """

    seed: Tensor
    batch: tuple[int, ...]
    heads: int | None

    def values(self, grid: Grid) -> Tensor:
        count, heads = torch.Size(self.batch).numel(), 1 if self.heads is None else self.heads
        numbers = torch.arange(count * heads, device=grid.device).view(count, heads, 1)
        sides = grid.query_positions[..., grid.rows], grid.key_positions[..., grid.columns]
        queries, keys = (
            side.long() if side.ndim == 1 else side.long().expand(*self.batch, -1).reshape(count, 1, -1)
            for side in sides
        )
        bits = Dropout(0.0, self.seed).pair_hashes(numbers, queries, keys)  # [b, heads, m, n]
        # In float64: of the largest hashes 1 - u is below what float32 tells from 0.
        uniform = (bits.double() + (2.0**31 + 0.5)) / 2.0**32
        noise = -torch.log(-torch.log(uniform)).float()
        leading = self.batch if self.heads is None else (*self.batch, self.heads)
        return noise.reshape(*leading, *noise.shape[-2:])

    def __repr__(self) -> str:
        return "gumbel noise"
