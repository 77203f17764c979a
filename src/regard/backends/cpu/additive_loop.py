"""Additive attention in C over the tiles of a mask, forward and backward."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.problem import Problem
from ...core.score_forms import AdditivePairs, PairForm
from ...tiles.mask_tiles import BlockRow, batch_layouts, split_slice
from ...tiles.tile_bias import make_tile_bias
from ...tiles.tile_size import MIN_TILE_SIDE, batches_per_tile, block_rows, tile_size
from .additive_tiles import AdditiveBackward, AdditiveForward, AdditiveScores
from .whole_additive import WholeAdditiveInC


class AdditiveInC:
    """Scores, softmax and the sum of values in one pass of C, and so the gradients.

    bfloat16 and float16 are read as they are and widened in registers; the output is rounded once.
    """

    def forward(self, batched: BatchedProblem, tile: int) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem, some batches at a time."""
        return batched.join_batches(
            [(batch, _forward(batched.part(batch), rows, tile)) for batch, rows in _block_rows(batched.problem, tile)]
        )

    def prepare_whole(
        self, pairs: AdditivePairs, value: Tensor, softcap: float | None, absent: Tensor | None
    ) -> WholeAdditiveInC | None:
        """What computes few pairs at once."""
        return WholeAdditiveInC.prepare(pairs, value, softcap, absent)

    def backward(self, batched: BatchedProblem, saved: Saved, tile: int) -> ProblemGradients:
        """The gradients of a batched problem."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad)
        for batch, rows in block_rows(batched.problem, tile, together=saved.needs_bias_grad):
            _backward(batched.part(batch), rows, saved.part(batch), gradients.part(batch), tile)
        return gradients


def _block_rows(problem: Problem, tile: int) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
    """Slices of batches with the same tiles, and their block rows; one row of all queries if none is per pair."""
    plain = problem.mask is None and problem.bias is None and problem.dropout is None
    height = max(problem.queries, 1) if plain else tile_size(problem, tile)[0]
    for part in batch_layouts(problem, (height, MIN_TILE_SIDE), 1):
        for batch in split_slice(part.batch, batches_per_tile(problem, tile)):
            yield batch, part.layout.rows


def _forward(batched: BatchedProblem, rows: tuple[BlockRow, ...], tile: int) -> tuple[Tensor, Tensor]:
    problem, inputs = batched.problem, _PairInputs(batched)
    attended = AdditiveForward(
        _prepared(batched.pairs), batched.value.flatten(0, 1), problem.softcap, inputs.keep_probability
    )
    for row in rows:
        tiles = []
        for run in row.runs:
            width = tile_size(problem, tile)[1] if inputs.for_all or run.masked else problem.keys
            tiles += [(columns, run.masked) for columns in split_slice(run.columns, width)]
        for at, (columns, masked) in enumerate(tiles, 1):
            added = inputs.added(row.rows, columns, masked)
            dropout_mask = inputs.dropout_mask(row.rows, columns)
            attended.add(row.rows, columns, added, dropout_mask, more=at < len(tiles))
    return attended.output.unflatten(0, batched.shape[:2]), attended.lse.unflatten(0, batched.shape[:2])


def _backward(
    batched: BatchedProblem, rows: tuple[BlockRow, ...], saved: Saved, into: ProblemGradients, tile: int
) -> None:
    problem, inputs = batched.problem, _PairInputs(batched)
    given = (batched.value, saved.output, saved.lse, saved.grad_output, saved.grad_lse)
    work = AdditiveBackward(
        _prepared(batched.pairs),
        *(of.flatten(0, 1) for of in given),
        softcap=problem.softcap,
        keep_probability=inputs.keep_probability,
    )
    of_bias = inputs.tile_bias if into.bias else None
    for row in rows:
        for run in row.runs:
            for columns in split_slice(run.columns, tile_size(problem, tile)[1]):
                added = inputs.added(row.rows, columns, run.masked)
                dropout_mask = inputs.dropout_mask(row.rows, columns)
                gradient = work.add(row.rows, columns, added, dropout_mask, wants_bias_gradient=of_bias is not None)
                if of_bias is not None and gradient is not None:
                    of_bias.add_gradient(row.rows, columns, gradient.unflatten(0, batched.shape[:2]), into)
    query, key, weight, value = work.result()
    for target, gradient in ((into.query, query), (into.key, key), (into.value, value)):
        target.copy_(gradient.view_as(target))
    if into.weight is not None:
        into.weight.add_(weight)
    if of_bias is not None:
        of_bias.finish(into)


class _PairInputs:
    """Bias, mask and dropout of a tile as dense tensors (B, H, m, n)."""

    def __init__(self, batched: BatchedProblem) -> None:
        self.batched, self.tile_bias, self.dropout = batched, make_tile_bias(batched), batched.problem.dropout
        self.for_all = self.tile_bias is not None or self.dropout is not None
        self.keep_probability = 1.0 if self.dropout is None else 1.0 - self.dropout.probability

    def added(self, rows: slice, columns: slice, masked: bool) -> Tensor | None:
        """Bias plus -inf where the mask forbids the pair; None for neither."""
        added = None if self.tile_bias is None else self.tile_bias.values(rows, columns).float()
        if masked and (keep := self.batched.keep(rows, columns)) is not None:
            absent = torch.zeros(keep.shape, device="cpu").masked_fill_(~keep, float("-inf"))
            added = absent if added is None else added + absent
        if added is None:
            return None
        return added.expand(*self.batched.shape[:2], rows.stop - rows.start, columns.stop - columns.start)

    def dropout_mask(self, rows: slice, columns: slice) -> Tensor | None:
        """The dropout mask, float 0 or 1; None without dropout."""
        if self.dropout is None:
            return None
        tile = self.batched.grid.tile(rows, columns)
        return self.dropout.dropout_mask(*self.batched.problem.dropout_indices(tile, self.batched.batch))


def _prepared(pairs: PairForm) -> AdditiveScores:
    """Additive pairs in the layout of the native code, with batches and heads merged."""
    if not isinstance(pairs, AdditivePairs):
        raise TypeError("native code scores additive pairs")
    return AdditiveScores(pairs.query.flatten(0, 1), pairs.key.flatten(0, 1), pairs.weight.float())
