"""A structured mask as a few dense calls on contiguous spans of keys, merged by log-sum-exp."""

from __future__ import annotations

from torch import Tensor

from ..masks.causal import Causal
from ..problem import Problem
from .base import Cost, Result
from .dense import EXPONENTIAL, Rectangle, dense_reasons
from .diagonals import Diagonals
from .flat import Flat, Gradients, Saved
from .layout import BlockRow, Layout, Run
from .merging import Merged
from .operator import attend, register
from .tiling import layout

BLOCK = (128, 64)
"""Rows and columns of a tile: rows enough for the dense kernel to be at its best, columns few, so that little of what
the mask leaves out is visited."""
APART = 1024
"""From this many columns without a masked pair on, a span is visited alone and needs no mask."""


class Spans:
    """Each block of queries meets the keys that its mask leaves, in torch's dense kernel; no others are touched.

    Its own backward adds into slices: autograd would write a gradient of full size for every block.
    """

    exponential = EXPONENTIAL

    def __init__(self, block: tuple[int, int] = BLOCK, apart: int = APART) -> None:
        self.name = "spans" if (block, apart) == (BLOCK, APART) else f"spans({block}, {apart})"
        self.block, self.apart = block, apart
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """What its dense kernel has no word for."""
        return dense_reasons(problem)

    def cost(self, problem: Problem) -> Cost:
        """The pairs that lie in the spans are computed; a mask or a bias stands in memory for one span at a time."""
        plan = layout(problem, self.block, self.apart)
        leading = problem.weights_shape[:-2].numel()
        width = problem.pairs.query.shape[-1] + problem.value.shape[-1]
        added = plan.visited if problem.bias is not None else plan.masked
        longest = max((run.columns.stop - run.columns.start for row in plan.rows for run in row.runs), default=0)
        return Cost(
            flops=2.0 * leading * plan.visited * width,
            bytes=4.0 * self.block[0] * (longest + 2 * leading * problem.value.shape[-1]),
            passes=2.0 * added,
            calls=12.0 + 4.0 * sum(len(row.runs) for row in plan.rows),
        )

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return attend(problem, self)

    def forward(self, flat: Flat) -> tuple[Tensor, Tensor]:
        """Block row after block row, the runs of one merged."""
        rectangles = _Rectangles(flat, self.block, self.apart)
        output, lse = flat.empty_results()
        for row in rectangles.layout.rows:
            merged = Merged()
            query = rectangles.in_order(flat.pairs.query[:, :, row.rows])
            for run in row.runs:
                merged.add(*rectangles.of(query, row.rows, run).forward())
            merged.write(output[:, :, row.rows], lse[:, :, row.rows], rectangles.in_order)
        return output, lse

    def backward(self, flat: Flat, saved: Saved) -> Gradients:
        """Each rectangle's gradients, added to the slices that it touched."""
        rectangles = _Rectangles(flat, self.block, self.apart)
        gradients, from_lse = flat.zero_gradients(), saved.from_lse
        for row in rectangles.layout.rows:
            query, output, lse, grad_output = (
                rectangles.in_order(tensor[:, :, row.rows])
                for tensor in (flat.pairs.query, saved.output, saved.lse, saved.grad_output)
            )
            grad_lse = rectangles.in_order(saved.grad_lse[:, :, row.rows]) if from_lse else None
            for run in row.runs:
                grad_query, key, value = rectangles.of(query, row.rows, run).backward(
                    output, lse, grad_output, grad_lse
                )
                gradients.query[:, :, row.rows] += rectangles.in_order(grad_query)
                gradients.key[:, :, run.columns] += key
                gradients.value[:, :, run.columns] += value
        return gradients


class _Rectangles:
    """The rectangles of a flat problem, and what is added to their scores."""

    def __init__(self, flat: Flat, block: tuple[int, int], apart: int) -> None:
        self.flat = flat
        self.whole = _is_square_causal(flat.problem)
        self.diagonals = None if self.whole else Diagonals.of(flat.problem)
        if self.whole:  # torch's dense kernel knows this one mask, and skips what it leaves out
            rows = BlockRow(slice(0, flat.shape[2]), (Run(slice(0, flat.shape[3]), masked=False),))
            self.layout = Layout((rows,), 0, 0)
        else:
            self.layout = layout(flat.problem, block, apart)

    def of(self, query: Tensor, rows: slice, run: Run) -> Rectangle:
        """One rectangle, of rows as `in_order` has them."""
        key, value = self.flat.pairs.key[:, :, run.columns], self.flat.value[:, :, run.columns]
        scale = self.flat.pairs.scale  # type: ignore[union-attr]  # `why_not` lets dot products alone through
        if self.whole:
            return Rectangle(query, key, value, scale, causal=True)
        if self.diagonals is None:
            return Rectangle(query, key, value, scale, self.flat.added(rows, run.columns, masked=run.masked))
        needed = run.masked or self.flat.problem.bias is not None
        return Rectangle(query, key, value, scale, self.diagonals.reversed_tile(rows, run.columns) if needed else None)

    def in_order(self, rows: Tensor) -> Tensor:
        """Rows (B, H, m, ·) in the order of the problem, and back: where tiles are read by diagonals, last to first."""
        return rows if self.diagonals is None else rows.flip(2)


def _is_square_causal(problem: Problem) -> bool:
    """Whether the mask is what torch calls causal: aligned to the start, which is the end too where M = N."""
    return (
        isinstance(problem.mask, Causal)
        and problem.bias is None
        and problem.queries == problem.keys
        and problem.query_positions is None
        and problem.key_positions is None
    )
