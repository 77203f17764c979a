"""The second pass of `observe`: weights recomputed tile by tile from the log-sum-exp, for lenses.

The weights of a tile are exp(scores - lse) (Dao et al. 2022, arXiv 2205.14135, section 3.1, does so backward). One pass
serves all lenses, over the tiles that the mask leaves. It takes the products of queries and keys once more, half of
what the forward pass multiplies, and one exponential a pair. Where native code can weigh the problem, it makes those
reductions that it has a word for, without a tile in memory; the others get tiles, of all heads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .. import native
from ..core.large_scores import too_large, within_float32
from ..core.problem import Problem
from ..core.torch_modes import under_transform, without_autocast
from ..errors import ConfigurationError
from ..lenses import Lens, LensState, NativeReduction, Reduction, WeightTile
from .batched_problem import BatchedProblem
from .custom_op import require_lse, run_in_float64
from .mask_tiles import batch_layouts, split_slice
from .native_inputs import native_problems, native_reasons
from .online_softmax import MIN_TILE_SIDE, batches_per_tile, tile_size
from .tile_weights import FAR, make_tile_weights

TILE = 2**19
"""Weights in a tile, over all batches and heads: more of them would leave the processor's caches."""


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
            "of all lenses only Weights can be looked through under torch.compile and torch.func: call observe outside"
        )
    with torch.no_grad(), without_autocast(problem.value.device.type):
        if not within_float32(lse) and bool(too_large(lse).any()):
            problem, lse = _in_float64(problem, lse)
        reductions = _run_native_reductions(problem, lse, reductions)
        if not reductions:
            return
        for tile in _tiles(problem, lse, terms=any(reduction.needs_entropy_terms for reduction in reductions)):
            for reduction in reductions:
                reduction.add(tile)


def _in_float64(problem: Problem, lse: Tensor) -> tuple[Problem, Tensor]:
    """A problem whose log-sum-exp is too large for float32, and its log-sum-exp, in float64."""
    wide, result = run_in_float64(replace(problem, dropout=None))
    return wide, torch.where(lse.isfinite(), require_lse(result.lse), lse.double())


def _run_native_reductions(problem: Problem, lse: Tensor, reductions: list[Reduction]) -> list[Reduction]:
    """Run the reductions that native code supports in one pass; returns the others."""
    able = [reduction for reduction in reductions if isinstance(reduction, NativeReduction)]
    if not able or native_reasons(problem):
        return reductions
    requests = {reduction: form for reduction in able if (form := reduction.native()) is not None}
    if requests:
        batched = BatchedProblem.from_problem(problem)
        lse = lse.reshape(batched.shape[:3])
        for batch, part in native_problems(batched):
            native.reduce_weights(part, lse[batch], [form.part(batch) for form in requests.values()])
    return [reduction for reduction in reductions if reduction not in requests]


def _tiles(problem: Problem, lse: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """Tiles of weights one after another, in a buffer that the next one overwrites."""
    batched, size = BatchedProblem.from_problem(problem), tile_size(problem, TILE)
    batches, heads, queries, _ = batched.shape
    # A row that attends to nothing, or to NaN, has weights 0.
    lse = lse.reshape(batches, heads, queries, 1)
    lse = torch.where(lse.isfinite(), lse, FAR)
    for part in batch_layouts(problem, (size[0], MIN_TILE_SIDE), 1):
        for batch in split_slice(part.batch, batches_per_tile(problem, TILE)):
            weights = make_tile_weights(batched.part(batch), lse[batch])
            for row in part.layout.rows:
                for run in row.runs:
                    for columns in split_slice(run.columns, size[1]):
                        made = weights.tile(row.rows, columns, masked=run.masked, terms=terms)
                        yield WeightTile(*made, batch, row.rows, columns)
