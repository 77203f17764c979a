"""Configurations of language models: frozen dataclasses that build the modules and are stored as JSON."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from ...errors import CheckpointError, ConfigurationError, nearest
from ...linear import (
    BonusRule,
    DecoupledDeltaRule,
    DeltaRule,
    Elu,
    FeatureDecay,
    FeatureMap,
    HeadDecay,
    Identity,
    Relu,
    Softmax,
    SoftplusDecay,
    SoftplusFeatureDecay,
    StateSpaceRule,
    SumRule,
    UnitNorm,
    UpdateRule,
)
from ...linear.decays import LearnedDecay
from ...masks import Mask, causal, prefix, window
from ...nn import (
    Attention,
    BranchNorm,
    FeedForward,
    GatedFeedForward,
    LinearAttention,
    PreNorm,
    Projections,
    Residual,
    RMSNorm,
    SandwichNorm,
    TransformerBlock,
    WholeNormProjections,
)
from ...positions import NTK, DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, YaRN
from ...scores import ScaledDot
from ...utils.dataclass_json import DataclassJSON
from ..normalizer_config import NormalizerConfig
from .linear_parts import LinearHeadsConfig, OutputGateConfig, ShortConvolutionConfig, TokenShiftConfig
from .mixture_of_experts import GatedMixtureOfExperts, MixtureOfExperts

Part = TypeVar("Part")

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "relu": functional.relu,
}
"""By name, so that a configuration is data: with a gate, "silu" makes SwiGLU and the two gelus GeGLU."""


@dataclass(frozen=True)
class RMSNormConfig:
    """Settings of `regard.nn.RMSNorm`; offset=1.0 is Gemma's."""

    eps: float = 1e-6
    offset: float = 0.0

    def make(self, dim: int) -> nn.Module:
        """Build the norm of vectors of this dim."""
        return RMSNorm(dim, self.eps, offset=self.offset)


@dataclass(frozen=True)
class LayerNormConfig:
    """Settings of `torch.nn.LayerNorm`."""

    eps: float = 1e-5
    bias: bool = True

    def make(self, dim: int) -> nn.Module:
        """Build the norm of vectors of this dim."""
        return nn.LayerNorm(dim, self.eps, bias=self.bias)


@dataclass(frozen=True)
class FeedForwardConfig:
    """`regard.nn.FeedForward`: W_2 a(W_1 x)."""

    hidden_dim: int
    activation: str = "gelu"
    bias: bool = True

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build the feed-forward network of one block."""
        activation = _activation(self.activation)
        return FeedForward(dim, self.hidden_dim, activation=activation, bias=self.bias, dropout=dropout)


@dataclass(frozen=True)
class GatedFeedForwardConfig:
    """`regard.nn.GatedFeedForward`: SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh"."""

    hidden_dim: int
    activation: str = "silu"
    bias: bool = False

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build the feed-forward network of one block."""
        activation = _activation(self.activation)
        return GatedFeedForward(dim, self.hidden_dim, activation=activation, bias=self.bias, dropout=dropout)


@dataclass(frozen=True)
class ExpertsConfig:
    """`MixtureOfExperts`: each token passes through `chosen` of `num_experts` feed-forward networks, none dropped."""

    hidden_dim: int
    num_experts: int
    chosen: int
    alpha: float = 1.702
    limit: float = 7.0

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build the mixture of experts of one block."""
        return MixtureOfExperts(dim, self.hidden_dim, self.num_experts, self.chosen, alpha=self.alpha, limit=self.limit)


