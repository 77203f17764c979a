"""The CPU flash kernel: native flash attention over the tiles with unmasked pairs, forward and backward."""

from __future__ import annotations

from torch import Tensor

from .. import native
from ..biases import RelativeBias
from ..core.problem import Problem
from ..native.flash import FiniteGradients, FiniteRows
from .base import Cost, FlashWork, Result
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .cost_model import OPERATOR, RESULT, bytes_read, total_width
from .custom_op import apply_kernel, register
from .mask_tiles import TileLayout, distinct_matrices, sampled_layouts
from .native_inputs import MIN_FULL_RUN, TILE_SIZE, native_problems, native_reasons
from .short import has_spans
from .tile_scores import distances

EXTRA = 2.0
"""The cost of softcap, dropout or a bias on a pair, in passes (`Cost.passes`)."""
BIAS_CALLS = 60.0
"""Overhead of a bias, in calls: its numbers by distance."""
GROUP, NARROW = 16, 5 * TILE_SIZE[1]
"""Rows of a group where a block of rows has so many columns at most, as QUERIES and NARROW of native/narrow.h."""


class CpuFlashKernel:
    """Flash attention (Dao et al. 2022, arXiv 2205.14135) in C: one pass over the tiles, no weights in memory.

    In float32, whatever comes in: 16 bits are widened as they are read. A mask is read as a bit for each pair of tiles
    that it cuts; a bias by distance and its gradient as one number for each diagonal.
    """

    name = "cpu_flash"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores, dtypes, devices and biases that the native code does not support."""
        return native_reasons(problem)

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs."""
        share, found = sampled_layouts(problem, TILE_SIZE, MIN_FULL_RUN)
        heads = problem.weights_shape[-3] if problem.heads else 1
        batches = [part.batch.stop - part.batch.start for part in found]
        is_band = problem.mask is not None and has_spans(problem.mask, problem)
        computed = [_band_pairs(part.layout) if is_band else part.layout.visited_pairs for part in found]
        pairs = share * sum(heads * many * each for each, many in zip(computed, batches, strict=True))
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        rows = min(problem.queries, 4 * TILE_SIZE[0])
        width = total_width(problem)
        extras = 2 * (problem.softcap is not None) + (problem.dropout is not None) + (problem.bias is not None)
        return Cost(
            flops=0.0,
            native=FlashWork(2.0 * pairs * width, pairs, packed=pairs / max(rows, 1) * width),
            bytes=share * sum(part.layout.masked_pairs for part in found) / 8 * max(distinct_matrices(problem)[0], 1),
            passes=EXTRA * extras * pairs + RESULT * numbers,
            moved=bytes_read(problem),
            calls=OPERATOR + BIAS_CALLS * (problem.bias is not None),
        )

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem, slice by slice of batches with the same tiles."""
        return batched.join_batches((batch, part.forward()) for batch, part in native_problems(batched))

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem, slice by slice of batches with the same tiles."""
        results = [(batch, _backward(part, saved.part(batch))) for batch, part in native_problems(batched)]
        if len(results) == 1:
            (query, key, value, line) = results[0][1]
            gradients = ProblemGradients(
                *(query, key, value),
                bias=batched.zero_bias_gradients() if saved.needs_bias_grad else (),
                finite=isinstance(results[0][1], FiniteGradients),
            )
        else:
            gradients, line = batched.zero_gradients(bias=saved.needs_bias_grad), None
            for batch, (query, key, value, own_line) in results:
                gradients.query[batch], gradients.key[batch], gradients.value[batch] = query, key, value
                line = own_line if line is None or own_line is None else line + own_line
        if line is not None and isinstance(batched.problem.bias, RelativeBias):
            batched.problem.bias.accumulate_at(distances(batched.problem), line, gradients.bias)
        return gradients

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> bool:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis. Returns
        whether all entries of the output that were written are finite.
        """
        finite = True
        for batch, part in native_problems(batched):
            rows = part.forward((output[batch], lse[batch]), accumulate=accumulate)
            finite = finite and isinstance(rows, FiniteRows)
        return finite

    def backward_into(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients, *, accumulate: bool) -> bool:
        """Write the gradients of a batched problem, or add them to those that stand there; of the bias, always add.

        Those of query, key and value are float32, of any strides but in the last axis. Returns whether all entries of
        these three that were written are finite.
        """
        finite = True
        for batch, part in native_problems(batched):
            own = saved.part(batch)
            gradients = part.backward(
                own.output,
                own.lse,
                own.grad_output,
                own.grad_lse if own.has_lse_grad else None,
                wants_relative_bias=own.needs_bias_grad,
                into=(into.query[batch], into.key[batch], into.value[batch]),
                accumulate=accumulate,
            )
            finite, line = finite and isinstance(gradients, FiniteGradients), gradients[3]
            if line is not None and isinstance(batched.problem.bias, RelativeBias):
                batched.problem.bias.accumulate_at(distances(batched.problem), line, into.bias)
        return finite


def _band_pairs(layout: TileLayout) -> float:
    """The pairs that are computed for a mask whose rows are spans.

    Where a block of rows has few tiles side by side, these are of each GROUP of rows the columns that one of them
    attends to: about half of the tiles that the mask cuts, and one column more for each further row.
    """
    pairs = 0.0
    for row in layout.rows:
        wide = row.runs[-1].columns.stop - row.runs[0].columns.start if row.runs else 0
        widths = [(run.columns.stop - run.columns.start, run.masked) for run in row.runs]
        visited, cut = sum(width for width, _ in widths), sum(width for width, masked in widths if masked)
        few = visited - cut / 2 + GROUP - 1 if visited == wide <= NARROW else visited
        pairs += (row.rows.stop - row.rows.start) * min(visited, few)
    return pairs


def _backward(part: native.FlashProblem, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grad_lse = saved.grad_lse if saved.has_lse_grad else None
    return part.backward(
        saved.output, saved.lse, saved.grad_output, grad_lse, wants_relative_bias=saved.needs_bias_grad
    )
