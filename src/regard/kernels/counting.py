"""What the kernels' costs have in common: how many passes over a number each kind of work is.

A pass is what an element-wise operator takes for a number in the cache: `rates` says how many there are in a second.
"""

from __future__ import annotations

from ..problem import Problem

EXPONENTIALS = 2.0
"""A pair in torch's flash kernel, beside its products."""
BLOCKWISE = 8.0
"""A pair in the same kernel where it is given few rows at a time: its products are narrower then."""
ROW = 1000.0
"""A row of the first few that a dense kernel is given for one batch and head, beside its products."""
FEW = 32
"""So many rows are few."""
OPERATOR = 100.0
"""Calls that an operator of our own takes beside its work: the problem taken apart, checked, put together."""
TRAINING = 2.0
"""So many times as many where a gradient is asked for."""
RESULT = 10.0
"""A number of the output on its way through an operator of our own: looked at, merged, copied."""
TILEWISE = 12.0
"""A pair in the online softmax of tiles: its largest score, difference, exponential, sum."""
WEIGHTS = 45.0
"""A pair where all weights stand in memory at once."""
SELECT = 40.0
"""A number that is taken or not by a boolean: torch does that one by one."""
MASK = 30.0
"""A pair that a mask is asked for, once for all batches and heads that are alike; and made a number from a boolean."""
VALUE = 80.0
"""A pair that a bias is asked for, once for all batches and heads that are alike."""
CAP = 25.0
"""The softcap of a pair: a hyperbolic tangent."""
DROP = 20.0
"""The fate of a pair under dropout."""
FEATURE = 28.0
"""A feature of a pair with an additive score, in plain torch: a sum, a tangent, a product."""
SKIPPED = 512
"""Keys that torch's causal kernel skips at a time."""
CACHE = 2**22
"""Bytes up to which keys and values may stay near the processor."""


def operator_calls(problem: Problem) -> float:
    """Calls that an operator of our own takes beside its work; its backward takes more of them than others' does."""
    return OPERATOR * (TRAINING if problem.asks_for_gradient() else 1.0)


def width_of(problem: Problem) -> int:
    """The key's and the value's dims, together."""
    return problem.pairs.query.shape[-1] + problem.value.shape[-1]


def flash_width(problem: Problem) -> int:
    """The same for torch's flash kernel, which has both as wide as the wider one."""
    return 2 * max(problem.pairs.query.shape[-1], problem.value.shape[-1])


def beginnings(rows: int, rectangles: float) -> float:
    """Passes that dense rectangles of so many rows take to begin."""
    return ROW * min(rows, FEW) * rectangles


def read(problem: Problem, *, heads: int | None = None, again: float = 1.0) -> float:
    """Bytes of keys and values that come from main memory, where they do not stay near the processor.

    heads: batches and heads for each of which they are read; without it each is read for its own. again: how often.
    """
    value = problem.value
    size = value.element_size() * problem.keys * width_of(problem)
    held = size * value.shape[:-2].numel()
    return again * size * (heads or value.shape[:-2].numel()) if held > CACHE else 0.0


def whole(problem: Problem, *, causal: bool) -> tuple[float, float, float]:
    """Flops, passes and bytes moved of torch's flash kernel over all the pairs, or over what it takes of them."""
    pairs, leading = problem.weights_shape.numel(), problem.weights_shape[:-2].numel()
    share = min(0.5 + SKIPPED / (2 * problem.queries), 1.0) if causal and problem.queries else 1.0
    passes = EXPONENTIALS * pairs * share + beginnings(problem.queries, leading)
    return 2.0 * pairs * share * flash_width(problem), passes, read(problem, heads=leading)
