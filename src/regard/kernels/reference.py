"""The formula as it is written: any score, mask, bias, dtype and derivative. The oracle of every other kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from ..pairs import at_least_float32, per_head
from ..problem import Problem
from .base import Cost, Result, shielded


class Reference:
    """C = softmax( f(Q, K) + B, where M ) · V, with all the weights in memory at once.

    Sums are in float32 at least; autocast does not reach in.
    """

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Nothing: whatever is a problem, this computes."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and kept, several times over: scores, masked scores, weights."""
        pairs = problem.weights_shape.numel()
        width = problem.pairs.query.shape[-1] + problem.value.shape[-1]
        return Cost(flops=2.0 * pairs * width, bytes=3.0 * pairs * max(problem.value.element_size(), 4))

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp where it is wanted."""
        with torch.autocast(problem.value.device.type, enabled=False):
            return shielded(problem, _attend)


def _attend(problem: Problem) -> Result:
    weights, lse = softmax(problem.scores(), problem.sinks)  # [..., H, M, N], [..., H, M]
    if problem.dropout_p:
        weights = torch.nn.functional.dropout(weights, problem.dropout_p)
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
