"""The generalised delta rule of RWKV-7: what a state forgets along one key, and what it learns by another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..errors import ConfigurationError
from .feature_maps import Identity
from .linear_arguments import LinearOptions
from .update_rules import RuleTokens, UpdateRule


@dataclass(frozen=True)
class GeneralizedDeltaRule(UpdateRule):
    """S_t = (diag(e^{g_t}) - (a_t ⊙ κ_t) κ_tᵀ) S_{t-1} + k̃_t v_tᵀ: what is removed and what is written have own keys.

    With κ = (ξ ⊙ k) / |ξ ⊙ k| and k̃ = k ⊙ (1 + (a - 1) ⊙ α). The rate a = σ(·) in 0..1 of each key head, feature and
    token is a learned function of the token; ξ and α, one number for each key head and feature, are learned and start
    at 1. The state is read as it is: o_t = S_tᵀ q_t, without a scale.

    Two steps of the delta rule for each token: `regard.linear.delta_product`. What is removed was stored before the
    decay, so that the first one divides by it: decays have to be such that e^{-g} is a number of the dtype, as those of
    `SigmoidFeatureDecay` are.

    RWKV-7 adds to what is read a bonus after its norm, and mixes the values of the first layer into those of others;
    these are not of the rule.

    Source: Peng et al. 2025, RWKV-7 (arXiv 2503.14456), section 4.1.

    >>> import regard
    >>> rule = regard.linear.GeneralizedDeltaRule()
    >>> rule.steps, rule.gates_per_head(features=4, value_dim=3), rule.initial_constants(4).shape
    (2, 4, torch.Size([2, 4]))
    """

    steps: ClassVar[int] = 2

    def gates_per_head(self, features: int, value_dim: int) -> int:
        return features

    def initial_constants(self, features: int) -> Tensor:
        return torch.ones(2, features)

    def keys(self, tokens: RuleTokens) -> Tensor:
        """Those that remove and those that write, (batch, key heads, N, 2, D).

        Raises:
            ConfigurationError: a feature map: keys that remove are made of features.
        """
        if not isinstance(tokens.feature_map, Identity):
            raise ConfigurationError(
                f"feature_map is {tokens.feature_map!r}; the keys of {self!r} are norms and products of what is "
                "projected: leave it out, or give regard.linear.Identity()"
            )
        rate, _, alpha = self._learned(tokens)
        return torch.stack([rate * self._removed(tokens), tokens.key * (1 + (rate - 1) * alpha)], -2)

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        removed, value = self._removed(tokens), tokens.value
        if (decay := tokens.decay) is not None:
            decay = decay.unsqueeze(-1) if decay.ndim == removed.ndim - 1 else decay
            removed = removed * torch.exp(-decay).to(removed.dtype)
        removal = torch.stack([removed, torch.zeros_like(removed)], -2)
        return torch.stack([torch.zeros_like(value), value], -2), {"removal": removal, "scale": 1.0}

    def _removed(self, tokens: RuleTokens) -> Tensor:
        """κ."""
        return functional.normalize(tokens.key * self._learned(tokens)[1], dim=-1)

    @staticmethod
    def _learned(tokens: RuleTokens) -> tuple[Tensor, Tensor, Tensor]:
        """The rate a (batch, key heads, N, D), and ξ and α, (key heads, 1, D)."""
        if tokens.logits is None or tokens.constants is None:
            raise AssertionError("the layer computes what its rule asks for")
        xi, alpha = tokens.constants.to(tokens.key.dtype).unsqueeze(-2).unbind(-3)
        return tokens.logits.sigmoid(), xi, alpha
