"""The formula as it is written, with all the weights in memory at once: every derivative, and the oracle of kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pairs import at_least_float32, per_head
from ..problem import Problem
from .base import Result


def formula(problem: Problem) -> Result:
    """C = softmax( softcap(f(Q, K)) + B, where M ) · V, and the log-sum-exp of each row's scores."""
    weights, lse = softmax(problem.scores(), problem.sinks)  # [..., H, M, N], [..., H, M]
    weights = problem.drop(weights)
    value = at_least_float32(problem.value).to(weights.dtype)
    output = per_head(lambda folded: folded @ value, weights, value)  # [..., H, M, Dv]
    return Result(output.to(problem.value.dtype), lse if problem.wants_lse else None)


def softmax(scores: Tensor, sinks: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """exp(scores - lse) over the keys, and lse = log Σ exp(scores); a row without keys has weights 0 and lse -inf.

    Shapes: scores (..., heads, M, N); sinks (heads,), one logit per head that takes weight and gives no value.
    """
    # One more column, the sink, or -inf where there is none: so that empty rows and empty sequences need no case.
    column = scores.new_full((*scores.shape[:-1], 1), float("-inf"))
    if sinks is not None:
        column = sinks.to(scores.dtype)[:, None, None].expand_as(column)
    scores = torch.cat([scores, column], dim=-1)
    peak = scores.detach().amax(-1, keepdim=True)
    peak = peak.masked_fill(peak == float("-inf"), 0.0)
    exponentials = torch.exp(scores - peak)
    total = exponentials.sum(-1, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # so that neither the quotient nor the gradient of the log divides by 0
    lse = (total.log() + peak).masked_fill(empty, float("-inf"))
    return (exponentials / total)[..., :-1], lse.squeeze(-1)
