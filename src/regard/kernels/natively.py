"""What native code computes of dot products over tiles, and a problem as it takes it: what all that calls it shares."""

from __future__ import annotations

from collections.abc import Iterator

from .. import native
from ..biases import RelativeBias
from ..pairs import DotPairs
from ..problem import Problem
from ..tiles import WHOLE
from .bits import masked_pairs, tiles_of
from .diagonals import bias_along
from .flat import Flat

MOST_BITS = 2**31
"""Masked pairs for which bits are kept: 256 MiB of them."""


def why_not(problem: Problem) -> list[str]:
    """Why native code cannot: other scores, other numbers, other processors, and what its code has no word for."""
    reasons, value = [], problem.value
    if not isinstance(problem.pairs, DotPairs):
        reasons.append("its code computes dot products; this score is additive")
    if value.dtype not in native.DTYPES:
        reasons.append(f"its code reads float32 and bfloat16; this is {str(value.dtype).removeprefix('torch.')}")
    if not value.is_cpu:
        reasons.append(f"its code runs on the CPU; this is on {value.device}")
    if problem.bias is not None and not _along(problem):
        reasons.append("of all biases its code adds those by distance alone, of queries and keys in their usual places")
    if reason := native.why_not():
        reasons.append(f"there is no native code: {reason}")
    if not reasons and problem.mask is not None and (pairs := masked_pairs(problem)) > MOST_BITS:
        reasons.append(f"the mask cuts tiles of {pairs:,} pairs, each of which would be kept as a bit")
    return reasons


def native_parts(flat: Flat) -> Iterator[tuple[slice, native.FlashProblem]]:
    """Batches that see the same tiles, as native code takes them."""
    pairs, problem = flat.pairs, flat.problem
    if not isinstance(pairs, DotPairs):
        raise TypeError("native code over tiles computes dot products")
    line = bias_along(problem, problem.bias).float() if isinstance(problem.bias, RelativeBias) else None
    for batch, tiles in tiles_of(flat):
        own = pairs.query[batch], pairs.key[batch], flat.value[batch]
        yield batch, native.FlashProblem(*own, pairs.scale, tiles, problem.softcap, line, _drops(flat, batch))


def _drops(flat: Flat, batch: slice) -> native.Drops | None:
    """Which weights of some batches are dropped."""
    dropout = flat.problem.dropout
    if dropout is None:
        return None
    rows, columns = dropout.noise(flat.shape, batch, WHOLE, WHOLE)
    return native.Drops(rows, columns, dropout.threshold, 1.0 - dropout.probability)


def _along(problem: Problem) -> bool:
    """Whether the bias is one by distance, of queries and keys in their usual places."""
    placed = problem.query_positions is not None or problem.key_positions is not None
    return isinstance(problem.bias, RelativeBias) and not placed and problem.queries > 0 and problem.keys > 0
