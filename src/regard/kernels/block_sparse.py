"""The block-sparse kernel: dense attention of each block of queries over the spans of keys with unmasked pairs."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..backends.torch.dense_block import EXPONENTIAL, Rectangle, dense_reasons
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.grid import WHOLE
from ..core.log_sum_exp import RunningMerge, lse_dtype
from ..core.problem import Problem
from ..tiles.dense_mask import is_square_causal
from ..tiles.diagonals import Diagonals
from ..tiles.mask_tiles import (
    BatchLayout,
    BlockRow,
    Run,
    TileLayout,
    batch_layouts,
    count_visited_pairs,
    distinct_matrices,
    sampled_layouts,
)
from .base import INPUT_GRADIENTS, Cost, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import (
    MASK,
    OPERATOR,
    RESULT,
    bias_passes,
    bytes_read,
    evaluated,
    torch_flash_cost,
    torch_flash_startup,
    torch_flash_work,
)
from .planning.unit_prices import price

NARROW_BLOCK, WIDE_BLOCK, WIDE = (64, 64), (256, 64), 1536
"""Rows and columns of a tile: few rows, so that little of what the mask leaves out is visited; more where a row sees
more than WIDE keys, so that calls are few and products large."""
RUN = price("block_sparse.run")
MIN_FULL_WIDTH = 1024
"""From this many columns without a masked pair on, a span is visited alone and needs no mask."""


class BlockSparseKernel:
    """Torch's dense flash kernel on the spans of keys that each block of queries attends to, merged by log-sum-exp.

    Its own backward adds into slices: autograd would write a gradient of full size for every block.
    """

    exponential = EXPONENTIAL

    def __init__(self, block: tuple[int, int] | None = None, min_full_width: int = MIN_FULL_WIDTH) -> None:
        self.name = "block_sparse" if block is None else f"block_sparse({block}, {min_full_width})"
        self.block, self.min_full_width = block, min_full_width
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """Features that the dense kernel does not support."""
        return dense_reasons(problem)

    def cost(self, problem: Problem) -> Cost:
        """All pairs in the spans; the mask or bias of one span at a time in memory."""
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        if is_square_causal(problem):
            flash = torch_flash_cost(problem, causal=True)
            passes = flash.passes + RESULT * numbers
            return replace(flash, bytes=4.0 * numbers, passes=passes, calls=OPERATOR + RUN)
        share, found = sampled_layouts(problem, self._block(problem), self.min_full_width)
        heads = problem.weights_shape[-3] if problem.heads else 1
        (masks, biases), alike = distinct_matrices(problem), Diagonals.suffice_for(problem)
        pairs = rectangles = columns = added = calls = 0.0
        for part in found:
            batches = share * (part.batch.stop - part.batch.start)
            runs = [run.columns.stop - run.columns.start for row in part.layout.rows for run in row.runs]
            calls += share * RUN * len(runs)
            rectangles += batches * heads * len(runs)
            columns += batches * heads * sum(runs)
            pairs += batches * heads * part.layout.visited_pairs
            if not alike:
                masked = part.layout.masked_pairs * MASK * min(masks, part.batch.stop - part.batch.start)
                added += share * (masked + part.layout.visited_pairs * bias_passes(problem) * biases)
        rows = max((row.rows.stop - row.rows.start for part in found for row in part.layout.rows), default=0)
        every = problem.weights_shape[:-2].numel() * problem.keys
        return Cost(
            flops=0.0,
            flash={"torch": torch_flash_work(problem, pairs, rows, columns / max(rectangles, 1.0))},
            bytes=4.0 * WIDE_BLOCK[0] * problem.keys + 8.0 * numbers,
            passes=torch_flash_startup(problem, rows, rectangles) + RESULT * numbers + evaluated(problem, added),
            moved=bytes_read(problem, again=columns / max(every, 1)),
            calls=OPERATOR + calls + 60.0 * bool(masks or biases),
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """All but those of a bias."""
        return INPUT_GRADIENTS

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """The output of each block row, merged over its runs."""
        output, lse = batched.empty_results(lse_dtype(batched.value))
        for part in self._parts(batched.problem):
            rectangles = _Rectangles(batched.part(part.batch))
            for row in part.layout.rows:
                merged, query = RunningMerge(), rectangles.rows(rectangles.batched.pairs.query, row)
                for run in row.runs:
                    merged.add(*rectangles.rectangle(query, row.rows, run).forward())
                here = part.batch, WHOLE, row.rows
                merged.write(output[here], lse[here], rectangles.in_order)
        return output, lse

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of each rectangle, added to slices of the inputs' gradients."""
        gradients = batched.zero_gradients()
        for part in self._parts(batched.problem):
            rectangles, into = _Rectangles(batched.part(part.batch)), gradients.part(part.batch)
            for row in part.layout.rows:
                self._add_gradients(rectangles, row, saved.part(part.batch), into)
        return gradients

    def _add_gradients(self, rectangles: _Rectangles, row: BlockRow, saved: Saved, into: ProblemGradients) -> None:
        tensors = rectangles.batched.pairs.query, saved.output, saved.lse, saved.grad_output, saved.grad_lse
        query, *above = (rectangles.rows(tensor, row) for tensor in tensors)
        for run in row.runs:
            grad_query, key, value = rectangles.rectangle(query, row.rows, run).backward(
                *above, has_lse_grad=saved.has_lse_grad
            )
            into.query[:, :, row.rows] += rectangles.in_order(grad_query)
            into.key[:, :, run.columns] += key
            into.value[:, :, run.columns] += value

    def _parts(self, problem: Problem) -> tuple[BatchLayout, ...]:
        """The runs of columns of each block of rows, batch by batch where they differ."""
        if is_square_causal(problem):  # torch's dense kernel knows this one mask, and skips what it leaves out
            rows = BlockRow(slice(0, problem.queries), (Run(slice(0, problem.keys), masked=False),))
            layout = TileLayout((rows,), problem.queries * (problem.keys + 1) // 2, 0)
            return (BatchLayout(slice(0, problem.batch.numel()), layout),)
        return batch_layouts(problem, self._block(problem), self.min_full_width)

    def _block(self, problem: Problem) -> tuple[int, int]:
        """Rows and columns of a tile: narrow where a row sees few keys."""
        if self.block is not None:
            return self.block
        visited = count_visited_pairs(problem, NARROW_BLOCK)
        return NARROW_BLOCK if visited < WIDE * problem.queries * problem.batch.numel() else WIDE_BLOCK


class _Rectangles:
    """The rectangles of a batched problem and their additive masks."""

    def __init__(self, batched: BatchedProblem) -> None:
        self.batched = batched
        self.causal = is_square_causal(batched.problem)
        self.diagonals = None if self.causal else Diagonals.from_problem(batched.problem)

    def rectangle(self, query: Tensor, rows: slice, run: Run) -> Rectangle:
        """One rectangle, of rows as `in_order` has them."""
        key, value = self.batched.pairs.key[:, :, run.columns], self.batched.value[:, :, run.columns]
        scale = self.batched.pairs.scale  # type: ignore[union-attr]  # `why_not` lets dot products alone through
        if self.causal:
            return Rectangle(query, key, value, scale, causal=True)
        if self.diagonals is None:
            return Rectangle(query, key, value, scale, self.batched.added(rows, run.columns, masked=run.masked))
        needed = run.masked or self.batched.problem.bias is not None
        return Rectangle(query, key, value, scale, self.diagonals.reversed_tile(rows, run.columns) if needed else None)

    def rows(self, tensor: Tensor, row: BlockRow) -> Tensor:
        """The rows of one block of a tensor (B, H, M, ·), in the order of `in_order`."""
        return self.in_order(tensor[:, :, row.rows])

    def in_order(self, rows: Tensor) -> Tensor:
        """Reverse rows (B, H, m, ·) where tiles are read by diagonals, which need the last row first; self-inverse."""
        return rows if self.diagonals is None else rows.flip(2)
