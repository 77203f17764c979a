"""Routers of mixtures of experts: which experts each token passes through, and with what shares."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...core.score_forms import at_least_float32
from ...errors import ConfigurationError
from ...utils.numbers import whole_number


class ExpertRouter(nn.Linear, ABC):
    """The experts of the `chosen` largest of W x, by a score of each, and the shares of their outputs.

    With groups, experts stand in so many groups of the same size, one after the other, and those of the
    `chosen_groups` best groups alone can be chosen. Shares are multiplied by `scale`.

    Raises:
        ConfigurationError: a number below 1; more experts chosen than there are, or than the chosen groups have; groups
            that do not divide the experts; a scale that is not above 0.
    """

    def __init__(
        self,
        dim: int,
        num_experts: int,
        chosen: int,
        *,
        normalized: bool = True,
        groups: int = 1,
        chosen_groups: int = 1,
        scale: float = 1.0,
    ) -> None:
        super().__init__(dim, whole_number("num_experts", num_experts), bias=False)
        self.chosen, self.normalized, self.scale = whole_number("chosen", chosen), normalized, scale
        self.groups, self.chosen_groups = whole_number("groups", groups), whole_number("chosen_groups", chosen_groups)
        if chosen > num_experts:
            raise ConfigurationError(f"chosen is {chosen} of num_experts={num_experts}: it needs that many or fewer")
        if num_experts % groups or chosen_groups > groups or chosen > num_experts // groups * chosen_groups:
            raise ConfigurationError(
                f"chosen is {chosen} of num_experts={num_experts} in groups={groups}, of which chosen_groups="
                f"{chosen_groups} are open: groups need to divide the experts, and the open ones to hold as many as "
                "are chosen"
            )
        if not 0 < scale < float("inf"):
            raise ConfigurationError(f"scale is {scale!r}; a router needs a finite number above 0")

    @abstractmethod
    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The shares and the numbers of each token's experts, both (T, chosen), of tokens (T, dim)."""

    def _in_best_groups(self, scores: Tensor, counted: int) -> Tensor:
        """Scores (T, experts) with -infinity outside the groups of the largest sum of their `counted` best scores."""
        if self.groups == 1:
            return scores
        grouped = scores.unflatten(-1, (self.groups, -1))
        strength = grouped.topk(min(counted, grouped.shape[-1]), dim=-1).values.sum(-1)  # [T, groups]
        closed = torch.ones_like(strength, dtype=torch.bool)
        closed = closed.scatter(-1, strength.topk(self.chosen_groups, dim=-1).indices, False)
        return grouped.masked_fill(closed.unsqueeze(-1), float("-inf")).flatten(-2)

    def extra_repr(self) -> str:
        groups = "" if self.groups == 1 else f", {self.chosen_groups} of {self.groups} groups"
        return f"{self.in_features}, chosen={self.chosen} of {self.out_features}{groups}"


class SoftmaxRouter(ExpertRouter):
    """Shares softmax(W x) of the chosen experts, in float32: of these alone, or without `normalized` of all experts.

    A group is as good as its best expert.

    Source: Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088), section 2.1; groups are of DeepSeek-V2
    (arXiv 2405.04434), section 2.2.2.

    >>> router = SoftmaxRouter(dim=2, num_experts=4, chosen=2)
    >>> shares, experts = router(torch.randn(5, 2))
    >>> shares.shape, experts.shape
    (torch.Size([5, 2]), torch.Size([5, 2]))
    """

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        logits = at_least_float32(super(ExpertRouter, self).forward(tokens))  # [T, experts]
        largest, experts = self._in_best_groups(logits, 1).topk(self.chosen, dim=-1)  # [T, chosen]
        shares = largest.softmax(-1) if self.normalized else (largest - logits.logsumexp(-1, keepdim=True)).exp()
        return shares * self.scale, experts


class SigmoidRouter(ExpertRouter):
    """Shares σ(W x) of the experts of the largest σ(W x) + b, in float32; with `normalized`, divided by their sum.

    b, `correction`, (num_experts,), takes part in the choice alone, and is no parameter: it is moved during training so
    that experts get equally many tokens, without a loss. A group is as good as its two best experts together.

    Source: DeepSeek-V3 (arXiv 2412.19437), section 2.1.2, Eq. 12 to 16.

    >>> router = SigmoidRouter(dim=2, num_experts=4, chosen=2, groups=2, scale=2.5)
    >>> shares, experts = router(torch.randn(5, 2))
    >>> shares.sum(-1).detach(), (experts // 2).diff(dim=-1).any()
    (tensor([2.5000, 2.5000, 2.5000, 2.5000, 2.5000]), tensor(False))
    """

    correction: Tensor

    def __init__(self, dim: int, num_experts: int, chosen: int, **options: int | float | bool) -> None:
        super().__init__(dim, num_experts, chosen, **options)  # type: ignore[arg-type]
        self.register_buffer("correction", torch.zeros(num_experts))

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        scores = functional.linear(at_least_float32(tokens), at_least_float32(self.weight)).sigmoid()  # [T, experts]
        experts = self._in_best_groups(scores + self.correction, 2).topk(self.chosen, dim=-1).indices
        shares = scores.gather(-1, experts)  # [T, chosen]
        if self.normalized:
            shares = shares / (shares.sum(-1, keepdim=True) + 1e-20)
        return shares * self.scale, experts
