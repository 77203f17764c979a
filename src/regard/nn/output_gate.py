"""Gates of what attention reads: each feature of the context times a function of the token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..utils.numbers import whole_number
from .linear import Linear
from .projections import Projections, QueryProjections, init_xavier


class OutputGate(nn.Module):
    """norm(c) ⊙ a(W x): the context of each head, normed if there is a norm, times a gate of the token x.

    Shapes: context (batch, heads, length, value_dim), tokens (batch, length, dim), the result as the context.

    Args:
        projections: those of the layer, which say the dims.
        activation: a, any function of a tensor; SiLU by default, as in RetNet and Gated DeltaNet.
        norm: called with value_dim, returns the norm of each head's context; none by default.
        rank: of W, which is then a product of two maps; None for one map.
        bias: whether W has an additive bias.

    Raises:
        ConfigurationError: a rank below 1.

    Source: Sun et al. 2023, RetNet (arXiv 2307.08621), Eq. 8; with norm, Yang et al. 2024 (arXiv 2412.06464), section
    3.4; for softmax attention without norm and with the sigmoid, Qiu et al. 2025 (arXiv 2505.06708).

    >>> import torch, regard
    >>> gate = OutputGate(regard.nn.Projections(8, num_heads=2), activation=torch.sigmoid)
    >>> gate(torch.ones(1, 2, 3, 4), torch.zeros(1, 3, 8)).detach()[0, 0, 0]
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """

    def __init__(
        self,
        projections: Projections | QueryProjections,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        norm: Callable[[int], nn.Module] | None = None,
        rank: int | None = None,
        bias: bool = False,
    ) -> None:
        super().__init__()
        if not hasattr(projections, "num_heads"):
            raise ConfigurationError(f"projections is {projections!r}; it needs nn.Projections(dim, num_heads)")
        self.heads, self.activation = projections.num_heads, activation
        self.gate = low_rank(projections.dim, projections.num_heads * projections.value_dim, rank, bias)
        self.norm = nn.Identity() if norm is None else norm(projections.value_dim)

    def forward(self, context: Tensor, tokens: Tensor) -> Tensor:
        """The gated context."""
        return self.norm(context) * self._gates(tokens)

    def _gates(self, tokens: Tensor) -> Tensor:
        """a(W x) of each head: (batch, heads, length, value_dim)."""
        return self.activation(self.gate(tokens)).unflatten(-1, (self.heads, -1)).transpose(1, 2)


class GatedGroupNorm(OutputGate):
    """norm(c ⊙ a(W x)): the gate of the token x first, then an RMS norm over the heads of each group, as in Mamba-2.

    Shapes and arguments are those of `OutputGate`, and:

    Args:
        groups: of consecutive heads; each is divided by √(mean(x²) + eps) of all its features.
        eps: added to the mean.

    Raises:
        ConfigurationError: groups that do not divide the heads.

    Source: Dao and Gu 2024, Mamba-2 (arXiv 2405.21060), section 7.1.

    >>> import torch, regard
    >>> gate = GatedGroupNorm(regard.nn.Projections(8, num_heads=2), groups=2)
    >>> gate(torch.randn(1, 2, 3, 4), torch.randn(1, 3, 8)).square().mean(-1).round()
    tensor([[[1., 1., 1.],
             [1., 1., 1.]]], grad_fn=<RoundBackward0>)
    """

    def __init__(
        self,
        projections: Projections | QueryProjections,
        *,
        activation: Callable[[Tensor], Tensor] = functional.silu,
        groups: int = 1,
        eps: float = 1e-6,
        bias: bool = False,
    ) -> None:
        super().__init__(projections, activation=activation, bias=bias)
        self.groups, self.eps = whole_number("groups", groups), eps
        if projections.num_heads % self.groups:
            raise ConfigurationError(
                f"groups is {groups} and the layer has {projections.num_heads} heads: groups are of equally many heads"
            )
        self.weight = nn.Parameter(torch.ones(projections.num_heads, 1, projections.value_dim))

    def forward(self, context: Tensor, tokens: Tensor) -> Tensor:
        gated = at_least_float32(context * self._gates(tokens))
        grouped = gated.unflatten(1, (self.groups, -1))  # (batch, groups, heads of each, length, value_dim)
        share = (grouped.square().mean((2, 4), keepdim=True) + self.eps).rsqrt()
        return ((grouped * share).flatten(1, 2) * self.weight.to(gated.dtype)).to(context.dtype)


def low_rank(dim: int, count: int, rank: int | None, bias: bool) -> nn.Module:
    """A linear map from dim to count features: one matrix, or two whose product has this rank, initialised Xavier."""
    if rank is None:
        maps = [Linear(dim, count, bias)]
    else:
        maps = [Linear(dim, whole_number("rank", rank), False), Linear(rank, count, bias)]
    for linear in maps:
        init_xavier(linear)
    return maps[0] if rank is None else nn.Sequential(*maps)
