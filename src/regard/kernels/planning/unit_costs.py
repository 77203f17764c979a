"""Unit costs of the kernels' work, in passes and calls, and the counting of work that kernels share.

A pass is the time of an element-wise operator for one number in the cache.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ...backends.torch.torch_flash_timing import packing_rows
from ...biases.base import TensorBias
from ...biases.relative import RelativeBias
from ...core.problem import Problem
from ...core.score_forms import AdditivePairs
from ...tiles.mask_tiles import distinct_matrices, sampled_layouts
from ...tiles.tile_size import MIN_TILE_SIDE, split_batches, tile_size
from ..base import BACKWARD, Cost, FlashWork
from .rates import REUSED_BYTES
from .unit_prices import price

# What each price is of, and which command measures it: unit_prices.json.
TILE_RESULT = price("unit_costs.tile_result")
ROW = price("unit_costs.row")
TRAINED_STARTUP = price("unit_costs.trained_startup")
OVERHEAD_ROWS = 32
"""The number of rows of a rectangle that have the overhead ROW; further rows have none."""
OPERATOR = price("unit_costs.operator")
RESULT = price("unit_costs.result")
TILEWISE = price("unit_costs.tilewise")
WEIGHTS = price("unit_costs.weights")
WIDEN = price("unit_costs.widen")
SELECT = price("unit_costs.select")
MASK = price("unit_costs.mask")
VALUE = price("unit_costs.value")
COPIED_VALUE = price("unit_costs.copied_value")
CAP = price("unit_costs.cap")
DROP = price("unit_costs.drop")
FEATURE = price("unit_costs.feature")
UNREAD = price("unit_costs.unread")
TORCH_COLUMNS = 512
"""The keys of its blocks; with a causal mask it skips those that are masked."""
NARROW_PRODUCT = price("unit_costs.narrow_product")
REREAD = price("unit_costs.reread")
REREAD_WIDENED = price("unit_costs.reread_widened")
MIN_PACKED_ROWS = 16
"""The fewest rows for which torch's products pack keys and values; a few rows read them as they are."""


def tilewise_cost(problem: Problem, tile: int) -> Cost:
    """The work over the tiles with unmasked pairs, some eight passes over each."""
    size, heads = tile_size(problem, tile), problem.weights_shape[-3] if problem.heads else 1
    (masks, biases), alike = distinct_matrices(problem), isinstance(problem.bias, RelativeBias)
    of_bias = 0.0 if alike else bias_passes(problem) * biases
    pairs = tiles = at_once = asked = 0.0
    share, found = sampled_layouts(problem, (size[0], MIN_TILE_SIDE), 1)
    for batch, rows in split_batches(problem, found, tile):
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
        bytes=4.0 * 4 * min(max(tile, heads * size[0] * size[1]), problem.weights_shape.numel())
        + widened_bytes(problem)
        + result_bytes(problem),
        passes=(TILEWISE + extras) * pairs
        + tiles * (startup_passes(many, at_once / many) + TILE_RESULT * numbers)
        + evaluated(problem, asked)
        + WIDEN * widened_numbers(problem),
        moved=bytes_read(problem, again=pairs / max(problem.weights_shape[:-2].numel() * many * problem.keys, 1)),
        calls=OPERATOR + 20.0 + 35.0 * tiles + 30.0 * bool(masks) + 120.0 * bool(biases),
    )


def add_feature_cost(cost: Cost, problem: Problem, passes: float) -> Cost:
    """Add `passes` per feature and visited pair to a cost, if the score is additive."""
    if not isinstance(problem.pairs, AdditivePairs):
        return cost
    width = problem.value.shape[-1] + problem.pairs.query.shape[-1]
    visited = cost.flops / 2.0 / width if width else 0.0
    features = problem.pairs.query.shape[-1]
    return replace(
        cost,
        flops=2.0 * visited * problem.value.shape[-1],
        passes=cost.passes + passes * visited * features,
    )


