"""What a kernel is: one way to compute a Problem, which says what it cannot do before it is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from ..pairs import all_finite, finite
from ..problem import Problem


@dataclass(frozen=True, eq=False, slots=True)
class Result:
    """output (..., heads, M, Dv), and the log-sum-exp (..., heads, M) of each row of scores where it was wanted."""

    output: Tensor
    lse: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Cost:
    """What a kernel will spend on a problem: floating-point operations, and bytes above inputs and outputs."""

    flops: float
    bytes: float


class Kernel(Protocol):
    """One way to compute a Problem."""

    name: str

    def why_not(self, problem: Problem) -> list[str]:
        """The reasons why this kernel cannot compute the problem; empty if it can."""
        ...

    def cost(self, problem: Problem) -> Cost:
        """What the problem would cost here."""
        ...

    def run(self, problem: Problem) -> Result:
        """The result; only asked for where `why_not` is empty."""
        ...


def shielded(problem: Problem, compute: Callable[[Problem], Result]) -> Result:
    """Compute a problem so that NaN or infinity in a masked position reaches nothing.

    The problem is computed without them; the rows that do attend to one are found by attention itself (equal weights
    over indicators: above 0 where one is in sight) and become NaN.
    """
    clean = cleaned(problem)
    if clean is problem:
        return compute(problem)
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
    """The problem with NaN and infinity set to 0, or the problem itself where that changes nothing.

    A weight of exactly 0 times NaN is NaN, forward and backward, in every kernel. Without a mask every pair exists and
    nothing is to be kept from NaN, but where there are no keys no pair exists at all.
    """
    query, key, value = problem.pairs.query, problem.pairs.key, problem.value
    if (problem.mask is None and problem.keys) or all_finite(query, key, value):
        return problem
    return replace(problem, pairs=replace(problem.pairs, query=finite(query), key=finite(key)), value=finite(value))


def _in_sight(problem: Problem, marked: Tensor, compute: Callable[[Problem], Result]) -> Tensor:
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
            dropout_p=0.0,
            wants_lse=False,
        )
        return compute(uniform).output > 0
