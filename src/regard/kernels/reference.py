"""The reference kernel: the formula of attention as written, with all weights in memory and autograd's derivatives."""

from __future__ import annotations

from dataclasses import replace

from ..backends.torch.dense_block import LONG_ROW
from ..core.normalizer import OrderedNormalizer
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs
from ..tiles.mask_tiles import distinct_matrices
from .base import Cost, Result
from .formula import formula
from .nan_safety import run_nan_safe
from .planning.unit_costs import (
    CAP,
    DROP,
    FEATURE,
    MASK,
    RESULT,
    SELECT,
    WEIGHTS,
    WIDEN,
    bias_passes,
    bytes_read,
    evaluated,
    heads_per_key,
    product_work,
    result_bytes,
    startup_passes,
    widened_bytes,
    widened_numbers,
)
from .planning.unit_prices import price

BACKWARD_STORED = price("reference.backward_stored")
ROW_CALLS = 30.0
"""The calls of torch's operators for each row of a normalizer that takes them one after another."""


LONG_ROW_WIDENED = price("reference.long_row_widened")


class ReferenceKernel:
    """`formula`, for any score, mask, bias, dtype and derivative."""

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons: it computes every problem."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and stored several times: scores, masked scores, weights."""
        pairs, features = problem.weights_shape.numel(), problem.pairs.query.shape[-1]
        size = max(problem.value.element_size(), 4)
        masks, biases = distinct_matrices(problem)
        additive = isinstance(problem.pairs, AdditivePairs)
        steps = (masks > 0) + (biases > 0) + 3 * (problem.softcap is not None) + 3 * (problem.dropout is not None)
        evaluations = problem.queries * problem.keys * (MASK * masks + bias_passes(problem) * biases)
        width = problem.value.shape[-1] + features * (not additive)
        ordered = isinstance(problem.normalizer, OrderedNormalizer)
        rows = heads_per_key(problem) * problem.queries
        flops, streamed = product_work(pairs, rows, width)
        return Cost(
            flops=flops,
            streamed=streamed,
            backward=BACKWARD_STORED,
            bytes=size * pairs * (3.0 + steps / 2 + 2.0 * features * additive)
            + widened_bytes(problem)
            + result_bytes(problem),
            passes=startup_passes(rows, problem.weights_shape[:-1].numel() / max(rows, 1))
            + RESULT * problem.weights_shape[:-1].numel() * width
            + pairs * (WEIGHTS + FEATURE * features * additive)
            + pairs
            * (SELECT * bool(masks) + CAP * (problem.softcap is not None) + DROP * (problem.dropout is not None))
            + evaluated(problem, evaluations, times=1, backward=BACKWARD_STORED)
            + WIDEN * widened_numbers(problem) * (LONG_ROW_WIDENED if _is_long_row(problem) else 1.0),
            moved=bytes_read(problem),
            calls=40.0 + 20.0 * bool(masks) + 10.0 * steps + ROW_CALLS * ordered * problem.queries,
            note="it computes all pairs, and keeps them in memory",
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp if it was requested."""
        return run_nan_safe(problem, _formula_of_one_row if _is_long_row(problem) else formula)


def _is_long_row(problem: Problem) -> bool:
    return problem.queries == 1 and problem.keys > LONG_ROW


def _formula_of_one_row(problem: Problem) -> Result:
    """The formula of a single row, computed twice: alone, torch would sum it one key after another."""
    query, positions = problem.pairs.query, problem.grid().query_positions
    result = formula(
        replace(
            problem,
            pairs=replace(problem.pairs, query=query.expand(*query.shape[:-2], 2, -1)),
            query_positions=positions.expand(*positions.shape[:-1], 2),
        )
    )
    return Result(result.output[..., :1, :], None if result.lse is None else result.lse[..., :1])
