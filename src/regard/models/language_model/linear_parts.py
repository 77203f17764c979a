"""Settings of the parts of a layer of linear attention: its own heads, the short convolution, and the output gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ...errors import ConfigurationError, nearest
from ...nn import (
    GatedGroupNorm,
    GroupedValueProjections,
    L2Norm,
    OutputGate,
    Projections,
    QueryProjections,
    RMSNorm,
    ShortConvolution,
    TokenShift,
)

GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"silu": functional.silu, "sigmoid": torch.sigmoid}
"""Activations of convolutions and gates by name."""


@dataclass(frozen=True)
class LinearHeadsConfig:
    """Heads of a layer of linear attention that are others than those of the model's attention, without bias.

    - `num_heads`: heads of values, and states.
    - `num_key_heads`: heads of queries and keys, a divisor of num_heads; num_heads by default.
    - `head_dim`, `value_dim`: of each query and key, and of each value.
    - `unit_eps`: of the L2 norm of queries and keys; None for no norm.
    """

    num_heads: int
    num_key_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    unit_eps: float | None = None

    def make(self, dim: int) -> Projections:
        """Build the projections of one layer."""
        norm = None if self.unit_eps is None else partial(L2Norm, eps=self.unit_eps)
        sizes: dict[str, Any] = {"head_dim": self.head_dim, "value_dim": self.value_dim}
        if self.num_key_heads is None or self.num_key_heads == self.num_heads:
            return Projections(dim, self.num_heads, bias=False, norm=norm, **sizes)
        return GroupedValueProjections(
            dim, self.num_heads, num_key_heads=self.num_key_heads, bias=False, norm=norm, **sizes
        )


@dataclass(frozen=True)
class ShortConvolutionConfig:
    """Settings of `regard.nn.ShortConvolution`; activation "silu", "sigmoid" or None."""

    width: int = 4
    activation: str | None = "silu"
    bias: bool = False

    def make(self, projections: Projections) -> ShortConvolution:
        """Build the convolution of one layer."""
        activation = None if self.activation is None else _activation(self.activation)
        return ShortConvolution(projections, self.width, activation=activation, bias=self.bias)


@dataclass(frozen=True)
class TokenShiftConfig:
    """`regard.nn.TokenShift` of what all maps of a layer read."""

    def make(self, projections: Projections) -> TokenShift:
        """Build the shift of one layer."""
        return TokenShift(projections.dim)


@dataclass(frozen=True)
class OutputGateConfig:
    """Settings of `regard.nn.OutputGate`, or with `groups` of `GatedGroupNorm`, which norms after the gate.

    - `activation`: "silu" or "sigmoid".
    - `norm_eps`: of an RMS norm of each head, or of each group; None for no norm.
    - `rank`: of the gate's matrix; None for a matrix that is no product.
    """

    activation: str = "silu"
    norm_eps: float | None = None
    rank: int | None = None
    groups: int | None = None

    def make(self, projections: Projections | QueryProjections) -> OutputGate:
        """Build the gate of one layer.

        Raises:
            ConfigurationError: groups without a norm, or with a rank; an unknown activation.
        """
        activation = _activation(self.activation)
        if self.groups is None:
            norm = None if self.norm_eps is None else partial(RMSNorm, eps=self.norm_eps)
            return OutputGate(projections, activation=activation, norm=norm, rank=self.rank)
        if self.norm_eps is None or self.rank is not None:
            raise ConfigurationError(
                f"groups={self.groups} are of a norm after the gate, with a norm_eps and without a rank; it has "
                f"norm_eps={self.norm_eps} and rank={self.rank}"
            )
        return GatedGroupNorm(projections, activation=activation, groups=self.groups, eps=self.norm_eps)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in GATE_ACTIVATIONS:
        raise ConfigurationError(f"there is no gate activation {name!r}; {nearest(str(name), GATE_ACTIVATIONS)}")
    return GATE_ACTIVATIONS[name]
