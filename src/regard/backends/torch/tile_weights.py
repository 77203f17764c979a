"""The weights of tiles by torch, recomputed from the log-sum-exp of their rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem
from ...core.problem import Problem
from ...core.score_forms import DotPairs, at_least_float32
from ...lenses.forms import FAR, WeightForm
from ...tiles.tile_bias import make_tile_bias
from ...tiles.tile_size import reused_buffer
from ..base import TileWriter
from .tile_scores import LOG2_E, make_tile_scores


class WeightsByTorch:
    """Tiles of weights of any problem, on any device."""

    def reduces(self, problem: Problem) -> bool:
        """No: tiles are added up by the lenses."""
        return False

    def takes(self, form: WeightForm) -> bool:
        """None: see `reduces`."""
        return False

    def reduce(self, batched: BatchedProblem, lse: Tensor, forms: Sequence[WeightForm]) -> None:
        """Not called: see `reduces`."""
        raise AssertionError("torch has no pass that adds up weights")

    def writer(self, batched: BatchedProblem, lse: Tensor) -> TileWriter:
        """What writes the tiles; lse (B, H, M, 1)."""
        problem, pairs = batched.problem, batched.pairs
        plain = problem.normalizer is None and problem.bias is None and problem.softcap is None
        if plain and isinstance(pairs, DotPairs):
            return TileWeightsFromLogs(DotProductLogs(batched, pairs, lse))
        return TileWeightsFromLogs(ScoreLogs(batched, lse))


class TileWeightsFromLogs:
    """Weights as exp2 of base-2 logarithms."""

    def __init__(self, logs: DotProductLogs | ScoreLogs) -> None:
        self.logs = logs
        self.spare: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        exponents = self.logs.tile(rows, columns, masked=masked)
        if not terms:
            return exponents.exp2_(), None
        self.spare = reused_buffer(self.spare, exponents, exponents.numel())
        weights = torch.exp2(exponents, out=self.spare[: exponents.numel()].view_as(exponents))
        return weights, exponents.mul_(weights)


class DotProductLogs:
    """log₂ w = q · k · scale · log₂ e - lse · log₂ e, with the difference in the product, in a reused buffer."""

    def __init__(self, batched: BatchedProblem, pairs: DotPairs, lse: Tensor) -> None:
        self.batched, self.query, self.factor = batched, pairs.query, pairs.scale * LOG2_E
        self.key, self.key_heads = at_least_float32(pairs.key).flatten(0, 1), pairs.key.shape[1]  # [b·Hk, N, D]
        self.lse = lse * -LOG2_E
        self.buffer: Tensor | None = None
        self._row: tuple[slice, Tensor, Tensor] | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """Base-2 logarithms of the weights of a tile, (b, H, m, n), which the caller may overwrite."""
        query, offset = self._scaled_rows(rows)
        key = self.key[:, columns]
        sizes = torch.Size((*query.shape[:2], key.shape[1]))
        self.buffer = reused_buffer(self.buffer, query, sizes.numel())
        product = torch.baddbmm(offset, query, key.mT, out=self.buffer[: sizes.numel()].view(sizes))
        tile = product.view(*self.query.shape[:2], rows.stop - rows.start, sizes[2])
        if masked and (keep := self.batched.keep(rows, columns)) is not None:
            tile.add_(torch.zeros(keep.shape, dtype=tile.dtype, device=tile.device).masked_fill_(~keep, -FAR))
        return tile

    def _scaled_rows(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Query rows times the factor and offsets, (b·Hk, group·m, D or 1): heads that share a key become its rows."""
        if self._row is None or self._row[0] != rows:
            query = at_least_float32(self.query[:, :, rows]) * self.factor
            height = query.shape[1] // max(self.key_heads, 1) * query.shape[2]
            sizes = len(self.key), height
            self._row = rows, query.reshape(*sizes, query.shape[-1]), self.lse[:, :, rows].reshape(*sizes, 1)
        return self._row[1:]


class ScoreLogs:
    """log₂ w = (log g(softcap(f(q, k)) + bias) - lse) · log₂ e for any operator, one step after another."""

    def __init__(self, batched: BatchedProblem, lse: Tensor) -> None:
        self.batched, self.lse = batched, lse
        self.tile_scores, self.tile_bias, self.softcap = (
            make_tile_scores(batched.pairs),
            make_tile_bias(batched),
            batched.problem.softcap,
        )

    def tile(self, rows: slice, columns: slice, *, masked: bool) -> Tensor:
        """Base-2 logarithms of the weights of a tile, (b, H, m, n), which the caller may overwrite."""
        scores = self.tile_scores.scores(rows, columns)
        if self.softcap is not None:
            scores.div_(self.softcap).tanh_().mul_(self.softcap)
        if self.tile_bias is not None:
            scores.add_(self.tile_bias.values(rows, columns))
        scores = self.batched.problem.log_numerator(scores)
        scores.sub_(self.lse[:, :, rows])
        if masked and (keep := self.batched.keep(rows, columns)) is not None:
            scores.add_(torch.zeros(keep.shape, dtype=scores.dtype, device=scores.device).masked_fill_(~keep, -FAR))
        # A bias may be -inf, or so far below 0 that this makes it so.
        return scores.mul_(LOG2_E).clamp_(min=-2 * FAR)
