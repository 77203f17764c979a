"""Sigmoid attention: each weight follows from its own score alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from ..core.normalizer import Normalizer
from ..core.problem import Problem
from .parameters import check_number, check_parameter, over_heads, sum_over_heads


@dataclass(frozen=True, eq=False)
class Sigmoid(Normalizer):
    """w_ij = σ(s_ij + b); rows do not sum to 1.

    Source: Ramapuram et al. 2024 (arXiv 2409.04431); b = -log N is theirs, with which the weights of a row start out
    with a sum of about 1.

    The output for all keys is the sum of those for parts of them, with one b. There is no log-sum-exp, and no sink.
    `Observation.lse` has the logarithm of the sum of each row's weights.

    Args:
        bias: b, a number, or a tensor () or (heads,), which may be learned; None for -log N with the N keys of the
            call, those behind the mask too.

    Raises:
        ConfigurationError: a bias that is no finite number, tensor or None.
        ShapeError, DtypeError, DeviceError: when attention runs, a bias that does not fit.

    >>> import torch, regard
    >>> q, v = torch.zeros(2, 4), torch.tensor([[1.0], [3.0]])
    >>> regard.attention(q, q, v, normalizer=regard.normalizers.Sigmoid(bias=0.0))
    tensor([[2.],
            [2.]])
    """

    bias: Tensor | float | None = None

    name = "sigmoid"
    sums_to_one = False
    refuses: ClassVar[Mapping[str, str]] = {"sinks": "no sum divides the weights, so a sink would take nothing of them"}

    def __post_init__(self) -> None:
        check_number("bias", self.bias)

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the logarithm of their sum."""
        weights = torch.sigmoid(self._shifted(scores))
        return weights, weights.detach().sum(-1).log()

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Upstream · w · σ(-s - b): of large scores 1 - w would be 0."""
        of_scores = self._shifted(scores).neg_().sigmoid_().mul_(weights).mul_(upstream)
        return of_scores, tuple(sum_over_heads(each, of_scores) for each in self.parameters())

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer and its bias."""
        check_parameter("bias", self.bias, problem)
        bias = _minus_log(problem) if self.bias is None else self.bias
        problem.normalizer = replace(self, bias=bias)
        return problem

    def merge(self, outputs: Tensor) -> Tensor:
        """The sum of the outputs."""
        return outputs.sum(0)

    def bias_of_heads(self, heads: int, device: torch.device) -> Tensor:
        """B of each head, (heads,) float32 without autograd; a number is filled in there, as copying it would wait."""
        if isinstance(self.bias, Tensor):
            return self.bias.detach().to(device, torch.float32).expand(heads)
        return torch.full((heads,), self.bias or 0.0, dtype=torch.float32, device=device)

    def _shifted(self, scores: Tensor) -> Tensor:
        return scores + (0.0 if self.bias is None else over_heads(self.bias, scores))


def _minus_log(problem: Problem) -> Tensor | float:
    """-log N; a tensor where a program is exported, for all N."""
    if torch.compiler.is_exporting():
        keys = torch.full((), problem.keys, dtype=torch.float32, device=problem.value.device)
        return -keys.clamp(min=1.0).log()
    return -math.log(max(problem.keys, 1))
