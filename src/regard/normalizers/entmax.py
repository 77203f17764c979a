"""Sparse distributions: sparsemax and α-entmax, whose weights are 0 below a threshold of each row."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer
from ..core.problem import Problem
from ..core.torch_modes import under_forward_mode, under_transform
from ..errors import ConfigurationError
from ..utils.numbers import lies_between
from .parameters import check_parameter, over_heads, sum_over_heads

SMALLEST_ALPHA = 1.05
"""Below, the power 1 / (α - 1) leaves float32 no digits; at 1 it is softmax."""
MOST_STEPS = 64
"""The most steps to a threshold; Newton's method takes about ten, bisection one for each bit."""


@dataclass(frozen=True, eq=False)
class Entmax(Normalizer):
    """w_ij = max((α - 1) s_ij - τ_i, 0)^(1 / (α - 1)), with the τ_i for which row i sums to 1.

    α = 1 is the limit of softmax, α = 2 is sparsemax. Keys whose scores lie far below the largest have a weight of
    exactly 0; the larger α, the fewer are left. A sink is one more score, of no value.

    Source: Peters et al. 2019 (arXiv 1905.05702), Eq. 9 and Proposition 1; learned α: Correia et al. 2019
    (arXiv 1909.00015).

    There is no log-sum-exp, and parts of a row cannot be merged. `Observation.lse` has τ.

    Args:
        alpha: α, a number, or a tensor () or (heads,), which may be learned; at least 1.05.

    Raises:
        ConfigurationError: α below 1.05.
        ShapeError, DtypeError, DeviceError: when attention runs, an α that does not fit.

    >>> import torch, regard
    >>> regard.normalizers.Entmax(1.5).normalize(torch.tensor([[[1.0, 0.0, -3.0]]]))[0]
    tensor([[[0.8307, 0.1693, 0.0000]]])
    """

    alpha: Tensor | float = 1.5

    name = "entmax"

    def __post_init__(self) -> None:
        if isinstance(self.alpha, Tensor):
            return
        if not (lies_between(0.0, self.alpha, math.inf) and self.alpha >= SMALLEST_ALPHA):
            raise _too_small(self.alpha)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the thresholds."""
        return threshold_weights(scores, over_heads(self.alpha, scores))

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """T · (upstream - Σ t · upstream / Σ t) for t = w^(2 - α); that of α as Correia et al. derive it."""
        alpha = over_heads(self.alpha, scores)
        positive = weights > 0
        slopes = torch.where(positive, torch.where(positive, weights, 1.0).pow(2.0 - alpha), 0.0)
        total = slopes.sum(-1, keepdim=True)
        slopes_share = slopes / total.masked_fill(total == 0, 1.0)
        of_scores = slopes * (upstream - (slopes_share * upstream).sum(-1, keepdim=True))
        if not isinstance(self.alpha, Tensor):
            return of_scores, ()
        terms = -torch.special.xlogy(weights, weights)
        of_alpha = (weights - slopes_share) / (alpha - 1.0) ** 2
        of_alpha = of_alpha + (terms - slopes_share * terms.sum(-1, keepdim=True)) / (alpha - 1.0)
        return of_scores, (sum_over_heads(self.alpha, of_alpha.mul_(upstream)),)

    def inverse_powers(self, heads: int, device: torch.device) -> Tensor:
        """α - 1 of each head, (heads,) float32 without autograd; a number is filled in there, as copying would wait."""
        if isinstance(self.alpha, Tensor):
            return (self.alpha.detach().to(device, torch.float32) - 1.0).expand(heads)
        return torch.full((heads,), self.alpha - 1.0, dtype=torch.float32, device=device)

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer."""
        check_parameter("alpha", self.alpha, problem)
        alpha = self.alpha
        if (
            isinstance(alpha, Tensor)
            and alpha.is_cpu
            and not under_transform()
            and bool((alpha < SMALLEST_ALPHA).any())
        ):
            raise _too_small(alpha.min().item())
        return Normalizer.for_problem(self, problem)


@dataclass(frozen=True, eq=False)
class Sparsemax(Normalizer):
    """w_ij = max(s_ij - τ_i, 0), with the τ_i for which row i sums to 1: the projection of the scores to distributions.

    A sink is one more score, of no value.

    Source: Martins and Astudillo 2016 (arXiv 1602.02068), Proposition 1.

    There is no log-sum-exp, and parts of a row cannot be merged. `Observation.lse` has τ.

    >>> import torch, regard
    >>> regard.normalizers.Sparsemax().normalize(torch.tensor([[[1.0, 0.5, -3.0]]]))[0]
    tensor([[[0.7500, 0.2500, 0.0000]]])
    """

    name = "sparsemax"

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the thresholds."""
        return threshold_weights(scores, 2.0)

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upstream less its mean over the keys with weight, of these."""
        support = (weights > 0).to(weights.dtype)
        mean = (support * upstream).sum(-1, keepdim=True) / support.sum(-1, keepdim=True).clamp(min=1.0)
        return support.mul_(upstream - mean), ()


