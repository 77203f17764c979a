"""The online softmax: attention tile by tile in memory linear in the lengths, forward and backward.

`tiled` and `additive` run on it; kernels that compute parts of the keys merge them with `RunningMerge`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..biases import RelativeBias
from ..core.log_sum_exp import merge_softmax
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, PairForm, at_least_float32, per_head, per_key_head
from .base import Cost, FlashWork
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .cost_model import (
    CAP,
    DROP,
    MASK,
    OPERATOR,
    TILEWISE,
    WIDEN,
    bias_passes,
    bytes_read,
    evaluated,
    product_work,
    result_bytes,
    startup_passes,
    total_width,
    widened_bytes,
    widened_numbers,
)
from .mask_tiles import (
    BatchLayout,
    BlockRow,
    batch_layouts,
    distinct_matrices,
    sampled_layouts,
    split_slice,
    union_layout,
)
from .tile_scores import LOG2_E, TileScores, make_tile_bias

MIN_TILE_SIDE = 64
"""Rows and columns of the smallest tile whose products are still worth their calls."""
MAX_PENDING = 8
"""Parts of some rows that wait in memory until they are merged."""
SCORES_PER_TILE = 2**18
"""The number of scores in a tile, over all batches and heads: a megabyte, which fits into a core's cache."""
TILE_RESULT = 12.0
"""Passes per number of the output for each tile: scaled by the new maximum, added to, checked."""


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Output, log-sum-exp and gradients by tiles; `tile_scores` makes the scores of a pair form's tiles.

    Forward: the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). Backward: the weights of a tile are
    exp(score - lse), computed again (Dao et al. 2022, arXiv 2205.14135, section 3.1).
    """

    tile_scores: Callable[[PairForm], TileScores]
    tile: int = SCORES_PER_TILE

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs, some eight passes over each."""
        size, heads = tile_size(problem, self.tile), problem.weights_shape[-3] if problem.heads else 1
        (masks, biases), alike = distinct_matrices(problem), isinstance(problem.bias, RelativeBias)
        of_bias = 0.0 if alike else bias_passes(problem) * biases
        pairs = tiles = at_once = asked = 0.0
        share, found = sampled_layouts(problem, (size[0], MIN_TILE_SIDE), 1)
        for batch, rows in self._batches(problem, found):
            for row in rows:
                height = (row.rows.stop - row.rows.start) * (batch.stop - batch.start) * heads
                for run in row.runs:
                    width = run.columns.stop - run.columns.start
                    pairs += height * width
                    tiles += math.ceil(width / size[1])
                    at_once = max(at_once, height)
                    of_mask = MASK * min(masks, heads * (batch.stop - batch.start)) * run.masked
                    asked += (row.rows.stop - row.rows.start) * width * (of_mask + of_bias)
        pairs, tiles, asked = share * pairs, share * tiles, share * asked
        numbers = at_once * problem.value.shape[-1]
        extras = CAP * (problem.softcap is not None) + DROP * (problem.dropout is not None) + 2.0 * bool(biases)
        many = max(min(size[0], problem.queries), 1)
        flops, streamed = product_work(pairs, many, total_width(problem))
        return Cost(
            flops=flops,
            streamed=streamed,
            bytes=4.0 * 4 * min(max(self.tile, heads * size[0] * size[1]), problem.weights_shape.numel())
            + widened_bytes(problem)
            + result_bytes(problem),
            passes=(TILEWISE + extras) * pairs
            + tiles * (startup_passes(many, at_once / many) + TILE_RESULT * numbers)
            + evaluated(problem, asked)
            + WIDEN * widened_numbers(problem),
            moved=bytes_read(problem, again=pairs / max(problem.weights_shape[:-2].numel() * many * problem.keys, 1)),
            calls=OPERATOR + 20.0 + 35.0 * tiles + 30.0 * bool(masks) + 120.0 * bool(biases),
        )

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """The online softmax over the tiles of each block row."""
        output, lse = batched.empty_results()
        for batch, rows in self.block_rows(batched.problem):
            self._forward(
                ScoredTiles(batched.part(batch), self.tile_scores, self.tile), rows, output[batch], lse[batch]
            )
        return output, lse

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """Tile by tile: P = exp(scores - lse), dP = dO · Vᵀ, dS = P · (dP - delta), and from dS everything else."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad)
        for batch, rows in self.block_rows(batched.problem, together=saved.needs_bias_grad):
            tiles = ScoredTiles(batched.part(batch), self.tile_scores, self.tile)
            self._backward(tiles, rows, saved.part(batch), gradients.part(batch))
            tiles.finish(gradients.part(batch))
        return gradients

    def block_rows(self, problem: Problem, *, together: bool = False) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
        """Block rows of batches with the same tiles, as many batches at once as suit the tile size, or all of them."""
        size = tile_size(problem, self.tile)[0], MIN_TILE_SIDE
        if together:
            yield slice(0, problem.batch.numel()), union_layout(problem, size, 1).rows
            return
        yield from self._batches(problem, batch_layouts(problem, size, 1))

    def _batches(
        self, problem: Problem, found: tuple[BatchLayout, ...]
    ) -> Iterator[tuple[slice, tuple[BlockRow, ...]]]:
        """Slices of batches that are computed at once, and their block rows."""
        for part in found:
            for batch in split_slice(part.batch, batches_per_tile(problem, self.tile)):
                yield batch, part.layout.rows

    def _forward(self, tiles: ScoredTiles, rows: tuple[BlockRow, ...], output: Tensor, lse: Tensor) -> None:
        value = at_least_float32(tiles.batched.value)
        for row in rows:
            softmax = OnlineSoftmax(output[:, :, row.rows], lse[:, :, row.rows])
            for columns, masked in tiles.in_row(row):
                weights = softmax.weights(tiles.scores(row.rows, columns, masked)[0])
                if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                    weights.mul_(dropout_mask)
                part = value[:, :, columns]
                softmax.add(per_head(lambda folded, part=part: folded @ part, weights, part))
            softmax.write(tiles.keep_probability)

    def _backward(
        self, tiles: ScoredTiles, rows: tuple[BlockRow, ...], saved: Saved, gradients: ProblemGradients
    ) -> None:
        value = at_least_float32(tiles.batched.value)
        for row in rows:
            here = saved.part(rows=row.rows)
            lse, delta = here.lse.unsqueeze(-1), here.delta().unsqueeze(-1)
            asked = at_least_float32(here.grad_output) / tiles.keep_probability
            for columns, masked in tiles.in_row(row):
                part = value[:, :, columns]
                scores, slope = tiles.scores(row.rows, columns, masked)
                weights = exponential_(scores.sub_(lse))
                inner = per_head(lambda folded, part=part: folded @ part.mT, asked, part)  # dP
                used = weights
                if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                    inner.mul_(dropout_mask)
                    used = dropout_mask.mul_(weights) if dropout_mask.dtype == weights.dtype else dropout_mask * weights
                gradients.value[:, :, columns] += per_key_head(used, asked, part)
                tiles.add_gradients(row.rows, columns, inner.sub_(delta).mul_(weights), slope, gradients)


class ScoredTiles:
    """The tiles of a batched problem: their columns, their scores with softcap, bias and mask, and their backward."""

    def __init__(self, batched: BatchedProblem, make_tile_scores: Callable[[PairForm], TileScores], tile: int) -> None:
        self.batched, self.tile_scores, self.tile_bias = (
            batched,
            make_tile_scores(batched.pairs),
            make_tile_bias(batched),
        )
        self.size = tile_size(batched.problem, tile)
        self.keep_probability = (
            1.0 - batched.problem.dropout.probability if batched.problem.dropout is not None else 1.0
        )

    def in_row(self, row: BlockRow) -> Iterator[tuple[slice, bool]]:
        """The tiles of a block row: their columns, and whether some of their pairs are masked."""
        for run in row.runs:
            for columns in split_slice(run.columns, self.size[1]):
                yield columns, run.masked

    def scores(self, rows: slice, columns: slice, masked: bool) -> tuple[Tensor, Tensor | None]:
        """softcap(f(Q, K)) + B where M, -inf elsewhere; and the slope of the softcap, where there is one."""
        scores, slope = self.tile_scores.scores(rows, columns), None
        softcap = self.batched.problem.softcap
        if softcap is not None:
            scores = scores.div_(softcap).tanh_()
            slope = 1 - scores.square()
            scores = scores.mul_(softcap)
        if self.tile_bias is not None:
            scores = scores.add_(self.tile_bias.values(rows, columns))
        if masked and (keep := self.batched.keep(rows, columns)) is not None:
            # A sum with -inf: to fill where a boolean says so takes ten times as long.
            scores = scores.add_(torch.zeros(keep.shape, device=keep.device).masked_fill_(~keep, float("-inf")))
        return scores, slope

    def dropout_mask(self, rows: slice, columns: slice) -> Tensor | None:
        """The dropout mask of a tile, float 0 or 1; None without dropout."""
        dropout = self.batched.problem.dropout
        if dropout is None:
            return None
        tile = self.batched.grid.tile(rows, columns)
        return dropout.dropout_mask(*self.batched.problem.dropout_indices(tile, self.batched.batch))

    def add_gradients(
        self, rows: slice, columns: slice, upstream: Tensor, slope: Tensor | None, into: ProblemGradients
    ) -> None:
        """Backpropagate the gradient of a tile's scores to bias, query, key and weight."""
        if self.tile_bias is not None and into.bias:
            self.tile_bias.add_gradient(rows, columns, upstream, into)
        if slope is not None:
            upstream = upstream.mul_(slope)
        self.tile_scores.add_gradients(rows, columns, upstream, into)

    def finish(self, into: ProblemGradients) -> None:
        """Finish the gradients after the last tile."""
        self.tile_scores.finish(into)
        if self.tile_bias is not None and into.bias:
            self.tile_bias.finish(into)


