"""The online softmax, and other quotients: attention tile by tile in memory linear in the lengths, and its gradient."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.log_sum_exp import lse_dtype
from ...core.normalizer import RatioNormalizer
from ...core.score_forms import at_least_float32, per_head, per_key_head
from ...tiles.mask_tiles import (
    BlockRow,
    split_slice,
)
from ...tiles.tile_bias import make_tile_bias
from ...tiles.tile_size import SCORES_PER_TILE, block_rows, tile_size
from .tile_scores import LOG2_E, make_tile_scores


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """Output, log-sum-exp and gradients by tiles of at most `tile` scores.

    Forward: the online softmax (Milakov and Gimelshein 2018, arXiv 1805.02867). Backward: the weights of a tile are
    exp(score - lse), computed again (Dao et al. 2022, arXiv 2205.14135, section 3.1). Quotients of other functions of
    the scores, of a `RatioNormalizer`, go the same way.
    """

    tile: int = SCORES_PER_TILE

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """The online softmax over the tiles of each block row."""
        output, lse = batched.empty_results(lse_dtype(batched.value))
        for batch, rows in block_rows(batched.problem, self.tile):
            self._forward(ScoredTiles(batched.part(batch), self.tile), rows, output[batch], lse[batch])
        return output, lse

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """Tile by tile: P = exp(scores - lse), dP = dO · Vᵀ, dS = P · (dP - delta), and from dS everything else."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad, normalizer=saved.needs_normalizer_grad)
        for batch, rows in block_rows(batched.problem, self.tile, together=saved.needs_bias_grad):
            tiles = ScoredTiles(batched.part(batch), self.tile)
            self._backward(tiles, rows, saved.part(batch), gradients.part(batch))
            tiles.finish(gradients.part(batch))
        return gradients

    def _forward(self, tiles: ScoredTiles, rows: tuple[BlockRow, ...], output: Tensor, lse: Tensor) -> None:
        value, ratio = at_least_float32(tiles.batched.value), ratio_of(tiles.batched)
        for row in rows:
            softmax = OnlineSoftmax(output[:, :, row.rows], lse[:, :, row.rows])
            for columns, masked in tiles.in_row(row):
                scores = tiles.scores(row.rows, columns, masked)[0]
                weights = softmax.weights(scores) if ratio is None else softmax.numerators(scores, ratio)
                if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                    weights.mul_(dropout_mask)
                part = value[:, :, columns]
                softmax.add(per_head(lambda folded, part=part: folded @ part, weights, part))
            softmax.write(tiles.keep_probability)

    def _backward(
        self, tiles: ScoredTiles, rows: tuple[BlockRow, ...], saved: Saved, gradients: ProblemGradients
    ) -> None:
        value, ratio = at_least_float32(tiles.batched.value), ratio_of(tiles.batched)
        for row in rows:
            here = saved.part(rows=row.rows)
            lse, delta = here.lse.unsqueeze(-1), here.delta().unsqueeze(-1)
            asked = at_least_float32(here.grad_output) / tiles.keep_probability
            for columns, masked in tiles.in_row(row):
                part = value[:, :, columns]
                scores, slope = tiles.scores(row.rows, columns, masked)
                weights = exponential_(scores.sub_(lse)) if ratio is None else ratio.in_units(scores, lse)[0]
                inner = per_head(lambda folded, part=part: folded @ part.mT, asked, part)  # dP
                used = weights
                if (dropout_mask := tiles.dropout_mask(row.rows, columns)) is not None:
                    inner.mul_(dropout_mask)
                    used = dropout_mask.mul_(weights) if dropout_mask.dtype == weights.dtype else dropout_mask * weights
                gradients.value[:, :, columns] += per_key_head(used, asked, part)
                if ratio is None:
                    upstream = inner.sub_(delta).mul_(weights)
                else:
                    upstream, own = ratio.backward_tile(scores, lse, inner, delta)
                    for into, found in zip(gradients.normalizer, own, strict=False):
                        into += found
                tiles.add_gradients(row.rows, columns, upstream, slope, gradients)


def ratio_of(batched: BatchedProblem) -> RatioNormalizer | None:
    """The normalizer of a problem whose weights are quotients; None of softmax attention."""
    normalizer = batched.problem.normalizer
    if normalizer is not None and not isinstance(normalizer, RatioNormalizer):
        raise AssertionError(f"the rows of {normalizer!r} are not computed tile by tile")
    return normalizer


class ScoredTiles:
    """The tiles of a batched problem: their columns, their scores with softcap, bias and mask, and their backward."""

    def __init__(self, batched: BatchedProblem, tile: int) -> None:
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
        self.sum = torch.zeros_like(at_least_float32(output))
        self.peak = self.sum.new_full((*lse.shape, 1), float("-inf"))
        self.total = torch.zeros_like(self.peak)

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

    def numerators(self, scores: Tensor, ratio: RatioNormalizer) -> Tensor:
        """`weights` of another quotient: n / e^peak, for the largest unit so far."""
        peak = torch.maximum(self.peak, ratio.log_unit(scores))
        some = peak.masked_fill(peak == float("-inf"), 0.0)
        weights, denominators = ratio.in_units(scores, some)
        shrink = torch.exp(self.peak - some)
        self.total = self.total * shrink + denominators.sum(-1, keepdim=True)
        self.sum *= shrink
        self.peak = peak
        return weights

    def add(self, values: Tensor) -> None:
        """Add the weights times the values of a part."""
        self.sum += values

    def write(self, keep_probability: float) -> None:
        """The rows' output and log-sum-exp; 0 and -inf where there was no key."""
        self.output.copy_(self.sum / self.total.masked_fill(self.total == 0, 1.0) / keep_probability)
        self.lse.copy_((self.total.to(self.lse.dtype).log() + self.peak).squeeze(-1))


def exponential_(numbers: Tensor) -> Tensor:
    """Exp in place, computed as exp2(numbers · log₂ e).

    torch's exp goes through a library that takes thirty times as long where results are subnormal, its exp2 does not.
    """
    return numbers.mul_(LOG2_E).exp2_()
