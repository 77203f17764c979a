"""The feed-forward part of a block: the same function of each position."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn import functional

from ..utils.numbers import whole_number
from .input_checks import check_input, probability
from .linear import Linear
from .projections import xavier

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """W_2 a(W_1 x + b_1) + b_2, with a the activation: (batch, length, dim) to (batch, length, dim).

    Args:
        dim: of input and output.
        hidden_dim: between the two maps.
        activation: any function of a tensor, or a module; `max(0, x)` without one.
        bias: whether the maps add b_1 and b_2.
        dropout: the probability with which a hidden feature is dropped in training; not in the paper, as in torch.

    Weights start Xavier uniform, b_1 and b_2 at 0.

    Raises:
        ConfigurationError: a dim below 1, a probability that is none.

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.3, Eq. 2.

    >>> import torch
    >>> FeedForward(dim=4, hidden_dim=16)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = functional.relu,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.hidden_dim = whole_number("dim", dim), whole_number("hidden_dim", hidden_dim)
        self.up = Linear(dim, hidden_dim, bias)
        self.down = Linear(hidden_dim, dim, bias)
        self.activation = activation
        self.dropout = nn.Dropout(probability("dropout", dropout))
        for linear in (self.up, self.down):
            xavier(linear)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        return self.down(self.dropout(self.activation(self.up(inputs))))


class GatedFeedForward(nn.Module):
    """W_2 (a(W x) ⊗ V x), with a the activation: SwiGLU with SiLU, GEGLU with GELU, GLU with the sigmoid.

    (batch, length, dim) to (batch, length, dim). Here `gate` is W, `up` is V and `down` W_2.

    Args:
        dim: of input and output.
        hidden_dim: between the maps; two thirds of that of a `FeedForward` make as many parameters.
        activation: any function of a tensor, or a module; SiLU without one.
        bias: whether the maps add a bias; the paper's add none.
        dropout: the probability with which a hidden feature is dropped in training.

    Weights start Xavier uniform, biases at 0.

    Raises:
        ConfigurationError: a dim below 1, a probability that is none.

    Source: Shazeer 2020 (arXiv 2002.05202), Eq. 6.

    >>> import torch
    >>> GatedFeedForward(dim=4, hidden_dim=11)(torch.zeros(2, 3, 4)).shape
    torch.Size([2, 3, 4])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = functional.silu,
        bias: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.dim, self.hidden_dim = whole_number("dim", dim), whole_number("hidden_dim", hidden_dim)
        self.gate = Linear(dim, hidden_dim, bias)
        self.up = Linear(dim, hidden_dim, bias)
        self.down = Linear(hidden_dim, dim, bias)
        self.activation = activation
        self.dropout = nn.Dropout(probability("dropout", dropout))
        for linear in (self.gate, self.up, self.down):
            xavier(linear)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        return self.down(self.dropout(self.activation(self.gate(inputs)) * self.up(inputs)))