class OnlineSoftmax:
    """The running maximum, sum and output of some rows, rescaled when a larger score appears."""

    def __init__(self, output: Tensor, lse: Tensor) -> None:
        self.output, self.lse = output, lse
        self.peak = lse.new_full((*lse.shape, 1), float("-inf"))
        self.total = torch.zeros_like(self.peak)
        self.sum = torch.zeros(output.shape, dtype=lse.dtype, device=lse.device)

    def weights(self, scores: Tensor) -> Tensor:
        """exp(scores - peak), in place; the peak is the largest score so far."""
        peak = torch.maximum(self.peak, scores.amax(-1, keepdim=True))
        some = peak.masked_fill(peak == float("-inf"), 0.0)
        weights = exponential_(scores.sub_(some))
        shrink = torch.exp(self.peak - some)
        self.total = self.total * shrink + weights.sum(-1, keepdim=True)
        self.sum *= shrink
        self.peak = peak
        return weights

    def add(self, values: Tensor) -> None:
        """Add the weights times the values of a part."""
        self.sum += values

    def write(self, keep_probability: float) -> None:
        """The rows' output and log-sum-exp; 0 and -inf where there was no key."""
        self.output.copy_(self.sum / self.total.masked_fill(self.total == 0, 1.0) / keep_probability)
        self.lse.copy_((self.total.log() + self.peak).squeeze(-1))


