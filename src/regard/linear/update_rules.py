"""The rules by which a layer of linear attention writes a value into its state, and reads it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..errors import ConfigurationError
from ..utils.numbers import lies_between
from .feature_maps import Elu, FeatureMap, Identity, UnitNorm
from .linear_arguments import LARGEST_BETA, LinearOptions


class RuleTokens(NamedTuple):
    """What a rule reads of the tokens of a call.

    Args:
        key: (batch, key heads, N, D), before φ.
        value: (batch, key heads, N, Dv).
        feature_map: φ.
        logits: of its gates, (batch, key heads, N, `gates_per_head`); None where it has none.
        constants: what it learns for each key head, in the shape of `initial_constants` after (key heads,), or None.
        step: Δ of a decay that has one, (batch, key heads, N).
        decay: g, (batch, key heads, N) or (batch, key heads, N, features), or broadcasting to one of these; None
            without.
    """

    key: Tensor
    value: Tensor
    feature_map: FeatureMap
    logits: Tensor | None = None
    constants: Tensor | None = None
    step: Tensor | None = None
    decay: Tensor | None = None


class UpdateRule:
    """How a layer of linear attention writes values and reads its state: the `rule` of `regard.nn.LinearAttention`.

    A rule of your own is a frozen dataclass of this base, with whatever it changes of the methods.
    """

    normalize: bool = False
    """Whether the weights of a row are divided by their sum."""
    needs_order: ClassVar[bool] = True
    """Whether the keys need an order."""
    needs_step: ClassVar[bool] = False
    """Whether it reads the step Δ of a `SoftplusDecay`."""
    steps: ClassVar[int] = 1
    """The steps of the state for each token. If there are several, keys, values and removals have an axis of them after
    the tokens, and `regard.linear.delta_product` computes them."""

    @property
    def default_map(self) -> FeatureMap:
        """φ where a layer is given none."""
        return Identity()

    def gates_per_head(self, features: int, value_dim: int) -> int:
        """The logits, learned functions of a token, that it needs for each key head."""
        return 0

    def initial_constants(self, features: int) -> Tensor | None:
        """The first value, for each key head, of what it learns that is no function of a token; None for nothing."""
        return None

    def keys(self, tokens: RuleTokens) -> Tensor:
        """The keys that values are written to, before φ."""
        return tokens.key

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        """The values that are written, and the options of `regard.linear_attention` that write them."""
        return tokens.value, {}

    def finish(self, output: Tensor, tokens: RuleTokens) -> Tensor:
        """The output of the layer's heads from what queries read, both (batch, heads, N, Dv)."""
        return output


@dataclass(frozen=True)
class SumRule(UpdateRule):
    """S_t = e^{g_t} S_{t-1} + φ(k_t) v_tᵀ: each value is added to the state.

    Args:
        normalize: whether the weights of a row are divided by their sum; not so in RetNet and gated linear attention.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), Eq. 10 to 12.

    >>> import regard
    >>> regard.linear.SumRule()
    SumRule(normalize=True)
    """

    normalize: bool = True

    needs_order: ClassVar[bool] = False

    @property
    def default_map(self) -> FeatureMap:
        return Elu()


@dataclass(frozen=True)
class DeltaRule(UpdateRule):
    """S_t = e^{g_t} S_{t-1} + β_t φ(k_t) (v_t - (e^{g_t} S_{t-1})ᵀ φ(k_t))ᵀ: a value replaces what its key has stored.

    The share β = largest · σ(w · x) of each key head and token x is learned. With a decay it is the gated delta rule.
    The weights have no sum to divide by, and keys need a norm of at most 1.

    Args:
        largest: of β, at most 2. Above 1 a state can change its sign along a key (Grazzi et al. 2024, arXiv
            2411.12537).

    Raises:
        ConfigurationError: a largest β that is not above 0 and at most 2.

    Source: Schlag et al. 2021 (arXiv 2102.11174), section 4.2; Yang et al. 2024 (arXiv 2406.06484), section 3.3; gated,
    Yang et al. 2024 (arXiv 2412.06464).

    >>> import torch, regard
    >>> regard.linear.DeltaRule().beta(torch.zeros(1, 3, 1))
    tensor([[[0.5000, 0.5000, 0.5000]]])
    """

    largest: float = 1.0

    def __post_init__(self) -> None:
        _check_largest(self.largest)

    @property
    def default_map(self) -> FeatureMap:
        return UnitNorm(Identity())

    def beta(self, logits: Tensor) -> Tensor:
        """β (batch, key heads, N) of logits (batch, N, key heads)."""
        beta = logits.sigmoid().transpose(1, 2)
        return beta if self.largest == 1.0 else self.largest * beta

    def gates_per_head(self, features: int, value_dim: int) -> int:
        return 1

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        return tokens.value, {"beta": self.beta(_given(tokens.logits).squeeze(-1).transpose(1, 2))}


