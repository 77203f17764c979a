"""The rules by which a layer of linear attention writes a value into its state: the sum and the delta rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from torch import Tensor

from .feature_maps import Elu, FeatureMap, Identity, UnitNorm


@dataclass(frozen=True)
class SumRule:
    """S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ: each value is added to the state.

    Args:
        normalize: whether the weights of a row are divided by their sum; not so in RetNet and gated linear attention.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 10 to 12.

    >>> import regard
    >>> regard.linear.SumRule()
    SumRule(normalize=True)
    """

    normalize: bool = True

    default_map: ClassVar[FeatureMap] = Elu()
    """φ where a layer is given none."""


@dataclass(frozen=True)
class DeltaRule:
    """S_t = e^{g_t} S_{t-1} + β_t φ(k_t) (v_t - (e^{g_t} S_{t-1})ᵀ φ(k_t))ᵀ: a value replaces what its key has stored.

    The share β = σ(w · x) of each key head and token x is learned. With a decay it is the gated delta rule. The weights
    have no sum to divide by, and keys need a norm of at most 1.

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; Yang et al. 2024 (arXiv 2406.06484), section 3.3; gated,
    Yang et al. 2024 (arXiv 2412.06464).

    >>> import torch, regard
    >>> regard.linear.DeltaRule().beta(torch.zeros(1, 3, 1))
    tensor([[[0.5000, 0.5000, 0.5000]]])
    """

    normalize: ClassVar[bool] = False
    default_map: ClassVar[FeatureMap] = UnitNorm(Identity())
    """φ where a layer is given none: features of norm 1."""

    def beta(self, logits: Tensor) -> Tensor:
        """β (batch, key heads, N) of logits (batch, N, key heads)."""
        return logits.sigmoid().transpose(1, 2)


UpdateRule: TypeAlias = SumRule | DeltaRule
"""What `regard.nn.LinearAttention` takes as `rule`."""
