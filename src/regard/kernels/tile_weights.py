"""The weights of tiles, recomputed from the log-sum-exp of their rows, and the pass over them that serves all lenses.

The weights of a tile are exp(scores - lse) (Dao et al. 2022, arXiv 2205.14135, section 3.1, does so backward). One pass
over the tiles that the mask leaves serves all lenses. It takes the products of queries and keys once more, half of
the flops of the forward pass, and one exponential per pair. The C code computes the reductions that it supports without
a tile in memory; the others get tiles, of all heads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import native
from ..core.log_sum_exp import with_exact_lse
from ..core.problem import Problem
from ..core.score_forms import DotPairs, at_least_float32
from ..core.torch_modes import under_transform, without_autocast
from ..errors import ConfigurationError
from ..lenses import Lens, LensState, NativeReduction, Reduction, WeightTile
from .batched_problem import BatchedProblem
from .mask_tiles import batch_layouts, split_slice
from .native_inputs import native_problems, native_reasons
from .online_softmax import MIN_TILE_SIDE, batches_per_tile, tile_size
from .part_reductions import prefers_parts, reduce_parts
from .tile_scores import LOG2_E, make_tile_bias, make_tile_scores

FAR = 1e30
"""The number in place of infinity in a logarithm of base 2: 2 to minus it is 0, and 0 times it is 0, not NaN."""


class TileWeights(Protocol):
    """Computes the weights of tiles."""

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n), and the terms weight · log₂ weight if requested, in a reused buffer."""
        ...


def make_tile_weights(batched: BatchedProblem, lse: Tensor) -> TileWeights:
    """The tile weights of a problem; lse (b, H, M, 1), `FAR` for rows whose weights are 0."""
    problem, pairs = batched.problem, batched.pairs
    if problem.operator == "softmax" and isinstance(pairs, DotPairs) and problem.bias is None:
        if native.supports(pairs.query, pairs.key):
            return NativeTileWeights(batched, pairs, lse)
        if problem.softcap is None:
            return TileWeightsFromLogs(DotProductLogs(batched, pairs, lse))
    return TileWeightsFromLogs(ScoreLogs(batched, lse))


class NativeTileWeights:
    """Weights by native code: product, exponential and mask in one pass."""

    def __init__(self, batched: BatchedProblem, pairs: DotPairs, lse: Tensor) -> None:
        self.batched, self.pairs, self.lse = batched, pairs, lse.squeeze(-1)
        self.buffer: Tensor | None = None

    def tile(self, rows: slice, columns: slice, *, masked: bool, terms: bool) -> tuple[Tensor, Tensor | None]:
        """Weights (b, H, m, n) and the terms."""
        query, key = self.pairs.query[:, :, rows], self.pairs.key[:, :, columns]
        sizes = torch.Size((*query.shape[:3], key.shape[2]))
        self.buffer = _buffer(self.buffer, self.lse, 2 * sizes.numel())
        weights, logs = self.buffer[: 2 * sizes.numel()].view(2, *sizes).unbind()
        native.write_weights(
            query,
            key,
            self.pairs.scale,
            self.lse[:, :, rows],
            weights,
            entropy_terms=logs if terms else None,
            keep=self.batched.keep(rows, columns) if masked else None,
            softcap=self.batched.problem.softcap,
        )
        return weights, logs if terms else None


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
        self.spare = _buffer(self.spare, exponents, exponents.numel())
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
        self.buffer = _buffer(self.buffer, query, sizes.numel())
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


def _buffer(buffer: Tensor | None, like: Tensor, numbers: int) -> Tensor:
    """The buffer if it holds enough numbers, else a larger one."""
    return like.new_empty(numbers) if buffer is None or buffer.numel() < numbers else buffer


WEIGHTS_PER_TILE = 2**19
"""The number of weights in a tile, over all batches and heads: more would not fit into the processor's caches."""


def start_lenses(problem: Problem, lenses: Iterable[Lens]) -> dict[Lens, LensState[Any]]:
    """Start each lens on the problem; equal lenses share one state.

    Raises:
        ConfigurationError: something else than a lens; and what each lens says of a problem that does not fit.
    """
    looks: dict[Lens, LensState[Any]] = {}
    for lens in lenses:
        if isinstance(lens, type) or not isinstance(lens, Lens):
            raise ConfigurationError(f"observe needs lenses from regard.lenses, such as Entropy(); one is {lens!r}")
        if lens not in looks:
            looks[lens] = lens.start(problem)
    return looks


def run_reductions(problem: Problem, lse: Tensor, reductions: Iterable[Reduction]) -> None:
    """Add the weights of a problem without NaN to reductions: by native code where it can, else tile by tile.

    Raises:
        ConfigurationError: under torch.compile or torch.func.
    """
    reductions = list(reductions)
    if not reductions:
        return
    if under_transform():
        raise ConfigurationError(
            "of all lenses only Weights works under torch.compile and torch.func: call observe outside"
        )
    with torch.no_grad(), without_autocast(problem.value.device.type):
        problem, lse = with_exact_lse(problem, lse)
        reductions = _run_native_reductions(problem, lse, reductions)
        if not reductions:
            return
        for tile in _tiles(problem, lse, terms=any(reduction.needs_entropy_terms for reduction in reductions)):
            for reduction in reductions:
                reduction.add(tile)


def _run_native_reductions(problem: Problem, lse: Tensor, reductions: list[Reduction]) -> list[Reduction]:
    """Run the reductions that native code supports in one pass; returns the others."""
    able = [reduction for reduction in reductions if isinstance(reduction, NativeReduction)]
    if not able or native_reasons(problem):
        return reductions
    requests = {reduction: form for reduction in able if (form := reduction.native()) is not None}
    if requests:
        batched = BatchedProblem.from_problem(problem)
        lse = lse.reshape(batched.shape[:3])
        if prefers_parts(problem):
            reduce_parts(problem, lse, list(requests.values()))
            return [reduction for reduction in reductions if reduction not in requests]
        for batch, part in native_problems(batched):
            native.reduce_weights(part, lse[batch], [form.part(batch) for form in requests.values()])
    return [reduction for reduction in reductions if reduction not in requests]


def _tiles(problem: Problem, lse: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """Tiles of weights one after another, in a buffer that the next one overwrites."""
    batched, size = BatchedProblem.from_problem(problem), tile_size(problem, WEIGHTS_PER_TILE)
    batches, heads, queries, _ = batched.shape
    # A row that attends to nothing, or to NaN, has weights 0.
    lse = lse.reshape(batches, heads, queries, 1)
    lse = torch.where(lse.isfinite(), lse, FAR)
    for part in batch_layouts(problem, (size[0], MIN_TILE_SIDE), 1):
        for batch in split_slice(part.batch, batches_per_tile(problem, WEIGHTS_PER_TILE)):
            weights = make_tile_weights(batched.part(batch), lse[batch])
            for row in part.layout.rows:
                for run in row.runs:
                    for columns in split_slice(run.columns, size[1]):
                        made = weights.tile(row.rows, columns, masked=run.masked, terms=terms)
                        yield WeightTile(*made, batch, row.rows, columns)
