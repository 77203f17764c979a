"""The weights of tiles from the log-sum-exp of their rows: what lenses look at."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from .. import native
from ..core.score_forms import DotPairs, at_least_float32
from .batched_problem import Flat
from .tile_bias import biasing
from .tile_scores import LOG2_E, scoring

FAR = 1e30
"""What stands for infinity in a logarithm of base 2: its power is 0, and 0 times it is 0, not NaN."""


class Weighing(Protocol):
    """One way to make weights."""

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n), and, if these are wanted, the terms weight · log₂ weight, in memory that is kept."""
        ...


def weighing_of(flat: Flat, lse: Tensor) -> Weighing:
    """The way for a problem; lse (b, H, M, 1), `FAR` for rows whose weights are to be 0."""
    problem, pairs = flat.problem, flat.pairs
    if isinstance(pairs, DotPairs) and problem.bias is None:
        if native.reads(pairs.query, pairs.key):
            return InNativeCode(flat, pairs, lse)
        if problem.softcap is None:
            return FromLogs(ProductLogs(flat, pairs, lse))
    return FromLogs(Logs(flat, lse))


class InNativeCode:
    """Product, power and mask in one pass."""

    def __init__(self, flat: Flat, pairs: DotPairs, lse: Tensor) -> None:
        self.flat, self.pairs, self.lse = flat, pairs, lse.squeeze(-1)
        self.room: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        query, key = self.pairs.query[:, :, rows], self.pairs.key[:, :, columns]
        sizes = torch.Size((*query.shape[:3], key.shape[2]))
        self.room = _room(self.room, self.lse, 2 * sizes.numel())
        weights, logs = self.room[: 2 * sizes.numel()].view(2, *sizes).unbind()
        native.write_weights(
            query,
            key,
            self.pairs.scale,
            self.lse[:, :, rows],
            weights,
            terms=logs if terms else None,
            keep=self.flat.keep(rows, columns) if masked else None,
            softcap=self.flat.problem.softcap,
        )
        return weights, logs if terms else None


class FromLogs:
    """Powers of logarithms to the base 2."""

    def __init__(self, logs: ProductLogs | Logs) -> None:
        self.logs = logs
        self.spare: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        exponents = self.logs.tile(rows, columns, masked=masked)
        if not terms:
            return exponents.exp2_(), None
        self.spare = _room(self.spare, exponents, exponents.numel())
        weights = torch.exp2(exponents, out=self.spare[: exponents.numel()].view_as(exponents))
        return weights, exponents.mul_(weights)


class ProductLogs:
    """log₂ w = q · k · scale · log₂ e - lse · log₂ e, with the difference in the product, in memory that is kept."""

    def __init__(self, flat: Flat, pairs: DotPairs, lse: Tensor) -> None:
        self.flat, self.query, self.factor = flat, pairs.query, pairs.scale * LOG2_E
        self.key = at_least_float32(pairs.key).flatten(0, 1)  # [b·Hk, N, D]
        self.lse = lse * -LOG2_E
        self.room: Tensor | None = None
        self._row: tuple[slice, Tensor, Tensor] | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """(b, H, m, n), to be written into."""
        query, offset = self._of(rows)
        key = self.key[:, columns]
        sizes = torch.Size((*query.shape[:2], key.shape[1]))
        self.room = _room(self.room, query, sizes.numel())
        product = torch.baddbmm(offset, query, key.mT, out=self.room[: sizes.numel()].view(sizes))
        tile = product.view(*self.query.shape[:2], rows.stop - rows.start, sizes[2])
        if masked and (keep := self.flat.keep(rows, columns)) is not None:
            tile.add_(torch.zeros(keep.shape, dtype=tile.dtype, device=tile.device).masked_fill_(~keep, -FAR))
        return tile

    def _of(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Query rows times the factor and offsets, (b·Hk, group·m, D or 1): heads that share a key become its rows."""
        if self._row is None or self._row[0] != rows:
            query = at_least_float32(self.query[:, :, rows]) * self.factor
            query, offset = (of.reshape(len(self.key), -1, of.shape[-1]) for of in (query, self.lse[:, :, rows]))
            self._row = rows, query, offset
        return self._row[1:]


class Logs:
    """log₂ w = (softcap(f(q, k)) + bias - lse) · log₂ e, one step after another."""

    def __init__(self, flat: Flat, lse: Tensor) -> None:
        self.flat, self.lse = flat, lse
        self.scoring, self.biasing, self.softcap = scoring(flat.pairs), biasing(flat), flat.problem.softcap

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """(b, H, m, n), to be written into."""
        scores = self.scoring.scores(rows, columns)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.biasing is not None:
            scores.add_(self.biasing.values(rows, columns))
        scores.sub_(self.lse[:, :, rows])
        if masked and (keep := self.flat.keep(rows, columns)) is not None:
            scores.add_(torch.zeros(keep.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~keep, -FAR))
        # A bias may be -inf, or so far below 0 that this makes it so.
        return scores.mul_(LOG2_E).clamp_(min=-2 * FAR)


def _room(room: Tensor | None, like: Tensor, numbers: int) -> Tensor:
    """Memory for so many numbers at least, the same as before where that is enough."""
    return like.new_empty(numbers) if room is None or room.numel() < numbers else room
