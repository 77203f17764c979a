"""Hard attention: one key for each query, chosen by the largest score or drawn by the softmax."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..biases.gumbel import GumbelNoise
from ..core.normalizer import Normalizer, quotients
from ..core.problem import Problem


@dataclass(frozen=True, eq=False)
class Hard(Normalizer):
    """w_ij = 1 for the key with the largest score, 0 for others; the gradient is that of softmax (straight-through).

    With noise, Gumbel numbers are added to the scores, so that key j is chosen with its softmax probability. The noise
    is a hash of a seed, drawn for each call, and of batch, head and the two positions: nothing of it is stored. Of
    equal scores any may be chosen.

    Source: hard attention, Xu et al. 2015 (arXiv 1502.03044), section 4.1; the straight-through gradient and its
    samples: Jang et al. 2017 (arXiv 1611.01144), section 2.2.

    There is no log-sum-exp; `Observation.lse` has that of the scores with their noise.

    Args:
        noise: whether a key is drawn.

    >>> import torch, regard
    >>> regard.normalizers.Hard().normalize(torch.tensor([[[1.0, 0.0, 2.0]]]))[0]
    tensor([[[0., 0., 1.]]])
    """

    noise: bool = False

    name = "hard"
    refuses: ClassVar[Mapping[str, str]] = {
        "sinks": "a sink is no key that could be chosen",
        "dropout_p": "a row has one weight, which would be dropped or doubled",
    }

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """The weights, and the log-sum-exp."""
        soft, lse = quotients(scores, scores)
        if not scores.shape[-1]:
            return soft, lse
        chosen = torch.zeros_like(soft).scatter(-1, scores.detach().argmax(-1, keepdim=True), 1.0)
        chosen = torch.where(lse.unsqueeze(-1) > float("-inf"), chosen, 0.0)
        return chosen + (soft - soft.detach()), lse.detach()

    def backward(self, scores: Tensor, weights: Tensor, upstream: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """That of softmax."""
        soft = quotients(scores, scores)[0]
        shares = upstream * soft
        return shares.sub_(soft * shares.sum(-1, keepdim=True)), ()

    def for_problem(self, problem: Problem) -> Problem:
        """The problem with this normalizer, and noise as part of its bias."""
        problem = Normalizer.for_problem(self, problem)
        if self.noise:
            device = problem.value.device
            seed = torch.randint(-(2**63), 2**63 - 1, (), device=device)
            noise = GumbelNoise(seed, tuple(problem.batch), problem.weights_shape[-3] if problem.heads else None)
            problem.bias = noise if problem.bias is None else problem.bias + noise
        return problem
