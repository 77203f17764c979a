"""Position-wise layers of a Transformer block: feed-forward networks, plain and gated, and RMS normalisation."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError
from ..utils.numbers import lies_between, whole_number
from .input_checks import check_input, probability
from .linear import Linear
from .projections import init_xavier

Activation = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """W_2 a(W_1 x + b_1) + b_2, with a the activation: (batch, length, dim) to (batch, length, dim).

    Args:
        dim: of input and output.
        hidden_dim: of the hidden layer.
        activation: any function of a tensor, or a module; ReLU by default.
        bias: whether b_1 and b_2 exist.
        dropout: probability of dropping a hidden feature in training, as in torch; the paper has none here.

    Weights start Xavier uniform, b_1 and b_2 at 0.

    Raises:
        ConfigurationError: a dim below 1, a dropout that is no probability.

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
        self.activation = checked_activation(activation)
        self.dropout = nn.Dropout(probability("dropout", dropout))
        for linear in (self.up, self.down):
            init_xavier(linear)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        return self.down(self.dropout(self.activation(self.up(inputs))))


class GatedFeedForward(nn.Module):
    """W_2 (a(W x) ⊗ V x), with a the activation: SwiGLU with SiLU, GEGLU with GELU, GLU with the sigmoid.

    (batch, length, dim) to (batch, length, dim). `gate` is W, `up` is V and `down` is W_2.

    Args:
        dim: of input and output.
        hidden_dim: of the hidden layer; 2/3 of that of a `FeedForward` gives the same number of parameters.
        activation: any function of a tensor, or a module; SiLU by default.
        bias: whether the maps have an additive bias; the paper has none.
        dropout: probability of dropping a hidden feature in training.

    Weights start Xavier uniform, biases at 0.

    Raises:
        ConfigurationError: a dim below 1, a dropout that is no probability.

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
        self.activation = checked_activation(activation)
        self.dropout = nn.Dropout(probability("dropout", dropout))
        for linear in (self.gate, self.up, self.down):
            init_xavier(linear)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, length, dim) to (batch, length, dim)."""
        check_input("input", inputs, self.dim, self)
        return self.down(self.dropout(self.activation(self.gate(inputs)) * self.up(inputs)))


class RMSNorm(nn.Module):
    """(offset + g) · x / √(mean(x²) + eps), over the last axis: any shape (..., dim), the same shape and dtype.

    It is computed in float32 at least and rounded once, under autocast too, where `torch.nn.RMSNorm` computes in the
    narrow dtype. g is initialised so that the gain offset + g is 1.

    Args:
        dim: of the last axis.
        eps: added to the mean square, so that vectors near 0 are not amplified.
        offset: 1.0 for checkpoints that store g - 1, as Gemma's do.
        gain: without it there is no parameter, and the gain is 1.

    Raises:
        ConfigurationError: a dim below 1, an eps below 0, an offset of a gain that there is not.

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), Eq. 4; eps is of their code.

    >>> norm = RMSNorm(2, eps=0.0)
    >>> norm(torch.tensor([1.0, 7.0])).detach()
    tensor([0.2000, 1.4000])
    """

    weight: nn.Parameter
    """g; None without a gain, as in torch's norms."""

    def __init__(self, dim: int, eps: float = 1e-6, *, offset: float = 0.0, gain: bool = True) -> None:
        super().__init__()
        self.dim, self.eps, self.offset = whole_number("dim", dim), eps, offset
        if not (eps == 0 or lies_between(0, eps, math.inf)):
            raise ConfigurationError(f"eps is {eps!r}; it needs a number of at least 0")
        if offset and not gain:
            raise ConfigurationError(f"offset is {offset}, which is added to a gain, but gain is False: leave one out")
        if gain:
            self.weight = nn.Parameter(torch.full((dim,), 1.0 - offset))
        else:
            self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        """(..., dim) to (..., dim)."""
        wide = at_least_float32(x)
        gain = None if self.weight is None else self.weight.to(wide.dtype)
        gain = gain + self.offset if gain is not None and self.offset else gain
        return functional.rms_norm(wide, (self.dim,), gain, self.eps).to(x.dtype)

    def extra_repr(self) -> str:
        more = f", offset={self.offset}" if self.offset else ""
        return f"{self.dim}, eps={self.eps}{more}" + (", gain=False" if self.weight is None else "")


def checked_activation(activation: Activation) -> Activation:
    """The activation, after a check that it can be called.

    Raises:
        ConfigurationError: it cannot.
    """
    if not callable(activation):
        raise ConfigurationError(
            f"activation is {activation!r}; it needs a function of a tensor, such as torch.nn.functional.relu"
        )
    return activation
