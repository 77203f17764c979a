"""Attention by whole rows: normalizers whose weights follow from all scores of a row, in memory linear in the lengths.

A few rows at a time have all their scores in memory; those of masked tiles are left out. Backward they are computed
again, and nothing is stored in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.normalizer import Normalizer
from ...core.score_forms import at_least_float32, per_head, per_key_head
from ...tiles.mask_tiles import BlockRow, Run, split_slice
from ...tiles.tile_size import SCORES_PER_TILE, block_rows
from .tile_loop import ScoredTiles

SCORES_AT_ONCE = 2**20
"""The most scores of whole rows in memory at once on a CPU, over batches and heads; one row of each is the least."""


@dataclass(frozen=True, slots=True)
class RowAttention:
    """Output, numbers of the rows, and gradients, for any `Normalizer`."""

    tile: int

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output, and what the normalizer says of each row."""
        output, numbers = batched.empty_results()
        for batch, rows in block_rows(batched.problem, self.tile):
            part = batched.part(batch)
            whole, value = WholeRows(part, self.tile), at_least_float32(part.value)
            for row in whole.pieces(rows):
                tile = RowTile(whole, row)
                weights, numbers[batch, :, row.rows] = tile.weights()
                tile.drop_(weights)
                summed = torch.zeros((), dtype=value.dtype, device=value.device)
                for columns, own in tile.by_run(weights):
                    summed = summed + per_head(partial(_product, shared=value[:, :, columns]), own, value)
                output[batch, :, row.rows] = (summed / whole.tiles.keep_probability).to(output.dtype)
        return output, numbers

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients, from scores that are computed again."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad, normalizer=saved.needs_normalizer_grad)
        for batch, rows in block_rows(batched.problem, self.tile, together=saved.needs_bias_grad):
            part, into = batched.part(batch), gradients.part(batch)
            whole, value = WholeRows(part, self.tile), at_least_float32(part.value)
            for row in whole.pieces(rows):
                asked = at_least_float32(saved.grad_output[batch, :, row.rows]) / whole.tiles.keep_probability
                RowTile(whole, row).add_gradients(value, asked, into)
            whole.tiles.finish(into)
        return gradients


def _product(rows: Tensor, shared: Tensor) -> Tensor:
    return rows @ shared


def tiles_of_whole_rows(batched: BatchedProblem, tile: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """The weights of all runs of columns that the mask does not empty: batches, rows, columns, and the weights."""
    for batch, rows in block_rows(batched.problem, tile):
        whole = WholeRows(batched.part(batch), tile)
        for row in whole.pieces(rows):
            rows_at_once = RowTile(whole, row)
            for columns, weights in rows_at_once.by_run(rows_at_once.weights()[0]):
                yield batch, row.rows, columns, weights


class WholeRows:
    """The whole rows of a batched problem, and as many of them as are computed at once."""

    def __init__(self, batched: BatchedProblem, tile: int) -> None:
        self.batched, self.tiles = batched, ScoredTiles(batched, tile)
        batch, heads, _, keys = batched.shape
        at_once = SCORES_AT_ONCE * max(tile // SCORES_PER_TILE, 1)
        self.height = max(at_once // max(batch * heads * keys, 1), 1)
        self.queries, self.keys = batched.shape[2:]

    @property
    def normalizer(self) -> Normalizer:
        """The problem's normalizer."""
        normalizer = self.batched.problem.normalizer
        if normalizer is None:
            raise AssertionError("softmax attention is computed tile by tile")
        return normalizer

    def pieces(self, rows: tuple[BlockRow, ...]) -> Iterator[BlockRow]:
        """The block rows, cut to the height of rows that are computed at once; or all rows as one."""
        before = self.normalizer.rows_before
        if before is None:
            yield BlockRow(slice(0, self.queries), (Run(slice(0, self.keys), True),))
            return
        for row in rows:
            for part in split_slice(row.rows, max(self.height, 2 * before)):
                yield BlockRow(part, self._joined_runs(rows, part, before) if before else row.runs)

    def _joined_runs(self, rows: tuple[BlockRow, ...], part: slice, before: int) -> tuple[Run, ...]:
        """One run with all columns that some rows, and those before them, attend to, and what lies between."""
        near = [row for row in rows if row.rows.stop > part.start - before and row.rows.start < part.stop]
        columns = [run.columns for row in near for run in row.runs]
        if not columns:
            return ()
        joined = slice(min(each.start for each in columns), max(each.stop for each in columns))
        return (Run(joined, self.batched.problem.mask is not None),)


class RowTile:
    """Some whole rows: their scores over the runs of columns that they attend to, side by side, and a last sink.

    scored: these rows, behind those before them that a normalizer needs too.
    """

    def __init__(self, whole: WholeRows, row: BlockRow) -> None:
        self.whole, self.row, problem = whole, row, whole.batched.problem
        self.scored = slice(max(row.rows.start - (whole.normalizer.rows_before or 0), 0), row.rows.stop)
        self.own = slice(row.rows.start - self.scored.start, None)
        found = [whole.tiles.scores(self.scored, run.columns, run.masked) for run in row.runs]
        parts, self.slopes = [scores for scores, _ in found], [slope for _, slope in found]
        batch, heads, _, _ = whole.batched.shape
        sizes = batch, heads, self.scored.stop - self.scored.start
        dtype = torch.promote_types(problem.value.dtype, torch.float32)
        if problem.sinks is not None:
            parts.append(problem.sinks.to(dtype)[:, None, None].expand(*sizes, 1))
        if not parts:
            parts.append(torch.empty(*sizes, 0, dtype=dtype, device=problem.value.device))
        self.scores = parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def weights(self) -> tuple[Tensor, Tensor]:
        """The weights, with that of the sink, and what the normalizer says of the rows."""
        weights, numbers = self.whole.normalizer.normalize(self.scores)
        return weights[..., self.own, :], numbers[..., self.own]

    def by_run(self, pairs: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The columns of each run, and the part of `pairs` over them."""
        start = 0
        for run in self.row.runs:
            width = run.columns.stop - run.columns.start
            yield run.columns, pairs[..., start : start + width]
            start += width

    def drop_(self, pairs: Tensor) -> None:
        """Set to 0 what dropout drops, in place."""
        for columns, own in self.by_run(pairs):
            if (dropout_mask := self.whole.tiles.dropout_mask(self.row.rows, columns)) is not None:
                own.mul_(dropout_mask)

    def add_gradients(self, value: Tensor, asked: Tensor, into: ProblemGradients) -> None:
        """Add the gradients of all tensors; asked: that of the output over the probability of keeping a weight."""
        weights, upstream = self.whole.normalizer.normalize(self.scores)[0], torch.zeros_like(self.scores)
        for columns, own in self.by_run(upstream[..., self.own, :]):
            own.copy_(per_head(partial(_product, shared=value[:, :, columns].mT), asked, value))
        self.drop_(upstream[..., self.own, :])
        of_scores, of_parameters = self.whole.normalizer.backward(self.scores, weights, upstream)
        weights = weights[..., self.own, :]
        self.drop_(weights)
        for (columns, own), (_, above), slope in zip(
            self.by_run(weights), self.by_run(of_scores), self.slopes, strict=True
        ):
            into.value[:, :, columns] += per_key_head(own, asked, value)
            self.whole.tiles.add_gradients(self.scored, columns, above, slope, into)
        for total, found in zip(into.normalizer, of_parameters, strict=False):
            total += found
        if into.sinks is not None:
            into.sinks.add_(of_scores[..., -1].sum((0, 2)))