def heads_per_key(problem: Problem) -> int:
    """Query heads per key head, 1 at least."""
    return max(problem.pairs.query.shape[-3] // max(problem.value.shape[-3], 1), 1) if problem.heads else 1


def total_width(problem: Problem) -> int:
    """Key dim plus value dim."""
    return problem.pairs.query.shape[-1] + problem.value.shape[-1]


def torch_flash_width(problem: Problem) -> int:
    """Key dim plus value dim in torch's flash kernel, which pads both to the larger one."""
    return 2 * max(problem.pairs.query.shape[-1], problem.value.shape[-1])


def startup_passes(rows: int, rectangles: float) -> float:
    """Overhead of dense rectangles of so many rows, in passes."""
    return ROW * min(rows, OVERHEAD_ROWS) * rectangles


def torch_flash_startup(problem: Problem, rows: int, rectangles: float) -> float:
    """`startup_passes` of rectangles whose gradient is by torch's flash kernel too."""
    return startup_passes(rows, rectangles) * (TRAINED_STARTUP if problem.inputs_require_grad() else 1.0)


def bytes_read(problem: Problem, *, again: float = 1.0) -> float:
    """Bytes of keys and values that are read, `again` times; query heads of a group find them in the cache."""
    value = problem.value
    return again * value.element_size() * value.shape[:-2].numel() * problem.keys * total_width(problem)


def torch_flash_work(problem: Problem, pairs: float, rows: int, columns: float | None = None) -> FlashWork:
    """The work of torch's flash kernel over so many pairs, in rectangles of so many rows and columns, by default all.

    Few rows are one block; of more, blocks of 32, 64 or 256 rows pack the keys and values anew.
    """
    width = torch_flash_width(problem)
    many = max(packing_rows(rows), 1)
    numbers = pairs / many * width
    tiles = pairs / many / max(min(columns or problem.keys, TORCH_COLUMNS), 1)
    few = rows < MIN_PACKED_ROWS
    if few and rows == problem.queries:  # each query head of a group reads the keys, all but the first from the cache
        group = heads_per_key(problem)
        again = REREAD if problem.value.element_size() >= 4 else REREAD_WIDENED
        numbers *= (1 + again * (group - 1)) / group
        if rows == 1 and problem.value.dtype == torch.bfloat16:  # it is doubled: see `without_single_row`
            numbers *= 1 + again
    flops = 2.0 * pairs * width * (1 + NARROW_PRODUCT / max(min(columns or problem.keys, TORCH_COLUMNS), 1))
    return FlashWork(flops, pairs, 0.0 if few else numbers, numbers if few else 0.0, tiles)


def product_work(pairs: float, rows: int, width: int) -> tuple[float, float]:
    """Flops of torch's products over so many pairs, in rectangles of so many rows, and numbers that few rows stream."""
    return 2.0 * pairs * width, pairs / max(rows, 1) * width if rows < MIN_PACKED_ROWS else 0.0


def bias_passes(problem: Problem) -> float:
    """Passes per pair on which the bias is evaluated."""
    return COPIED_VALUE if isinstance(problem.bias, RelativeBias | TensorBias) else VALUE


def evaluated(problem: Problem, passes: float, *, times: int = 2, backward: float = BACKWARD) -> float:
    """The part of `Cost.passes` that evaluating a mask or bias takes.

    In training it is evaluated `times` times in all, whatever the backward pass repeats of the rest. backward:
    `Cost.backward`.
    """
    return passes * times / (1 + backward) if problem.inputs_require_grad() else passes


def widened_numbers(problem: Problem) -> float:
    """Numbers of keys and values that are converted to float32, in new memory: all of those of 16 bits."""
    numbers = problem.value.shape[:-2].numel() * problem.keys * total_width(problem)
    return float(numbers) if problem.value.element_size() < 4 else 0.0


def result_bytes(problem: Problem) -> float:
    """Bytes of fresh memory for the output of torch's operators, whose memory may be used again where it is small."""
    value = problem.value
    size = float(value.element_size() * problem.weights_shape[:-1].numel() * value.shape[-1])
    return size if size >= REUSED_BYTES else 0.0


def widened_bytes(problem: Problem) -> float:
    """Bytes of fresh memory for them: keys and values have one tensor each, whose memory may be used again."""
    size = 4.0 * widened_numbers(problem)
    return size if size / 2 >= REUSED_BYTES else 0.0


def torch_flash_cost(problem: Problem, *, causal: bool) -> Cost:
    """The cost of torch's flash kernel over all pairs, or over the tiles that is_causal leaves."""
    pairs, leading = problem.weights_shape.numel(), problem.weights_shape[:-2].numel()
    share = min(0.5 + TORCH_COLUMNS / (2 * problem.queries), 1.0) if causal and problem.queries else 1.0
    return Cost(
        flops=0.0,
        bytes=result_bytes(problem),
        passes=torch_flash_startup(problem, problem.queries, leading),
        moved=bytes_read(problem),
        flash={"torch": torch_flash_work(problem, pairs * share, problem.queries)},
    )
