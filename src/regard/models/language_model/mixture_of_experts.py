"""A mixture of experts: a router sends each token through a few of many feed-forward parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...errors import ConfigurationError
from ...nn.input_checks import check_input
from ...utils.numbers import whole_number


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
        if chosen > num_experts:
            raise ConfigurationError(f"chosen is {chosen} of num_experts={num_experts}: it needs that many or fewer")
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
        shares = logits.softmax(-1)
        # Tokens of one expert side by side: each expert's matrices are read once.
        order = experts.flatten().argsort(stable=True)
        counts = experts.flatten().bincount(minlength=self.num_experts).tolist()
        rows, shares = order // self.chosen, shares.flatten()[order]
        said = [
            self._expert(expert, tokens[mine]) * share.unsqueeze(-1)
            for expert, (mine, share) in enumerate(zip(rows.split(counts), shares.split(counts), strict=True))
            if len(mine)
        ]
        mixed = tokens.new_zeros(tokens.shape)
        if said:
            mixed = mixed.index_add(0, rows, torch.cat(said).to(mixed.dtype))
        return mixed.view_as(inputs)

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        both = tokens @ self.gate_up[expert] + self.gate_up_bias[expert]
        gate, up = both.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return ((up + 1) * gate * (self.alpha * gate).sigmoid()) @ self.down[expert] + self.down_bias[expert]

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, chosen={self.chosen}"
