"""Weights times a factor of their key, as weights of a problem whose scores have its logarithm added.

exp(s_ij + log n_j - lse_i) is w_ij · n_j, with the log-sum-exp of the problem as it was. The logarithm is one more
feature of the keys, which queries read with 1: so all that goes over dot products computes it.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import DotPairs

SMALLEST = 1e-30
"""The factor in place of 0, whose logarithm is finite."""


def key_weighted(problem: Problem, factors: Tensor) -> Problem | None:
    """A problem whose weights, by the log-sum-exp of the given one, are w_ij · n_j; None where no feature says so.

    factors (B, H, N): n, at least 0, in float32 at least.
    """
    pairs, value = problem.pairs, problem.value
    plain = problem.softcap is None and problem.normalizer is None and value.dtype != torch.float64 and value.is_cpu
    if not isinstance(pairs, DotPairs) or not pairs.scale or not plain or _has_mask_of_key_heads(problem):
        return None
    factors = factors.reshape(*problem.weights_shape[:-2], problem.keys).float()
    logarithms = factors.clamp(min=SMALLEST).log().unsqueeze(-1) / pairs.scale
    query, key = pairs.query.float(), pairs.key.float()
    if problem.heads and key.shape[-3] != factors.shape[-2]:
        key = key.repeat_interleave(factors.shape[-2] // key.shape[-3], -3)
    key = key.expand(*logarithms.shape[:-1], key.shape[-1])
    ones = query.new_ones(*query.shape[:-1], 1)
    return replace(
        problem,
        pairs=DotPairs(torch.cat([query, ones], -1), torch.cat([key, logarithms], -1), pairs.scale),
        value=key[..., :0],
    )


def _has_mask_of_key_heads(problem: Problem) -> bool:
    """Whether the mask is one for each key head that several query heads share."""
    if problem.mask is None or not problem.heads:
        return False
    corner = problem.mask.evaluate(problem.grid().tile(slice(0, 1), slice(0, 1)))
    return corner.ndim > 2 and corner.shape[-3] not in (1, problem.weights_shape[-3])
