"""The additive kernel: native attention with scores weight · tanh(q + k), in memory linear in the lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from .. import native
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, PairForm
from .base import Cost, Result
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .cost_model import WIDEN, widened_bytes, widened_numbers
from .custom_op import apply_kernel, register
from .mask_tiles import BlockRow, batch_layouts, split_slice
from .online_softmax import (
    MIN_TILE_SIDE,
    SCORES_PER_TILE,
    TiledAttention,
    add_feature_cost,
    batches_per_tile,
    tile_size,
)
from .tile_scores import make_tile_bias, make_tile_scores

NATIVE_FEATURE = 0.25
"""The cost of one feature of a pair in C, in passes: some four operations on 16 numbers at once."""


class AdditiveKernel:
    """Online softmax over the scores weight · tanh(q + k) in native code, without storing them.

    Scores, softmax and the sum of values take one native pass, and so do the gradients. The kernel works tile by tile
    where mask, bias or dropout have a number for each pair, and in the backward pass. bfloat16 and float16 are read as
    they are and widened in registers; the output is rounded once.

    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y): the exponentials are taken once for each token, not for each pair.
    """

    def __init__(self, tile: int = SCORES_PER_TILE) -> None:
        self.name = "additive" if tile == SCORES_PER_TILE else f"additive({tile})"
        self.tile, self._tiled = tile, TiledAttention(make_tile_scores, tile)
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores, dtypes and devices that the native code does not support, or that it was not built."""
        reasons = []
        if not isinstance(problem.pairs, AdditivePairs):
            reasons.append("its code computes additive scores; this score is a dot product")
        if problem.value.dtype not in native.DTYPES:
            reasons.append(
                f"its code reads {native.DTYPE_NAMES}; this is {str(problem.value.dtype).removeprefix('torch.')}"
            )
        if not problem.value.is_cpu:
            reasons.append(f"its code runs on the CPU; this is on {problem.value.device}")
        if reason := native.why_not():
            reasons.append(f"there is no native code: {reason}")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs, plus a share of a pass for each feature."""
        cost = add_feature_cost(self._tiled.cost(problem), problem, NATIVE_FEATURE)
        passes = cost.passes - WIDEN * widened_numbers(problem)  # it widens in registers
        return replace(cost, passes=passes, bytes=cost.bytes - widened_bytes(problem))

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem, some batches at a time."""
        return batched.join_batches(
            (batch, self._forward(batched.part(batch), rows)) for batch, rows in self.block_rows(batched.problem)
        )

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad)
        for batch, rows in self._tiled.block_rows(batched.problem, together=saved.needs_bias_grad):
            self._backward(batched.part(batch), rows, saved.part(batch), gradients.part(batch))
        return gradients

    def block_rows(self, problem: Problem) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
        """Slices of batches with the same tiles, and their block rows; one row of all queries if none is per pair."""
        plain = problem.mask is None and problem.bias is None and problem.dropout is None
        height = max(problem.queries, 1) if plain else tile_size(problem, self.tile)[0]
        for part in batch_layouts(problem, (height, MIN_TILE_SIDE), 1):
            for batch in split_slice(part.batch, batches_per_tile(problem, self.tile)):
                yield batch, part.layout.rows

    def _forward(self, batched: BatchedProblem, rows: tuple[BlockRow, ...]) -> tuple[Tensor, Tensor]:
        problem, inputs = batched.problem, _PairInputs(batched)
        attended = native.AdditiveForward(
            _prepared(batched.pairs), batched.value.flatten(0, 1), problem.softcap, inputs.keep_probability
        )
        for row in rows:
            tiles = []
            for run in row.runs:
                width = tile_size(problem, self.tile)[1] if inputs.for_all or run.masked else problem.keys
                tiles += [(columns, run.masked) for columns in split_slice(run.columns, width)]
            for at, (columns, masked) in enumerate(tiles, 1):
                added = inputs.added(row.rows, columns, masked)
                dropout_mask = inputs.dropout_mask(row.rows, columns)
                attended.add(row.rows, columns, added, dropout_mask, more=at < len(tiles))
        return attended.output.unflatten(0, batched.shape[:2]), attended.lse.unflatten(0, batched.shape[:2])

    def _backward(
        self, batched: BatchedProblem, rows: tuple[BlockRow, ...], saved: Saved, into: ProblemGradients
    ) -> None:
        problem, inputs = batched.problem, _PairInputs(batched)
        given = (batched.value, saved.output, saved.lse, saved.grad_output, saved.grad_lse)
        work = native.AdditiveBackward(
            _prepared(batched.pairs),
            *(of.flatten(0, 1) for of in given),
            softcap=problem.softcap,
            keep_probability=inputs.keep_probability,
        )
        of_bias = inputs.tile_bias if into.bias else None
        for row in rows:
            for run in row.runs:
                for columns in split_slice(run.columns, tile_size(problem, self.tile)[1]):
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


def _prepared(pairs: PairForm) -> native.AdditiveScores:
    """Additive pairs in the layout of the native code, with batches and heads merged."""
    if not isinstance(pairs, AdditivePairs):
        raise TypeError("native code scores additive pairs")
    return native.AdditiveScores(pairs.query.flatten(0, 1), pairs.key.flatten(0, 1), pairs.weight.float())