def threshold_alpha(normalizer: Normalizer | None) -> float | None:
    """α where weights are what scores have above a threshold, 2, or the square of that, 1.5; else None.

    >>> threshold_alpha(Sparsemax()), threshold_alpha(Entmax(1.5)), threshold_alpha(Entmax(1.3))
    (2.0, 1.5, None)
    """
    if isinstance(normalizer, Sparsemax):
        return 2.0
    if isinstance(normalizer, Entmax) and not isinstance(normalizer.alpha, Tensor) and normalizer.alpha in (1.5, 2.0):
        return float(normalizer.alpha)
    return None


def _too_small(alpha: float) -> ConfigurationError:
    return ConfigurationError(
        f"alpha is {alpha!r}; it needs a number of at least {SMALLEST_ALPHA}. At 1 it is softmax: leave normalizer out"
    )


def threshold_weights(scores: Tensor, alpha: Tensor | float) -> tuple[Tensor, Tensor]:
    """max((α - 1) s - τ, 0)^(1 / (α - 1)), and τ, -inf of rows without scores; differentiable in both.

    Shapes: scores (..., n); α a number, or broadcastable to them.
    """
    if not scores.shape[-1]:
        return scores, scores.sum(-1) - INFINITY
    power = 1.0 / (alpha - 1.0)
    scaled = (alpha - 1.0) * scores
    if isinstance(alpha, Tensor):  # whose gradient is a product with the scores
        exists = scores > -INFINITY
        scaled = torch.where(exists, (alpha - 1.0) * torch.where(exists, scores, 0.0), -INFINITY)
    peak = scaled.detach().amax(-1, keepdim=True)
    empty = peak == -INFINITY
    peak = peak.masked_fill(empty, 0.0)
    scaled = scaled - peak
    with torch.no_grad():
        threshold = _find_threshold(scaled.detach(), power.detach() if isinstance(power, Tensor) else power)
    if torch.is_grad_enabled() or under_forward_mode() or under_transform():
        # At the root, a step of Newton's method has the root's own derivative; a second step its second derivative.
        for _ in range(2):
            value, slope = _excess(scaled, threshold, power)
            threshold = threshold + value / slope
    weights = _powers(scaled - threshold, power)
    total = weights.detach().sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    return weights, (threshold + peak).masked_fill(empty, -INFINITY).detach().squeeze(-1)


def _powers(numbers: Tensor, power: Tensor | float) -> Tensor:
    """max(x, 0)^p, whose derivatives are 0 where it is 0."""
    positive = numbers > 0
    return torch.where(positive, torch.where(positive, numbers, 1.0).pow(power), 0.0)


def _excess(scaled: Tensor, threshold: Tensor, power: Tensor | float) -> tuple[Tensor, Tensor]:
    """Σ max(z - τ, 0)^p - 1, and -d/dτ of it; 1 in rows where that is 0."""
    above = scaled - threshold
    value = _powers(above, power).sum(-1, keepdim=True) - 1.0
    slope = (power * _powers(above, power - 1.0)).sum(-1, keepdim=True)
    return value, slope.masked_fill(slope == 0, 1.0)


def _find_threshold(scaled: Tensor, power: Tensor | float) -> Tensor:
    """The τ of rows (..., n) whose largest number is 0, (..., 1): Newton's method within a bracket that is halved else.

    Up to α = 2 the sum is convex in τ, and Newton's method from -1, where it is too large, never goes too far.
    """
    low = torch.full_like(scaled[..., :1], -1.0)  # where the largest alone makes up the sum
    high = torch.zeros_like(low)
    threshold, tiny = low, torch.finfo(scaled.dtype).eps
    watched = scaled.is_cpu and not under_transform()
    for _ in range(MOST_STEPS):
        value, slope = _excess(scaled, threshold, power)
        low, high = torch.where(value >= 0, threshold, low), torch.where(value <= 0, threshold, high)
        stepped = threshold + value / slope
        inside = (stepped >= low) & (stepped <= high)
        stepped = torch.where(inside, stepped, (low + high) / 2)
        if watched and bool(((stepped - threshold).abs() <= tiny * threshold.abs()).all()):
            return stepped
        threshold = stepped
    return threshold
