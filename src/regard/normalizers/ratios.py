"""Quotients other than softmax: rectified exponentials, rectified scores, and softmax with a 1 in the denominator."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import INFINITY, Normalizer, RatioNormalizer, quotients
from ..core.problem import Problem
from ..errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class Softmax1(Normalizer):
    """w_ij = e^s_ij / (1 + Σ_k e^s_ik), "softmax off by one": a row may attend to nothing.

    It is softmax with sinks of 0, and computed as that: the log-sum-exp counts the 1.

    Source: Miller 2023, "Attention Is Off By One".

    >>> import torch, regard
    >>> q, v = torch.zeros(2, 4), torch.ones(2, 1)
    >>> regard.attention(q, q, v, normalizer=regard.normalizers.Softmax1())
    tensor([[0.6667],
            [0.6667]])
    """

    name = "softmax1"
    has_lse = True
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "it is softmax with sinks of 0: give your sinks without it"}

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and log(1 + Σ e^s)."""
        weights, lse = quotients(*[torch.cat([scores, torch.zeros_like(scores[..., :1])], -1)] * 2)
        return weights[..., :-1], lse

    def for_problem(self, problem: Problem) -> Problem:
        """The problem of softmax attention with sinks of 0."""
        heads = problem.pairs.query.shape[-3] if problem.heads else 1
        dtype = torch.promote_types(problem.value.dtype, torch.float32)
        return replace(problem, sinks=torch.zeros(heads, dtype=dtype, device=problem.value.device))


@dataclass(frozen=True, eq=False)
class Softpick(RatioNormalizer):
    """w_ij = relu(e^s_ij - 1) / Σ_k |e^s_ik - 1|: weights of exactly 0, and no need for a sink.

    Source: Zuhri et al. 2025 (arXiv 2504.20966), without its ε: a row of scores that are all 0 has output 0.
    Keys that a row does not attend to count neither above nor below.

    >>> import torch, regard
    >>> regard.normalizers.Softpick().normalize(torch.tensor([[[3.0, 0.0]]]).log())[0]
    tensor([[[1., 0.]]])
    """

    name = "softpick"
    sums_to_one = False

    def log_numerator(self, scores: Tensor) -> Tensor:
        """Log (e^s - 1) of positive scores."""
        positive = scores > 0
        safe = torch.where(positive, scores, 1.0)
        return torch.where(positive, safe + (-torch.expm1(-safe)).log(), -INFINITY)

    def log_denominator(self, scores: Tensor) -> Tensor:
        """Log |e^s - 1|."""
        negative = (scores < 0) & (scores > -INFINITY)
        safe = torch.where(negative, scores, -1.0)
        return torch.where(negative, (-torch.expm1(safe)).log(), self.log_numerator(scores))

    def log_unit(self, scores: Tensor) -> Tensor:
        """The largest score, or 0 where that is larger: no |e^s - 1| is above e^u."""
        largest = scores.detach().amax(-1, keepdim=True)
        return largest.clamp(min=0.0).masked_fill(largest == -INFINITY, -INFINITY)

    def in_units(self, scores: Tensor, log_unit: Tensor) -> tuple[Tensor, Tensor]:
        """Of (e^s - 1) / e^u what is positive, and |it|, exact for scores near 0."""
        shift = log_unit.clamp(min=0.0)
        both = torch.expm1(scores - shift) - torch.expm1(-shift)
        both = both.masked_fill(scores == -INFINITY, 0.0) * (-log_unit).clamp(min=0.0).exp()
        return both.relu(), both.abs()

    def backward_tile(
        self, scores: Tensor, lse: Tensor, upstream: Tensor, delta: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(upstream · [s > 0] - delta · sign s) · e^(s - lse)."""
        slope = torch.where(scores > 0, upstream, 0.0).sub_(delta * scores.sign())
        return slope.mul_((scores - lse).exp_()), ()


@dataclass(frozen=True, eq=False)
class ReLU(RatioNormalizer):
    """w_ij = relu(s_ij)^p / Σ_k relu(s_ik)^p with p = 1 or 2; a row without a positive score has output 0.

    Source: Zhang et al. 2021 (arXiv 2104.07012), there with a norm of the output instead of the sum.

    Args:
        power: p.

    Raises:
        ConfigurationError: a power other than 1 and 2.

    >>> import torch, regard
    >>> regard.normalizers.ReLU(2).normalize(torch.tensor([[[1.0, -5.0, 3.0]]]))[0]
    tensor([[[0.1000, 0.0000, 0.9000]]])
    """

    power: int = 1

    name = "relu"
    sums_to_one = False

    def __post_init__(self) -> None:
        if self.power not in (1, 2):
            raise ConfigurationError(f"ReLU has power={self.power!r}; it needs 1, or 2 for squared ReLU")

    def log_numerator(self, scores: Tensor) -> Tensor:
        """P · log s of positive scores."""
        positive = scores > 0
        return torch.where(positive, self.power * torch.where(positive, scores, 1.0).log(), -INFINITY)

    def log_unit(self, scores: Tensor) -> Tensor:
        """P · log of the largest score, if that is positive."""
        return self.power * scores.detach().amax(-1, keepdim=True).clamp(min=0.0).log()

    def in_units(self, scores: Tensor, log_unit: Tensor) -> tuple[Tensor, Tensor]:
        """(relu(s) / e^(u / p))^p."""
        positive = scores.relu() * (-log_unit / self.power).exp()
        numerators = positive if self.power == 1 else positive.square()
        return numerators, numerators

    def backward_tile(
        self, scores: Tensor, lse: Tensor, upstream: Tensor, delta: Tensor
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """(upstream - delta) · p · relu(s)^(p - 1) / Z."""
        of_scores = (upstream - delta) * (scores > 0) * (-lse).exp()
        return of_scores if self.power == 1 else of_scores.mul_(2.0 * scores.clamp(min=0.0)), ()
