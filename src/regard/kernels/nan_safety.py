"""NaN and infinity in a masked position reach nothing; where a row attends to one, it is NaN, and no other row is.

A weight of exactly 0 times NaN is NaN, forward and backward, in every kernel. What a kernel gives is finite only if
nothing of that kind went in: so one look at the result is enough, and the careful way is taken only where it shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import all_finite, finite
from ..core.torch_modes import transformed
from .base import Result

Compute = Callable[[Problem], Result]


def shielded(problem: Problem, compute: Compute, *, shows_nan: bool = True) -> Result:
    """Compute a problem so that NaN or infinity in a masked position reaches nothing.

    shows_nan: whether the result is sure to show NaN in a query or key that it comes from.

    Where it might, the problem is computed without them; the rows that do attend to one are found by attention itself
    (equal weights over indicators: above 0 where one is in sight) and become NaN.
    """
    exists_all = problem.mask is None and problem.keys > 0  # then nothing is to be kept from NaN
    if transformed():
        return compute(problem) if exists_all and shows_nan else _careful(problem, _finite(problem), compute)
    if shows_nan or all_finite(problem.pairs.query, problem.pairs.key):
        if exists_all:
            return compute(problem)
        if not problem.asks_for_gradient():  # NaN may be in a gradient though not in the result
            result = compute(problem)
            if all_finite(result.output):
                return result
    clean = cleaned(problem)
    return compute(problem) if clean is problem else _careful(problem, clean, compute)


def _careful(problem: Problem, clean: Problem, compute: Compute) -> Result:
    """The result of the clean problem, with NaN in the rows that attend to what was cleaned away."""
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    result = compute(clean)
    bad_query = ~query.isfinite().all(-1, keepdim=True)  # [..., H, M, 1]
    bad_key = ~key.isfinite().all(-1, keepdim=True)  # [..., Hk, N, 1]
    sees_key = _in_sight(clean, bad_key, compute)
    sees_value = _in_sight(clean, bad_key | ~value.isfinite(), compute)
    sees_any = _in_sight(clean, torch.ones_like(bad_key), compute)
    output = result.output.masked_fill(sees_value | (bad_query & sees_any), float("nan"))
    if result.lse is None:
        return Result(output)
    bad_row = (sees_key | (bad_query & sees_any)).squeeze(-1)
    return Result(output, result.lse.masked_fill(bad_row, float("nan")))


def cleaned(problem: Problem) -> Problem:
    """The problem with NaN and infinity set to 0, or the problem itself where there is neither."""
    tensors = problem.pairs.query, problem.pairs.key, problem.value
    return problem if not transformed() and all_finite(*tensors) else _finite(problem)


def _finite(problem: Problem) -> Problem:
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    return replace(problem, pairs=replace(problem.pairs, query=finite(query), key=finite(key)), value=finite(value))


def _in_sight(problem: Problem, marked: Tensor, compute: Compute) -> Tensor:
    """For each query and each column of `marked` (..., key heads, N, ·): does it attend to a marked key?

    The mask alone says so: a bias or a sink may leave a key a weight too small to be seen, and NaN comes through it.
    """
    with torch.no_grad():
        pairs = replace(
            problem.pairs, query=torch.zeros_like(problem.pairs.query), key=torch.zeros_like(problem.pairs.key)
        )
        uniform = replace(
            problem,
            pairs=pairs,
            value=marked.to(problem.value.dtype),
            bias=None,
            softcap=None,
            sinks=None,
            dropout=None,
            wants_lse=False,
        )
        return compute(uniform).output > 0