def exponential_(numbers: Tensor) -> Tensor:
    """Exp in place, computed as exp2(numbers · log₂ e).

    torch's exp goes through a library that takes thirty times as long where results are subnormal, its exp2 does not.
    """
    return numbers.mul_(LOG2_E).exp2_()


def add_feature_cost(cost: Cost, problem: Problem, passes: float) -> Cost:
    """Add `passes` per feature and visited pair to a cost, if the score is additive."""
    if not isinstance(problem.pairs, AdditivePairs):
        return cost
    width = problem.value.shape[-1] + problem.pairs.query.shape[-1]
    rows = max(min(tile_size(problem, SCORES_PER_TILE)[0], problem.queries), 1)
    visited = (cost.flops / 2.0 + cost.torch.streamed * rows) / width if width else 0.0
    features = problem.pairs.query.shape[-1]
    return replace(
        cost,
        flops=2.0 * visited * problem.value.shape[-1],
        torch=FlashWork(),
        passes=cost.passes + passes * visited * features,
    )


def batches_per_tile(problem: Problem, tile: int) -> int:
    """The number of batches that are computed at once in 128 × 128 tiles of at most `tile` scores; at least one."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    return max(tile // (max(heads, 1) * 128 * 128), 1)


def tile_size(problem: Problem, tile: int) -> tuple[int, int]:
    """Rows and columns of a tile: at most `tile` scores over heads and batches at once, but MIN_TILE_SIDE each."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    leading = max(min(problem.batch.numel(), batches_per_tile(problem, tile)) * heads, 1)
    side = max(math.isqrt(tile // leading), 1)
    if side < MIN_TILE_SIDE:
        return (MIN_TILE_SIDE, MIN_TILE_SIDE) if tile >= MIN_TILE_SIDE**2 else (side, side)
    rows = min(side // MIN_TILE_SIDE * MIN_TILE_SIDE, 256)
    return rows, min(tile // (leading * rows) // MIN_TILE_SIDE * MIN_TILE_SIDE, 512)


class RunningMerge:
    """`merge_softmax` of parts that are computed one after another: the output and log-sum-exp of some rows."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, Tensor]] = []

    def add(self, output: Tensor, lse: Tensor) -> None:
        """Add a part, (..., m, Dv) and (..., m)."""
        self._parts.append((output, lse))
        if len(self._parts) == MAX_PENDING:
            self._parts = [self._merged()]

    def write(self, output: Tensor, lse: Tensor, arrange: Callable[[Tensor], Tensor] = lambda rows: rows) -> None:
        """Write the merged rows, reordered by `arrange`, into a result; 0 and -inf if there were no parts."""
        if not self._parts:
            output.zero_()
            lse.fill_(float("-inf"))
            return
        merged_output, merged_lse = self._merged()
        output.copy_(arrange(merged_output))
        lse.copy_(arrange(merged_lse))

    def _merged(self) -> tuple[Tensor, Tensor]:
        if len(self._parts) == 1:
            return self._parts[0]
        outputs, lses = zip(*self._parts, strict=True)
        return merge_softmax(torch.stack([at_least_float32(output) for output in outputs]), torch.stack(lses), dim=0)
