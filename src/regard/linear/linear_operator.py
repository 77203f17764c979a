"""Linear attention as a normalizer, whose weights lenses and records read: φ(q)·φ(k) over their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import RatioNormalizer, register_normalizer
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DecayedDotPairs, DotPairs
from ..errors import MaskError
from ..kernels import Cost, Kernel, Result
from .feature_maps import Identity
from .linear_mask import read_mask
from .linear_plans import feature_plan
from .linear_problem import make_linear_problem


def log_of_positive(scores: Tensor) -> Tensor:
    """The logarithm of scores above 0, and -inf of others; its gradient is finite everywhere."""
    positive = scores > 0
    return torch.where(positive, torch.where(positive, scores, 1.0).log(), -math.inf)


class RecurrenceKernel:
    """Output and totals of given features by sums over keys, in time and memory linear in the lengths."""

    name = "recurrence"

    def why_not(self, problem: Problem) -> list[str]:
        """Features of a problem that sums over keys cannot have."""
        reasons = []
        if isinstance(problem.pairs, AdditivePairs):
            reasons.append("it computes products of features; this score is additive")
        for name in ("bias", "softcap", "sinks", "dropout", "query_positions", "key_positions"):
            if getattr(problem, name) is not None:
                reasons.append(f"sums over keys have no {name.replace('_', ' ')}")
        try:
            mask = read_mask(problem.mask, causal=False)
        except MaskError as error:
            return [*reasons, str(error)]
        if isinstance(problem.pairs, DecayedDotPairs) and not mask.causal:
            reasons.append("a decay needs masks.causal()")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """Two products of each position with the state."""
        features, width = problem.pairs.query.shape[-1], problem.value.shape[-1] + 1
        heads = problem.weights_shape[:-2].numel()
        flops = 2.0 * heads * (problem.queries + problem.keys) * features * width
        return Cost(flops, 4.0 * heads * features * width, passes=heads * problem.queries * features, calls=60.0)

    def run(self, problem: Problem) -> Result:
        """The output, and the logarithms of the totals."""
        query, key, decay = _features(problem.pairs)
        value = problem.value.to(key.dtype)
        linear = make_linear_problem(
            query, key, value, feature_map=Identity(), scale=1.0, mask=problem.mask, decay=decay
        )
        result = feature_plan(linear).run()
        if result.total is None:
            raise AssertionError("sums of given features have totals")
        lse = torch.where(result.total.isnan(), math.nan, log_of_positive(result.total))
        return Result(result.output.to(problem.value.dtype), lse)


def _features(pairs: DotPairs | AdditivePairs | DecayedDotPairs) -> tuple[Tensor, Tensor, Tensor | None]:
    """φ(q), φ(k), and the logarithms of the decays."""
    if isinstance(pairs, DotPairs):
        return pairs.query * pairs.scale if pairs.scale != 1.0 else pairs.query, pairs.key, None
    if isinstance(pairs, AdditivePairs):
        raise AssertionError("`why_not` refuses additive scores")
    return pairs.query[..., : pairs.features], pairs.key[..., : pairs.features], pairs.decay()


@dataclass(frozen=True, eq=False, repr=False)
class LinearWeights(RatioNormalizer):
    """w_ij = s_ij / Σ_k s_ik over products s of features, at least 0."""

    name = "linear"
    kernels: ClassVar[tuple[Kernel, ...] | None] = (RecurrenceKernel(),)

    def log_numerator(self, scores: Tensor) -> Tensor:
        """Log s, and -inf of scores that are not above 0."""
        return log_of_positive(scores)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights without a logarithm, and lse."""
        numerators = scores.clamp(min=0.0)  # -inf, of masked pairs, becomes 0
        total = numerators.sum(-1, keepdim=True)
        return numerators / total.masked_fill(total == 0, 1.0), log_of_positive(total).squeeze(-1)


LINEAR = register_normalizer(LinearWeights())
