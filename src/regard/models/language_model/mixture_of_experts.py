"""Mixtures of experts: a router sends each token through a few of many feed-forward networks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import ConfigurationError
from ...nn import GatedFeedForward
from ...nn.input_checks import check_input
from ...utils.numbers import whole_number
from .expert_router import ExpertRouter


class MixtureOfExperts(nn.Module):
    """Σ_e p_e · (W_d ((u + 1) · g σ(α g)) + b_d), over the experts e whose router logits are the `chosen` largest.

    p is the softmax of these logits alone. g, at most `limit`, and u, within ±`limit`, are the even and the odd
    features of x W_gu + b_gu of each expert: gate and up in turn, as in gpt-oss's checkpoints.

    Shapes: (batch, length, dim) to the same. Parameters: router (num_experts, dim); gate_up (num_experts, dim,
    2 · hidden_dim), down (num_experts, hidden_dim, dim), and a bias for each. Weights start normal with the variance
    of Xavier (Glorot and Bengio 2010), biases at 0.

    Raises:
        ConfigurationError: a number below 1, more experts chosen than there are, a limit that is not above 0.

    Source: gpt-oss model card (arXiv 2508.10925), section 2.2, and the code released with it; the top-k router is of
    Shazeer et al. 2017 (arXiv 1701.06538), section 2.1, here without noise.

    >>> MixtureOfExperts(dim=4, hidden_dim=6, num_experts=8, chosen=2)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self, dim: int, hidden_dim: int, num_experts: int, chosen: int, *, alpha: float = 1.702, limit: float = 7.0
    ) -> None:
        super().__init__()
        self.dim, self.hidden_dim = whole_number("dim", dim), whole_number("hidden_dim", hidden_dim)
        self.num_experts, self.chosen = whole_number("num_experts", num_experts), whole_number("chosen", chosen)
        check_chosen(chosen, num_experts)
        if not limit > 0:
            raise ConfigurationError(f"limit is {limit}; it needs a number above 0")
        self.alpha, self.limit = alpha, limit
        self.router = nn.Linear(dim, num_experts)
        self.gate_up = nn.Parameter(torch.empty(num_experts, dim, 2 * hidden_dim))
        self.gate_up_bias = nn.Parameter(torch.zeros(num_experts, 2 * hidden_dim))
        self.down = nn.Parameter(torch.empty(num_experts, hidden_dim, dim))
        self.down_bias = nn.Parameter(torch.zeros(num_experts, dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=(2 / (dim + hidden_dim)) ** 0.5)
        nn.init.zeros_(self.router.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        tokens = inputs.flatten(0, 1)  # [T, dim]
        logits, experts = self.router(tokens).topk(self.chosen, dim=-1)  # [T, chosen]
        return mixed(self._expert, tokens, experts, logits.softmax(-1), self.num_experts).view_as(inputs)

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        both = tokens @ self.gate_up[expert] + self.gate_up_bias[expert]
        gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * (self.alpha * gate).sigmoid()) @ self.down[expert] + self.down_bias[expert]

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, chosen={self.chosen}"


class GatedMixtureOfExperts(nn.Module):
    """Σ_e p_e · W_d (a(W_g x) · W_u x), over the experts e that the router chooses, with its shares p.

    The first half of the features of x W_gu of each expert is W_g x, the second W_u x. With a `shared` network, one
    that every token passes through is added: FFN(x), or with `shared_gate` σ(w · x) FFN(x).

    Shapes: (batch, length, dim) to the same. Parameters: those of the router; gate_up (num_experts, dim, 2 ·
    hidden_dim), down (num_experts, hidden_dim, dim); those of the shared network, and its gate w (1, dim). Weights of
    experts start normal with the variance of Xavier (Glorot and Bengio 2010).

    Args:
        router: shares and numbers of each token's experts.
        hidden_dim: of each expert.
        activation: a.
        shared: of the same dim as the router.
        shared_gate: whether the shared network has a gate.

    Raises:
        ConfigurationError: a number below 1.

    Source: Jiang et al. 2024, "Mixtral of Experts" (arXiv 2401.04088), section 2.1; shared experts are of Dai et al.
    2024, "DeepSeekMoE" (arXiv 2401.06066), section 3.2, and their gate is of the code released with Qwen1.5-MoE.

    >>> from regard.models.language_model import SoftmaxRouter
    >>> router = SoftmaxRouter(dim=4, num_experts=8, chosen=2)
    >>> GatedMixtureOfExperts(router, hidden_dim=6)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        router: ExpertRouter,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        shared: GatedFeedForward | None = None,
        shared_gate: bool = True,
    ) -> None:
        super().__init__()
        self.dim, self.num_experts = router.in_features, router.out_features
        self.hidden_dim = whole_number("hidden_dim", hidden_dim)
        self.activation = activation
        self.router = router
        self.gate_up = nn.Parameter(torch.empty(self.num_experts, self.dim, 2 * hidden_dim))
        self.down = nn.Parameter(torch.empty(self.num_experts, hidden_dim, self.dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=(2 / (self.dim + hidden_dim)) ** 0.5)
        self.shared = shared
        self.shared_gate = nn.Linear(self.dim, 1, bias=False) if shared is not None and shared_gate else None

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        tokens = inputs.flatten(0, 1)  # [T, dim]
        shares, experts = self.router(tokens)  # [T, chosen]
        routed = mixed(self._expert, tokens, experts, shares.to(tokens.dtype), self.num_experts).view_as(inputs)
        if self.shared is None:
            return routed
        shared = self.shared(inputs)
        return routed + (shared if self.shared_gate is None else self.shared_gate(inputs).sigmoid() * shared)

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        gate, up = (tokens @ self.gate_up[expert]).chunk(2, dim=-1)
        return (self.activation(gate) * up) @ self.down[expert]


def check_chosen(chosen: int, num_experts: int) -> None:
    """Check that no more experts are chosen than there are.

    Raises:
        ConfigurationError: more are.
    """
    if chosen > num_experts:
        raise ConfigurationError(f"chosen is {chosen} of num_experts={num_experts}: it needs that many or fewer")


def mixed(
    expert_output: Callable[[int, Tensor], Tensor], tokens: Tensor, experts: Tensor, shares: Tensor, num_experts: int
) -> Tensor:
    """The outputs of each token's experts, summed with their shares: (T, dim); `experts` and `shares` (T, chosen)."""
    # Tokens of one expert side by side: each expert's matrices are read once.
    order = experts.flatten().argsort(stable=True)
    counts = experts.flatten().bincount(minlength=num_experts).tolist()
    rows, shares = order // experts.shape[1], shares.flatten()[order]
    outputs = [
        expert_output(expert, tokens[selected]) * share.unsqueeze(-1)
        for expert, (selected, share) in enumerate(zip(rows.split(counts), shares.split(counts), strict=True))
        if len(selected)
    ]
    total = tokens.new_zeros(tokens.shape)
    if outputs:
        total = total.index_add(0, rows, torch.cat(outputs).to(total.dtype))
    return total
