"""The formula as it is written: any score, mask, bias, dtype and derivative. The oracle of every other kernel.

The formula as it is written, with all the weights in memory at once: every derivative, and the oracle of kernels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, at_least_float32, per_head
from ..core.torch_modes import without_autocast
from .base import Cost, Result
from .cost_model import CAP, DROP, FEATURE, MASK, SELECT, VALUE, WEIGHTS, bytes_read
from .mask_tiles import distinct_matrices
from .nan_safety import run_nan_safe


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


class ReferenceKernel:
    """C = softmax( f(Q, K) + B, where M ) · V, with all the weights in memory at once.

    Sums are in float32 at least; autocast does not reach in.
    """

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """Nothing: whatever is a problem, this computes."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and kept, several times over: scores, masked scores, weights."""
        pairs, features = problem.weights_shape.numel(), problem.pairs.query.shape[-1]
        size = max(problem.value.element_size(), 4)
        masks, biases = distinct_matrices(problem)
        additive = isinstance(problem.pairs, AdditivePairs)
        steps = (masks > 0) + (biases > 0) + 3 * (problem.softcap is not None) + 3 * (problem.dropout is not None)
        one = problem.queries * problem.keys
        return Cost(
            flops=2.0 * pairs * (problem.value.shape[-1] + features * (not additive)),
            bytes=size * pairs * (3.0 + steps / 2 + 2.0 * features * additive),
            passes=pairs * (WEIGHTS + FEATURE * features * additive)
            + pairs
            * (SELECT * bool(masks) + CAP * (problem.softcap is not None) + DROP * (problem.dropout is not None))
            + one * (MASK * masks + VALUE * biases),
            moved=bytes_read(problem),
            calls=30.0 + 20.0 * bool(masks) + 10.0 * steps,
            note="it computes all pairs, and keeps them in memory",
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp where it is wanted."""
        with without_autocast(problem.value.device.type):
            return run_nan_safe(problem, formula)