@dataclass(frozen=True)
class DecoupledDeltaRule(UpdateRule):
    """S_t = (I - φ(k_t) (b_t ⊙ φ(k_t))ᵀ) e^{g_t} S_{t-1} + φ(k_t) (w_t ⊙ v_t)ᵀ: gates for what is removed and written.

    The erase gate b = largest · σ(·) has one number for each feature, the write gate w = σ(·) one for each entry of the
    value; both are learned functions of a token. With equal numbers in all of them it is the delta rule.

    Args:
        largest: of b, at most 2.

    Raises:
        ConfigurationError: a largest b that is not above 0 and at most 2.

    Source: Hatamizadeh et al. 2026, Gated DeltaNet-2 (arXiv 2605.22791).

    >>> import regard
    >>> regard.linear.DecoupledDeltaRule().gates_per_head(features=4, value_dim=3)
    7
    """

    largest: float = 1.0

    def __post_init__(self) -> None:
        _check_largest(self.largest)

    @property
    def default_map(self) -> FeatureMap:
        return UnitNorm(Identity())

    def gates_per_head(self, features: int, value_dim: int) -> int:
        return features + value_dim

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        gates, value = _given(tokens.logits).sigmoid(), tokens.value
        erase, written = gates.split([gates.shape[-1] - value.shape[-1], value.shape[-1]], -1)
        removal = self.largest * erase * tokens.feature_map(tokens.key)
        return written * value, {"removal": removal}


@dataclass(frozen=True)
class BonusRule(UpdateRule):
    """o_t = (S_{t-1} + diag(u) k_t v_tᵀ)ᵀ q_t, S_t = e^{g_t} S_{t-1} + k_t v_tᵀ: a token's own value is weighed by u.

    The bonus u, one number for each key head and feature, is learned and starts at 1.

    Source: Peng et al. 2024, RWKV-5 and 6 (arXiv 2404.05892), section 4.

    >>> import regard
    >>> regard.linear.BonusRule().initial_constants(3)
    tensor([1., 1., 1.])
    """

    def initial_constants(self, features: int) -> Tensor:
        return torch.ones(features)

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        return tokens.value, {"bonus": _given(tokens.constants)[None, :, None]}


@dataclass(frozen=True)
class StateSpaceRule(UpdateRule):
    """S_t = e^{g_t} S_{t-1} + Δ_t φ(k_t) v_tᵀ and o_t = S_tᵀ φ(q_t) + d v_t: Mamba-2's state space of a scalar decay.

    Δ is the step of the layer's `SoftplusDecay`; d, one number for each key head, is learned and starts at 1. Queries
    are C, keys B and values x of the paper.

    Source: Dao and Gu 2024 (arXiv 2405.21060), section 7.

    >>> import regard
    >>> regard.linear.StateSpaceRule().needs_step
    True
    """

    needs_step: ClassVar[bool] = True

    def initial_constants(self, features: int) -> Tensor:
        return torch.ones(())

    def write(self, tokens: RuleTokens) -> tuple[Tensor, LinearOptions]:
        step = _given(tokens.step).unsqueeze(-1).to(tokens.value.dtype)
        return step * tokens.value, {"scale": 1.0}

    def finish(self, output: Tensor, tokens: RuleTokens) -> Tensor:
        value, skipped = tokens.value, _given(tokens.constants).to(output.dtype)[:, None, None]
        return output + (skipped * value).repeat_interleave(output.shape[1] // max(value.shape[1], 1), 1)


def _given(tensor: Tensor | None) -> Tensor:
    if tensor is None:
        raise AssertionError("the layer computes what its rule asks for")
    return tensor


def _check_largest(largest: float) -> None:
    if largest != LARGEST_BETA and not lies_between(0, largest, LARGEST_BETA):
        raise ConfigurationError(f"largest is {largest!r}; it needs a number above 0 and at most {LARGEST_BETA:g}")
