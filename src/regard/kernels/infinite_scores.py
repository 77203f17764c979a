"""Pairs that infinity in a query or key gives a score of -infinity: they count as masked, forward and backward.

Their weight is exp(-∞) = 0 in every kernel. What needs care is where inputs are made finite, by setting infinity to 0
(`nan_safety`): the score is then finite. A row with a finite output attends to no pair with infinity in query or key
but to such ones, as of all others the score is +infinity or NaN. So there all pairs of a query or key with infinity are
masked, which leaves these rows as they are; the others are NaN, and take no part in a gradient. NaN in a value shows
even where the weight is 0 by a score.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from ..backends.torch.tile_loop import ScoredTiles
from ..biases.base import bias_parts
from ..biases.householder_products import ReflectedScores
from ..core.batched_problem import BatchedProblem
from ..core.finite import all_finite, waits
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import under_transform
from ..masks import Mask
from ..masks.tensor_mask import TensorMask
from ..tiles.tile_size import SCORES_PER_TILE, block_rows


def has_infinite_scores(problem: Problem) -> bool:
    """Whether infinity is in a query or key, of softmax of dot products without a softcap: there it may be -infinity.

    Of a problem whose numbers are not read it is said to be false: on a device that would have to be waited for, and
    under a transform.
    """
    if under_transform() or waits(problem.value) or not isinstance(problem.pairs, DotPairs):
        return False
    if problem.normalizer is not None or problem.softcap is not None:
        return False
    query, key = problem.pairs.query, problem.pairs.key
    if all_finite(query, key) or any(isinstance(bias, ReflectedScores) for bias in bias_parts(problem.bias)):
        return False
    return bool(query.isinf().any()) or bool(key.isinf().any())


def mask_without_infinity(problem: Problem) -> Mask | None:
    """The mask without pairs of queries and keys that have infinity; the problem's own unless `has_infinite_scores`."""
    if not has_infinite_scores(problem):
        return problem.mask
    query = ~problem.pairs.query.isinf().any(-1)  # [..., H, M]
    key = ~problem.pairs.key.isinf().any(-1)  # [..., Hk, N]
    if problem.heads and query.shape[-2] != key.shape[-2]:
        key = key.repeat_interleave(query.shape[-2] // key.shape[-2], -2)
    mask = _of_all_heads(problem)
    for finite, pairs in ((key, key.unsqueeze(-2)), (query, query.unsqueeze(-1))):
        if not finite.all():
            mask = TensorMask(pairs) if mask is None else mask & TensorMask(pairs)
    return mask


def _of_all_heads(problem: Problem) -> Mask | None:
    """The mask, as one of the heads where it is of the key heads, which do not broadcast to those of the queries.

    That is all pairs as booleans: the lists of such a mask cannot say what a query head of its own leaves out.
    """
    mask = problem.mask
    if mask is None or not problem.heads:
        return mask
    first = mask.evaluate(problem.grid().tile(slice(0, 1), slice(0, 1)))
    if first.ndim < 3 or first.shape[-3] in (1, problem.weights_shape[-3]):
        return mask
    return TensorMask(cast(Tensor, problem.keep()))


@torch.no_grad()
def rows_with_infinity(problem: Problem) -> Tensor:
    """Which rows (..., heads, M, 1) attend to NaN or infinity in a query or key by another score than -infinity."""
    batched = BatchedProblem.from_problem(problem)
    bad_query, bad_key = (~each.isfinite().all(-1) for each in (batched.pairs.query, batched.pairs.key))
    group = bad_query.shape[1] // max(bad_key.shape[1], 1)
    bad_key = bad_key.repeat_interleave(group, 1)
    found = torch.zeros_like(bad_query)
    for batch, rows in block_rows(problem, SCORES_PER_TILE):
        tiles = ScoredTiles(batched.part(batch), SCORES_PER_TILE)
        for row in rows:
            for columns, masked in tiles.in_row(row):
                bad = bad_query[batch, :, row.rows, None] | bad_key[batch, :, None, columns]
                if not bad.any():
                    continue
                keep = tiles.batched.keep(row.rows, columns) if masked else None
                bad = bad if keep is None else bad & keep
                bad &= tiles.scores(row.rows, columns, masked=False)[0] != float("-inf")
                found[batch, :, row.rows] |= bad.any(-1)
    return batched.unflatten_batch(found).unsqueeze(-1)
