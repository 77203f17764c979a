"""Attention whose rows follow from the row before, some rows at a time: monotonic attention.

Backward goes from the last rows to the first. What each of them starts from is computed again from states that are
`BRANCHES` apart, and those from states that are further apart: n rows need some log n of these, and as many passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ...core.normalizer import OrderedNormalizer
from ...core.score_forms import at_least_float32, per_head, per_key_head
from ...tiles.mask_tiles import BlockRow, Run, split_slice
from ...tiles.tile_size import block_rows
from .row_loop import RowTile, WholeRows

BlockGradient = Callable[[BlockRow, Tensor | None, Tensor | None], Tensor]
"""Adds the gradients of a block, of the state before it and the gradient in that after it; gives that in the former."""
BRANCHES = 8
"""States in memory at once, for each power of it that there are blocks of rows."""


@dataclass(frozen=True, slots=True)
class OrderedRowAttention:
    """Output, numbers of the rows, and gradients, for an `OrderedNormalizer`."""

    tile: int

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output, and what the normalizer says of each row."""
        output, numbers = batched.empty_results()
        for batch, _ in block_rows(batched.problem, self.tile):
            rows = RowsInOrder(batched.part(batch), self.tile)
            value = at_least_float32(rows.batched.value)
            if not rows.blocks:  # no queries, or no keys
                output[batch], numbers[batch] = 0.0, -torch.inf
            for row, weights, own in rows.weights():
                numbers[batch, :, row] = own
                product = per_head(lambda folded, value=value: folded @ value, weights, value)
                output[batch, :, row] = product.to(output.dtype)
        return output, numbers

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients, from scores that are computed again."""
        gradients = batched.zero_gradients(bias=saved.needs_bias_grad, normalizer=saved.needs_normalizer_grad)
        for batch, _ in block_rows(batched.problem, self.tile, together=saved.needs_bias_grad):
            rows, into = RowsInOrder(batched.part(batch), self.tile), gradients.part(batch)
            rows.add_gradients(at_least_float32(saved.grad_output[batch]), into)
            rows.whole.tiles.finish(into)
        return gradients


def tiles_in_order(batched: BatchedProblem, tile: int) -> Iterator[tuple[slice, slice, slice, Tensor]]:
    """Batches, rows, columns, and their weights, from the first rows to the last."""
    for batch, _ in block_rows(batched.problem, tile):
        for rows, weights, _ in RowsInOrder(batched.part(batch), tile).weights():
            yield batch, rows, slice(0, weights.shape[-1]), weights


class RowsInOrder:
    """The rows of a batched problem, some at a time, each of them over all keys."""

    def __init__(self, batched: BatchedProblem, tile: int) -> None:
        normalizer = batched.problem.normalizer
        if not isinstance(normalizer, OrderedNormalizer):
            raise AssertionError(f"the rows of {normalizer!r} have no order")
        self.batched, self.normalizer, self.whole = batched, normalizer, WholeRows(batched, tile)
        _, _, queries, keys = batched.shape
        run = Run(slice(0, keys), batched.problem.mask is not None)
        rows = slice(0, queries if keys else 0)
        self.blocks = [BlockRow(part, (run,)) for part in split_slice(rows, self.whole.height)]

    def weights(self) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Rows, their weights and their numbers."""
        state = None
        for block in self.blocks:
            weights, numbers, state = self.normalizer.normalize_after(RowTile(self.whole, block).scores, state)
            yield block.rows, weights, numbers

    def add_gradients(self, asked: Tensor, into: ProblemGradients) -> None:
        """Add the gradients of all tensors; asked (B, H, M, Dv): that of the output."""
        value = at_least_float32(self.batched.value)
        self._differentiate(self.blocks, None, None, partial(self._add_block, value, asked, into))

    def _differentiate(
        self, blocks: Sequence[BlockRow], state: Tensor | None, later: Tensor | None, add: BlockGradient
    ) -> Tensor | None:
        """Differentiate some blocks, from the state before the first and the gradient in that after the last."""
        if len(blocks) <= 1:
            return add(blocks[0], state, later) if blocks else later
        size = max(-(-len(blocks) // BRANCHES), 1)
        parts, states = [blocks[first : first + size] for first in range(0, len(blocks), size)], [state]
        for part in parts[:-1]:
            for block in part:
                state = self.normalizer.normalize_after(RowTile(self.whole, block).scores, state)[2]
            states.append(state)
        for part in reversed(parts):
            later = self._differentiate(part, states.pop(), later, add)
        return later

    def _add_block(
        self,
        value: Tensor,
        asked: Tensor,
        into: ProblemGradients,
        block: BlockRow,
        state: Tensor | None,
        later: Tensor | None,
    ) -> Tensor:
        """Add the gradients of a block of rows; the gradient in the state before it."""
        tile, asked = RowTile(self.whole, block), asked[:, :, block.rows]
        weights, _, _ = self.normalizer.normalize_after(tile.scores, state)
        upstream = per_head(lambda folded: folded @ value.mT, asked, value)
        of_scores, before, of_parameters = self.normalizer.backward_after(tile.scores, state, upstream, later)
        into.value.add_(per_key_head(weights, asked, value))
        self.whole.tiles.add_gradients(block.rows, block.runs[0].columns, of_scores, tile.slopes[0], into)
        for total, found in zip(into.normalizer, of_parameters, strict=False):
            total += found
        return before
