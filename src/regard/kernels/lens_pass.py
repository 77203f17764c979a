"""The weights of tiles, recomputed from the log-sum-exp of their rows, and the pass over them that serves all lenses.

The weights of a tile are exp(scores - lse) (Dao et al. 2022, arXiv 2205.14135, section 3.1, does so backward). One pass
over the tiles that the mask leaves serves all lenses. It takes the products of queries and keys once more, half of
the flops of the forward pass, and one exponential per pair. A backend may compute reductions without a tile in
memory; the others get tiles, of all heads at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..backends.base import TileWriter
from ..backends.registry import BACKENDS
from ..backends.torch.ordered_rows import tiles_in_order
from ..backends.torch.row_loop import tiles_of_whole_rows
from ..core.batched_problem import BatchedProblem
from ..core.log_sum_exp import with_exact_lse
from ..core.normalizer import OrderedNormalizer
from ..core.problem import Problem
from ..core.torch_modes import under_transform, without_autocast
from ..errors import ConfigurationError
from ..lenses import Lens, LensState, NativeReduction, Reduction, WeightTile
from ..lenses.contribution import KeyScaled
from ..lenses.forms import FAR
from ..tiles.mask_tiles import batch_layouts, split_slice
from ..tiles.tile_size import MIN_TILE_SIDE, batches_per_tile, tile_size
from .key_weights import key_weighted
from .part_reductions import pass_over, prefers_parts, reduce_parts

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
            if problem.normalizer is not None and problem.normalizer.signed:
                _refuse_logarithms(lens, looks[lens], problem)
    return looks


def _refuse_logarithms(lens: Lens, look: LensState[Any], problem: Problem) -> None:
    """Raise where a lens takes logarithms of weights that may be below 0.

    Raises:
        ConfigurationError: it does.
    """
    if any(reduction.needs_entropy_terms for reduction in look.reductions):
        raise ConfigurationError(
            f"{lens!r} takes logarithms of weights, and weights of {problem.normalizer_name} may be below 0: show "
            "them by lenses.Weights, or look at sums of them"
        )


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
        reductions = _run_scaled_passes(problem, lse, _run_in_one_pass(problem, lse, reductions))
        if not reductions:
            return
        terms, tiles_of = any(each.needs_entropy_terms for each in reductions), _tiles
        if not problem.has_lse:
            tiles_of = _tiles_of_whole_rows
        for tile in tiles_of(problem, lse, terms=terms):
            for reduction in reductions:
                reduction.add(tile)


def _run_in_one_pass(problem: Problem, lse: Tensor, reductions: list[Reduction]) -> list[Reduction]:
    """Run the reductions that a backend adds up without storing weights; returns the others."""
    able = [reduction for reduction in reductions if isinstance(reduction, NativeReduction)]
    weights = pass_over(problem) if able else None
    if weights is None:
        return reductions
    found = ((reduction, reduction.native()) for reduction in able)
    forms = {reduction: form for reduction, form in found if form is not None and weights.takes(form)}
    if forms:
        batched = BatchedProblem.from_problem(problem)
        lse = lse.reshape(batched.shape[:3])
        if prefers_parts(problem):
            reduce_parts(problem, lse, list(forms.values()))
        else:
            weights.reduce(batched, lse, list(forms.values()))
    return [reduction for reduction in reductions if reduction not in forms]


def _run_scaled_passes(problem: Problem, lse: Tensor, reductions: list[Reduction]) -> list[Reduction]:
    """Run those of weights times factors of the keys by a pass for each list of factors; returns the others."""
    left = [reduction for reduction in reductions if not isinstance(reduction, KeyScaled)]
    by_factors: dict[int, list[KeyScaled]] = {}
    for reduction in reductions:
        if isinstance(reduction, KeyScaled):
            by_factors.setdefault(id(reduction.factors), []).append(reduction)
    for scaled in by_factors.values():
        weighted = key_weighted(problem, scaled[0].factors)
        inner = [reduction.inner for reduction in scaled]
        missed = inner if weighted is None else _run_in_one_pass(weighted, lse, inner)
        left += [reduction for reduction in scaled if reduction.inner in missed]
    return left


def _tiles(problem: Problem, lse: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """Tiles of weights one after another, in a buffer that the next one overwrites."""
    batched, size = BatchedProblem.from_problem(problem), tile_size(problem, WEIGHTS_PER_TILE)
    batches, heads, queries, _ = batched.shape
    # A row that attends to nothing, or to NaN, has weights 0.
    lse = lse.reshape(batches, heads, queries, 1)
    lse = torch.where(lse.isfinite(), lse, FAR)
    for part in batch_layouts(problem, (size[0], MIN_TILE_SIDE), 1):
        for batch in split_slice(part.batch, batches_per_tile(problem, WEIGHTS_PER_TILE)):
            weights = tile_writer(batched.part(batch), lse[batch])
            for row in part.layout.rows:
                for run in row.runs:
                    for columns in split_slice(run.columns, size[1]):
                        made = weights.tile(row.rows, columns, masked=run.masked, terms=terms)
                        yield WeightTile(*made, batch, row.rows, columns)


def _tiles_of_whole_rows(problem: Problem, lse: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """Tiles of weights that follow from all scores of a row; 0 in rows that attend to NaN."""
    batched = BatchedProblem.from_problem(problem)
    broken = lse.reshape(batched.shape[:3]).isnan().unsqueeze(-1)
    in_order = isinstance(problem.normalizer, OrderedNormalizer)
    tiles = (tiles_in_order if in_order else tiles_of_whole_rows)(batched, WEIGHTS_PER_TILE)
    for batch, rows, columns, weights in tiles:
        weights = weights.masked_fill(broken[batch, :, rows], 0.0)
        yield WeightTile(weights, weights * weights.log2().clamp(min=-FAR) if terms else None, batch, rows, columns)


def tile_writer(batched: BatchedProblem, lse: Tensor) -> TileWriter:
    """What computes the weights of tiles of a problem; lse (b, H, M, 1), `FAR` for rows whose weights are 0."""
    able = (each.weights for each in BACKENDS if each.runs(batched.pairs.query, batched.pairs.key))
    found = (weights.writer(batched, lse) for weights in able if weights is not None)
    return next(writer for writer in found if writer is not None)
