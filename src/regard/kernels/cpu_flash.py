"""The CPU flash kernel: native flash attention over the tiles with unmasked pairs, forward and backward."""

from __future__ import annotations

from torch import Tensor

from .. import native
from ..biases import RelativeBias
from ..core.problem import Problem
from .base import Cost, Result
from .batched_problem import BatchedProblem, ProblemGradients, Saved
from .cost_model import RESULT, bytes_read, operator_calls, total_width
from .custom_op import apply_kernel, register
from .mask_tiles import batch_layouts, distinct_matrices
from .native_inputs import MIN_FULL_RUN, TILE_SIZE, native_problems, native_reasons
from .tile_scores import distances

PAIR = 1.5
"""The cost of a pair beside its products, in passes (`Cost.passes`)."""
PACKING = 2.0
"""The cost of packing one number of a key or value for a block of rows, in passes."""
CALLS = 40.0
"""The overhead of one call of the kernel, in calls of torch's operators (`Cost.calls`)."""


class CpuFlashKernel:
    """Flash attention (Dao et al. 2022, arXiv 2205.14135) in C: one pass over the tiles, no weights in memory.

    In float32, whatever comes in: bfloat16 is widened as it is read. A mask is read as a bit for each pair of the tiles
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
        found, heads = (
            batch_layouts(problem, TILE_SIZE, MIN_FULL_RUN),
            problem.weights_shape[-3] if problem.heads else 1,
        )
        batches = [part.batch.stop - part.batch.start for part in found]
        pairs = sum(heads * many * part.layout.visited_pairs for part, many in zip(found, batches, strict=True))
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        rows = min(problem.queries, 4 * TILE_SIZE[0])
        packed = pairs / max(rows, 1) * total_width(problem)
        extras = 2.0 * (problem.softcap is not None) + (problem.dropout is not None) + (problem.bias is not None)
        return Cost(
            flops=0.0,
            native=2.0 * pairs * total_width(problem),
            bytes=sum(part.layout.masked_pairs for part in found) / 8 * max(distinct_matrices(problem)[0], 1),
            passes=(PAIR + extras) * pairs + PACKING * packed + RESULT * numbers,
            moved=bytes_read(problem, heads=problem.weights_shape[:-2].numel()),
            calls=CALLS + operator_calls(problem) * problem.inputs_require_grad(),
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
                query, key, value, bias=batched.zero_bias_gradients() if saved.needs_bias_grad else ()
            )
        else:
            gradients, line = batched.zero_gradients(bias=saved.needs_bias_grad), None
            for batch, (query, key, value, own_line) in results:
                gradients.query[batch], gradients.key[batch], gradients.value[batch] = query, key, value
                line = own_line if line is None or own_line is None else line + own_line
        if line is not None and isinstance(batched.problem.bias, RelativeBias):
            batched.problem.bias.accumulate_at(distances(batched.problem), line, gradients.bias)
        return gradients

    def forward_into(self, batched: BatchedProblem, output: Tensor, lse: Tensor, *, accumulate: bool) -> None:
        """Write the result of a batched problem, or merge it with that of other keys, which stands there.

        Shapes: output (B, H, M, Dv) and lse (B, H, M), float32, of any strides but in the output's last axis.
        """
        for batch, part in native_problems(batched):
            part.forward((output[batch], lse[batch]), accumulate=accumulate)

    def add_gradients(self, batched: BatchedProblem, saved: Saved, into: ProblemGradients) -> None:
        """Add the gradients of a batched problem to float32 ones, of any strides but in the last axis."""
        for batch, part in native_problems(batched):
            own = saved.part(batch)
            *_, line = part.backward(
                own.output,
                own.lse,
                own.grad_output,
                own.grad_lse if own.has_lse_grad else None,
                wants_relative_bias=own.needs_bias_grad,
                into=(into.query[batch], into.key[batch], into.value[batch]),
            )
            if line is not None and isinstance(batched.problem.bias, RelativeBias):
                batched.problem.bias.accumulate_at(distances(batched.problem), line, into.bias)


def _backward(part: native.FlashProblem, saved: Saved) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    grad_lse = saved.grad_lse if saved.has_lse_grad else None
    return part.backward(
        saved.output, saved.lse, saved.grad_output, grad_lse, wants_relative_bias=saved.needs_bias_grad
    )
