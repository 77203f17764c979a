"""A feed-forward network and a mixture of experts side by side, each with norms of its own: Gemma 4 with experts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...nn import GatedFeedForward, Linear, Residual, RMSNorm
from ...nn.input_checks import check_input, probability
from ...utils.numbers import whole_number
from .mixture_of_experts import check_chosen, mixed


class ScaledExperts(nn.Module):
    """Σ_e s_e p_e · W_d (a(W_g y) · W_u y), y = norm(x), over the experts e of the `chosen` largest router logits.

    p is the softmax of the chosen logits W_r (r ⊗ x / rms(x)) / √dim in float32; s and r are learned, 1 at first.

    Shapes: (batch, length, dim) to the same. Parameters: router (num_experts, dim), router_scale r (dim,),
    expert_scale s (num_experts,); gate_up (num_experts, 2 · hidden_dim, dim), W_g above W_u, and down (num_experts,
    dim, hidden_dim). Weights of experts start normal with the variance of Xavier (Glorot and Bengio 2010).

    Raises:
        ConfigurationError: a number below 1, more experts chosen than there are.

    Source: the code released with Gemma 4.
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        num_experts: int,
        chosen: int,
        *,
        activation: Callable[[Tensor], Tensor],
        eps: float = 1e-6,
    ) -> None:
        super().__init__()
        self.dim, self.hidden_dim = whole_number("dim", dim), whole_number("hidden_dim", hidden_dim)
        self.num_experts, self.chosen = whole_number("num_experts", num_experts), whole_number("chosen", chosen)
        check_chosen(chosen, num_experts)
        self.activation = activation
        self.norm, self.router_norm = RMSNorm(dim, eps), RMSNorm(dim, eps, gain=False)
        self.router = Linear(dim, num_experts, bias=False)
        self.router_scale = nn.Parameter(torch.ones(dim))
        self.expert_scale = nn.Parameter(torch.ones(num_experts))
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, dim))
        self.down = nn.Parameter(torch.empty(num_experts, dim, hidden_dim))
        for weight in (self.gate_up, self.down):
            nn.init.normal_(weight, std=(2 / (dim + hidden_dim)) ** 0.5)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        tokens = inputs.flatten(0, 1)  # [T, dim]
        logits = self.router(self.router_norm(tokens) * self.router_scale * self.dim**-0.5).float()
        largest, experts = logits.topk(self.chosen, dim=-1)  # [T, chosen]
        shares = largest.softmax(-1) * self.expert_scale[experts]
        return mixed(self._expert, self.norm(tokens), experts, shares.to(tokens.dtype), self.num_experts).view_as(
            inputs
        )

    def _expert(self, expert: int, tokens: Tensor) -> Tensor:
        gate, up = functional.linear(tokens, self.gate_up[expert]).chunk(2, dim=-1)
        return functional.linear(self.activation(gate) * up, self.down[expert])

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, chosen={self.chosen}"


class DenseAndExperts(nn.Module):
    """dense_norm(dense(norm_before(x))) + experts_norm(experts(x)), with x before any norm: (batch, length, dim).

    Its residual connection is an `OutputNorm`.
    """

    def __init__(self, dense: GatedFeedForward, experts: ScaledExperts, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.dense, self.experts = dense, experts
        self.norm_before, self.dense_norm, self.experts_norm = (norm(dense.dim) for _ in range(3))

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        dense = self.dense_norm(self.dense(self.norm_before(inputs)))
        return dense + self.experts_norm(self.experts(inputs))


class OutputNorm(Residual):
    """x + dropout(norm(f(x))), for a sublayer that has the norms of its input itself.

    >>> residual = OutputNorm(nn.LayerNorm(2))
    >>> x = torch.tensor([[1.0, 3.0]])
    >>> residual.after(x, 2 * residual.before(x)).detach().round()
    tensor([[0., 4.]])
    """

    def __init__(self, norm_after: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm_after = norm_after
        self.dropout = nn.Dropout(probability("dropout", dropout))

    def before(self, x: Tensor) -> Tensor:
        return x

    def after(self, x: Tensor, branch: Tensor) -> Tensor:
        return x + self.dropout(self.norm_after(branch))
