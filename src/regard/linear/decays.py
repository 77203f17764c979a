"""The decay of a layer of linear attention: fixed for each head, or learned for each head or each feature."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from ..core.score_forms import at_least_float32
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..utils.numbers import lies_between


@dataclass(frozen=True, eq=False)
class FixedDecay:
    """A decay that is not learned: one logarithm g for each key head, the same for all tokens, saved with the layer.

    Args:
        logarithms: g (key heads,), at most 0: the state is multiplied by e^g before each token.

    Raises:
        DtypeError, ShapeError: no floating-point tensor of one axis.
        ConfigurationError: a number above 0.

    Source: Sun et al. 2023 (arXiv 2307.08621), Eq. 6; RetNet has 1 - 2^{-5-h} of head h.

    >>> import torch, regard
    >>> regard.linear.FixedDecay((1 - 2.0 ** (-5 - torch.arange(2))).log())
    FixedDecay(logarithms=tensor([-0.0317, -0.0157]))
    """

    logarithms: Tensor

    def __post_init__(self) -> None:
        given = self.logarithms
        if not isinstance(given, Tensor) or not given.is_floating_point():
            has = given.dtype if isinstance(given, Tensor) else f"a {type(given).__name__}"
            raise DtypeError(f"logarithms needs a floating-point tensor; it is {has}")
        if given.ndim != 1:
            raise ShapeError(f"logarithms has the shape {tuple(given.shape)}; it needs one for each key head, (heads,)")
        if not given.is_meta and not bool((given <= 0).all()):
            raise ConfigurationError(
                f"logarithms has values up to {float(given.max()):.4g}; each is the logarithm of a factor of at most "
                "1, so it needs values of at most 0"
            )


@dataclass(frozen=True)
class HeadDecay:
    """A learned decay, one number for each key head and token x: g = log σ(w · x + b) / temperature.

    Args:
        temperature: what logarithms are divided by, so that a new layer forgets slowly.

    Raises:
        ConfigurationError: a temperature that is not above 0.

    Source: Sun et al. 2024 (arXiv 2405.05254), gated retention.

    >>> import torch, regard
    >>> regard.linear.HeadDecay()(torch.zeros(1, 1, 3, 1))
    tensor([[[-0.0433, -0.0433, -0.0433]]])
    """

    temperature: float = 16.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    rank: ClassVar[int | None] = None

    def gates_per_head(self, features: int) -> int:
        """Logits of a token and a key head."""
        return 1

    def __call__(self, logits: Tensor) -> Tensor:
        """The decay (batch, key heads, N) of logits (batch, key heads, N, 1), in float32 at least."""
        return _log_gate(logits, self.temperature).squeeze(-1)


@dataclass(frozen=True)
class FeatureDecay:
    """A learned decay, one number for each key head, feature of φ and token x: g = log σ(W x + b) / temperature.

    Args:
        temperature: what logarithms are divided by, so that a new layer forgets slowly.

    Raises:
        ConfigurationError: a temperature that is not above 0.

    Source: Yang et al. 2024, gated linear attention (arXiv 2312.06635), section 4.4.

    >>> import torch, regard
    >>> regard.linear.FeatureDecay(temperature=1.0)(torch.zeros(1, 1, 1, 2))
    tensor([[[[-0.6931, -0.6931]]]])
    """

    temperature: float = 16.0

    def __post_init__(self) -> None:
        _check_temperature(self.temperature)

    rank: ClassVar[int | None] = None

    def gates_per_head(self, features: int) -> int:
        """Logits of a token and a key head."""
        return features

    def __call__(self, logits: Tensor) -> Tensor:
        """The decay (batch, key heads, N, features) of logits of the same shape, in float32 at least."""
        return _log_gate(logits, self.temperature)


@dataclass(frozen=True)
class SoftplusDecay:
    """A learned decay, one number for each key head and token x: g = -e^a Δ with the step Δ = softplus(w · x + b).

    The rate e^a is learned for each key head. Rates start uniform in 1..16, and b so that Δ, where w · x is 0, starts
    between 0.001 and 0.1, uniform in its logarithm.

    Source: Dao and Gu 2024, Mamba-2 (arXiv 2405.21060), section 7; Gated DeltaNet (arXiv 2412.06464), section 3.4.

    >>> import torch, regard
    >>> regard.linear.SoftplusDecay()(torch.zeros(1, 1, 3, 1), torch.zeros(1))
    tensor([[[-0.6931, -0.6931, -0.6931]]])
    """

    rank: ClassVar[int | None] = None

    def gates_per_head(self, features: int) -> int:
        """Logits of a token and a key head."""
        return 1

    def step(self, logits: Tensor) -> Tensor:
        """Δ (batch, key heads, N) of logits (batch, key heads, N, 1), in float32 at least."""
        return functional.softplus(at_least_float32(logits)).squeeze(-1)

    def __call__(self, logits: Tensor, log_rates: Tensor) -> Tensor:
        """The decay (batch, key heads, N) of logits (batch, key heads, N, 1) and a (key heads), in float32 at least."""
        return -at_least_float32(log_rates).exp().unsqueeze(-1) * self.step(logits)


@dataclass(frozen=True)
class SoftplusFeatureDecay:
    """A learned decay, one number for each key head, feature of φ and token x: g = -e^a softplus(W x + b).

    The rate e^a is learned for each key head; it and b start as those of `SoftplusDecay`.

    Args:
        rank: of W, which is then a product of two matrices; None for one matrix.

    Source: Kimi Team 2025, Kimi Delta Attention (arXiv 2510.26692), section 4.

    >>> import torch, regard
    >>> regard.linear.SoftplusFeatureDecay()(torch.zeros(1, 1, 1, 2), torch.zeros(1))
    tensor([[[[-0.6931, -0.6931]]]])
    """

    rank: int | None = None

    def gates_per_head(self, features: int) -> int:
        """Logits of a token and a key head."""
        return features

    def __call__(self, logits: Tensor, log_rates: Tensor) -> Tensor:
        """The decay (batch, key heads, N, features) of logits of this shape and a (key heads), in float32 at least."""
        return -at_least_float32(log_rates).exp()[:, None, None] * functional.softplus(at_least_float32(logits))


@dataclass(frozen=True)
class SigmoidFeatureDecay:
    """A learned decay between bounds, one number for each key head, feature of φ and token x: g = -most · σ(W x + b).

    Args:
        most: of -g; by default e^{-1/2}, so that a token keeps 0.545 of the state at least.
        rank: of W, which is then a product of two matrices; None for one matrix.

    Raises:
        ConfigurationError: a number `most` that is not above 0.

    Source: Peng et al. 2025, RWKV-7 (arXiv 2503.14456), section 4.1, whose W x has a tanh between its two matrices.

    >>> import torch, regard
    >>> regard.linear.SigmoidFeatureDecay(most=0.5)(torch.zeros(1, 1, 1, 2))
    tensor([[[[-0.2500, -0.2500]]]])
    """

    most: float = math.exp(-0.5)
    rank: int | None = None

    def __post_init__(self) -> None:
        if not lies_between(0, self.most, math.inf):
            raise ConfigurationError(f"most is {self.most!r}; it needs a finite number above 0")

    def gates_per_head(self, features: int) -> int:
        """Logits of a token and a key head."""
        return features

    def __call__(self, logits: Tensor) -> Tensor:
        """The decay (batch, key heads, N, features) of logits of the same shape, in float32 at least."""
        return -self.most * at_least_float32(logits).sigmoid()


LearnedDecay: TypeAlias = HeadDecay | FeatureDecay | SigmoidFeatureDecay | SoftplusDecay | SoftplusFeatureDecay
Decay: TypeAlias = FixedDecay | LearnedDecay
"""What `regard.nn.LinearAttention` takes as `decay`."""


def initial_log_rates(heads: int) -> Tensor:
    """The first a of a softplus decay, for each key head."""
    return torch.empty(heads).uniform_(1, 16).log()


def initial_step_bias(count: int) -> Tensor:
    """The first b of a softplus decay: softplus(b) is uniform in its logarithm between 0.001 and 0.1."""
    step = torch.empty(count).uniform_(math.log(1e-3), math.log(0.1)).exp()
    return step + (-torch.expm1(-step)).log()


def _check_temperature(temperature: float) -> None:
    if not lies_between(0, temperature, math.inf):
        raise ConfigurationError(f"temperature is {temperature!r}; it needs a finite number above 0")


def _log_gate(logits: Tensor, temperature: float) -> Tensor:
    return functional.logsigmoid(at_least_float32(logits)) / temperature