@dataclass(frozen=True)
class GatedExpertsConfig:
    """`GatedMixtureOfExperts`: each token passes through `chosen` of `num_experts` gated feed-forward networks.

    It has no dropout. `normalized`: whether the shares of the chosen sum to 1. `shared_dim`: the hidden dim of an
    expert that every token passes through, with a sigmoid gate.
    """

    hidden_dim: int
    num_experts: int
    chosen: int
    activation: str = "silu"
    normalized: bool = True
    shared_dim: int | None = None

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build the mixture of experts of one block."""
        return GatedMixtureOfExperts(
            dim,
            self.hidden_dim,
            self.num_experts,
            self.chosen,
            activation=_activation(self.activation),
            normalized=self.normalized,
            shared_dim=self.shared_dim,
        )


NormConfig: TypeAlias = RMSNormConfig | LayerNormConfig
AnyFeedForwardConfig: TypeAlias = FeedForwardConfig | GatedFeedForwardConfig | ExpertsConfig | GatedExpertsConfig


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention of all layers; `Projections` and `Attention` of `regard.nn` explain each.

    - `bias`: whether query, key, value and output maps add one, or the names of those that do.
    - `norm`: of each head's queries and keys, before the rotary embedding; with `whole_norm` of all heads together.
    - `gate`: of what each head reads, before the output map.
    - `scale`: of q · k, instead of 1/√head_dim.
    - `softcap`: c · tanh(score / c).
    - `sinks`: whether each head learns a logit that takes weight and gives no value.
    - `dropout`: the probability with which a weight is dropped in training.
    - `normalizer`: what takes the place of softmax.
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    bias: bool | tuple[str, ...] = False
    norm: NormConfig | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False
    dropout: float = 0.0
    normalizer: NormalizerConfig | None = None
    whole_norm: bool = False
    gate: OutputGateConfig | None = None

    def make(self, dim: int, layer: LayerConfig) -> Attention | LinearAttention:
        """Build the attention of one block."""
        if layer.linear is not None and layer.linear.heads is not None:
            return layer.linear.make(layer.linear.heads.make(dim), layer.rotary)
        if self.whole_norm and self.norm is None:
            raise ConfigurationError("whole_norm=True is of a norm, and there is none: give the attention a norm=")
        projections = (WholeNormProjections if self.whole_norm else Projections)(
            dim,
            self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            bias=self.bias,
            norm=None if self.norm is None else self.norm.make,
        )
        if layer.linear is not None:
            return layer.linear.make(projections, layer.rotary)
        return Attention(
            projections,
            score=None if self.scale is None else ScaledDot(self.scale),
            mask=layer.mask,
            rotary=layer.rotary,
            softcap=self.softcap,
            sinks=torch.zeros(self.num_heads) if self.sinks else None,
            gate=None if self.gate is None else self.gate.make(projections),
            dropout=self.dropout,
            normalizer=None if self.normalizer is None else self.normalizer.make(),
        )


LINEAR_FEATURE_MAPS: dict[str, FeatureMap] = {
    "elu": Elu(),
    "relu": Relu(),
    "identity": Identity(),
    "softmax": Softmax(),
    "unit": UnitNorm(Identity()),
}
"""Feature maps of linear attention by name; "unit" is x / |x|."""

LINEAR_DECAYS: dict[str, LearnedDecay] = {
    "head": HeadDecay(),
    "feature": FeatureDecay(),
    "softplus": SoftplusDecay(),
    "softplus_feature": SoftplusFeatureDecay(),
}
"""Learned decays of linear attention by name."""


@dataclass(frozen=True)
class LinearAttentionConfig:
    """Settings of `regard.nn.LinearAttention`, which explains each: a layer whose cache has a constant size.

    Heads, dims, biases and norms are those of `AttentionConfig`; its scale, softcap, sinks and dropout are of softmax
    attention alone.

    - `feature_map`: "elu", "relu", "identity", "softmax" or "unit"; by default "unit" for the delta rule, else "elu".
    - `decay`: learned gates per "head" or per "feature", "softplus" or "softplus_feature", or a decay of
      `regard.linear` with settings of its own; None for none.
    - `delta_rule`: whether a value replaces what the state has for its key.
    - `normalize`: whether weights are divided by their sum; by default all but the delta rule are.
    - `rule`: in place of these two, a rule of `regard.linear`.
    - `heads`: in place of those of `AttentionConfig`.
    - `convolution`, `gate`: before heads are split, and after queries have read; None for none.
    - `shift`: of what all maps read; None for none.

    Raises:
        ConfigurationError: a rule beside `delta_rule` or `normalize`.
    """

    feature_map: str | None = None
    decay: str | LearnedDecay | None = None
    delta_rule: bool = False
    normalize: bool | None = None
    rule: UpdateRule | None = None
    heads: LinearHeadsConfig | None = None
    convolution: ShortConvolutionConfig | None = None
    gate: OutputGateConfig | None = None
    shift: TokenShiftConfig | None = None

    def __post_init__(self) -> None:
        if self.rule is not None and (self.delta_rule or self.normalize is not None):
            raise ConfigurationError(
                f"rule={self.rule!r} takes the place of delta_rule={self.delta_rule} and normalize={self.normalize}: "
                "leave these out"
            )

    def make(self, projections: Projections, rotary: Rotary | None) -> LinearAttention:
        """Build the linear attention of one block."""
        return LinearAttention(
            projections,
            feature_map=_named("feature map", self.feature_map, LINEAR_FEATURE_MAPS),
            causal=True,
            decay=_named("decay", self.decay, LINEAR_DECAYS) if isinstance(self.decay, str) else self.decay,
            rule=self._rule(),
            rotary=rotary,
            convolution=None if self.convolution is None else self.convolution.make(projections),
            shift=None if self.shift is None else self.shift.make(projections),
            gate=None if self.gate is None else self.gate.make(projections),
        )

    def _rule(self) -> UpdateRule:
        """The rule of the settings."""
        if self.rule is not None:
            return self.rule
        if not self.delta_rule:
            return SumRule(self.normalize is not False)
        if self.normalize:
            raise ConfigurationError("the weights of the delta rule have no sum to divide by: leave normalize out")
        return DeltaRule()


def _named(kind: str, name: str | None, known: dict[str, Part]) -> Part | None:
    """The part of a layer that a setting names; None for None.

    Raises:
        ConfigurationError: there is none of this name.
    """
    if name is not None and name not in known:
        raise ConfigurationError(f"there is no {kind} {name!r}; {nearest(str(name), known)}")
    return None if name is None else known[name]


@dataclass(frozen=True)
class LayerConfig:
    """The attention pattern of one layer: a token attends to itself, the `before` tokens before it, the first `prefix`.

    Without `before`, a token attends to all tokens before it.
    `before=511` is what Mistral calls a window of 512. `rotary` rotates the layer's queries and keys; layers with equal
    ones share the rotation. `feed_forward` replaces the model's in this layer, as in mixtures with some dense layers.
    `linear` makes the layer one of linear attention, over all tokens before. `branch_norm` norms what each part says
    instead of what it reads, as in the full layers of OLMo-hybrid.

    Raises:
        ConfigurationError: linear attention with `before` or `prefix`.

    >>> LayerConfig(before=511, prefix=4).mask
    causal() & (window(before=511) | prefix(4))
    """

    before: int | None = None
    prefix: int = 0
    rotary: Rotary | None = None
    feed_forward: AnyFeedForwardConfig | None = None
    linear: LinearAttentionConfig | None = None
    branch_norm: bool = False

    def __post_init__(self) -> None:
        if self.linear is not None and (self.before is not None or self.prefix):
            raise ConfigurationError(
                f"a layer of linear attention attends to all tokens before each, but has before={self.before} and "
                f"prefix={self.prefix}: leave these out, or leave linear out"
            )

    @property
    def mask(self) -> Mask:
        """The mask of the layer."""
        if self.before is None:
            return causal()
        near = window(before=self.before)
        return causal() & (near | prefix(self.prefix) if self.prefix else near)


@dataclass(frozen=True)
class LanguageModelConfig:
    """The architecture of a `LanguageModel`.

    - `vocabulary_size`: tokens are 0..vocabulary_size - 1.
    - `dim`: of the vectors that go through the blocks.
    - `layers`: what each layer attends to, from the first to the last.
    - `attention`, `norm`: of all layers.
    - `feed_forward`: of the layers that have none of their own.
    - `sandwich`: a norm after each part too, as in Gemma 2; else before it alone.
    - `tied`: the output layer is the embedding; else it has a matrix of its own.
    - `embedding_scale`: what embeddings are multiplied by: √dim for Gemma.
    - `logit_softcap`: c · tanh(logit / c) of the final logits.
    - `dropout`: of embeddings, of what each part says and of hidden features, in training.

    Raises:
        ConfigurationError: no layers, or layers that are no `LayerConfig`s.

    >>> from regard.positions import Rotary
    >>> near, far = LayerConfig(before=511, rotary=Rotary(16)), LayerConfig(rotary=Rotary(16, base=1e6))
    >>> config = LanguageModelConfig(
    ...     vocabulary_size=100,
    ...     dim=64,
    ...     layers=(near, far) * 2,
    ...     attention=AttentionConfig(num_heads=4, num_kv_heads=2),
    ...     feed_forward=GatedFeedForwardConfig(172),
    ... )
    >>> len(config.layers), config.norm
    (4, RMSNormConfig(eps=1e-06, offset=0.0))
    """

    vocabulary_size: int
    dim: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig
    feed_forward: AnyFeedForwardConfig
    norm: NormConfig = field(default_factory=RMSNormConfig)
    sandwich: bool = False
    tied: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "layers", tuple(self.layers))
        other = next((layer for layer in self.layers if not isinstance(layer, LayerConfig)), None)
        if not self.layers or other is not None:
            has = f"holds {other!r}" if self.layers else "is empty"
            raise ConfigurationError(f"layers {has}; it needs a LayerConfig for each layer, one at least")

    def make_block(self, layer: LayerConfig) -> TransformerBlock:
        """Build the block of a layer."""
        attention = self.attention.make(self.dim, layer)
        feed_forward = self.feed_forward if layer.feed_forward is None else layer.feed_forward
        residual = self._branch_residual if layer.branch_norm else self._residual
        return TransformerBlock(attention, feed_forward.make(self.dim, self.dropout), residual)

    def _branch_residual(self) -> Residual:
        return BranchNorm(self.norm.make(self.dim), self.dropout)

    def _residual(self) -> Residual:
        norm = self.norm.make(self.dim)
        if self.sandwich:
            return SandwichNorm(norm, self.norm.make(self.dim), self.dropout)
        return PreNorm(norm, self.dropout)


def _activation(name: str) -> Callable[[Tensor], Tensor]:
    if name not in ACTIVATIONS:
        raise ConfigurationError(f"there is no activation {name!r}; {nearest(str(name), ACTIVATIONS)}")
    return ACTIVATIONS[name]


CONFIG_JSON = DataclassJSON(
    {
        kind.__name__: kind
        for kind in (
            AttentionConfig,
            BonusRule,
            DecoupledDeltaRule,
            DeltaRule,
            DynamicNTK,
            ExpertsConfig,
            FeatureDecay,
            FeedForwardConfig,
            GatedExpertsConfig,
            GatedFeedForwardConfig,
            HeadDecay,
            LanguageModelConfig,
            LayerConfig,
            LayerNormConfig,
            LinearAttentionConfig,
            LinearHeadsConfig,
            LinearScaling,
            Llama3,
            LongRoPE,
            NTK,
            NormalizerConfig,
            OutputGateConfig,
            RMSNormConfig,
            Rotary,
            ShortConvolutionConfig,
            SoftplusDecay,
            SoftplusFeatureDecay,
            StateSpaceRule,
            SumRule,
            TokenShiftConfig,
            YaRN,
        )
    },
    tag="kind",
    subject="the configuration",
    error=CheckpointError,
)
"""The JSON form of a configuration: `CONFIG_JSON.encode(config)`, `CONFIG_JSON.decode(tree)`."""
