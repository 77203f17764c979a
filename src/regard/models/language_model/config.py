"""Configurations of language models: frozen dataclasses that build the modules and are stored as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar

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
    GeneralizedDeltaRule,
    HeadDecay,
    Identity,
    Relu,
    SigmoidFeatureDecay,
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
    EarlierIndexer,
    FeedForward,
    GatedFeedForward,
    LatentAttention,
    LatentProjections,
    LightningIndexer,
    LinearAttention,
    PathAttention,
    PreNorm,
    Projections,
    QueryProjections,
    RelativeAttention,
    Residual,
    RMSNorm,
    SandwichNorm,
    TransformerBlock,
    WholeNormProjections,
)
from ...positions import (
    NTK,
    Axial,
    DynamicNTK,
    InterleavedSections,
    LinearScaling,
    Llama3,
    LongRoPE,
    Proportional,
    Rotary,
    Sections,
    YaRN,
)
from ...positions.rotary import Layout
from ...scores import ScaledDot
from ...utils.dataclass_json import DataclassJSON
from ...utils.numbers import whole_number
from ..normalizer_config import NormalizerConfig
from .alternating_updates import AlternatingUpdates
from .chosen_keys import check_choices
from .dense_and_experts import DenseAndExperts, OutputNorm, ScaledExperts
from .expert_router import ExpertRouter, SigmoidRouter, SoftmaxRouter
from .laurel import LaurelNorm
from .layer_inputs import GatedInputStream, LayerInputs
from .layer_positions import LayerPositions, PathPositionsConfig, RelativePositionsConfig
from .linear_parts import LinearHeadsConfig, OutputGateConfig, ShortConvolutionConfig, TokenShiftConfig
from .mixture_of_experts import GatedMixtureOfExperts, MixtureOfExperts
from .residual_stream import PlainStream, ResidualStream
from .shared_keys import check_no_gates, check_shared_keys, key_sources
from .sparse_activation import SparseActivation

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
    """Settings of `regard.nn.RMSNorm`; offset=1.0 is that of Gemma 1 to 3."""

    eps: float = 1e-6
    offset: float = 0.0
    gain: bool = True

    def make(self, dim: int) -> nn.Module:
        """Build the norm of vectors of this dim."""
        return RMSNorm(dim, self.eps, offset=self.offset, gain=self.gain)


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
    """`regard.nn.GatedFeedForward`: SwiGLU with "silu", GeGLU with "gelu" or "gelu_tanh".

    `sparsity`: the share of the hidden features that `SparseActivation` sets to 0, about; None for none.
    """

    hidden_dim: int
    activation: str = "silu"
    bias: bool = False
    sparsity: float | None = None

    def make(self, dim: int, dropout: float) -> GatedFeedForward:
        """Build the feed-forward network of one block."""
        activation = _activation(self.activation)
        if self.sparsity is not None:
            activation = SparseActivation(activation, self.sparsity)
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


ROUTERS: dict[str, type[ExpertRouter]] = {"softmax": SoftmaxRouter, "sigmoid": SigmoidRouter}
"""By the score that their shares are made of."""


@dataclass(frozen=True)
class RouterConfig:
    """`SoftmaxRouter`, or with score "sigmoid" `SigmoidRouter`, of a mixture of experts; these explain each setting."""

    score: str = "softmax"
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0

    def make(self, dim: int, num_experts: int, chosen: int, normalized: bool) -> ExpertRouter:
        """Build the router of one block."""
        if self.score not in ROUTERS:
            raise ConfigurationError(f"there is no router {self.score!r}; {nearest(str(self.score), ROUTERS)}")
        return ROUTERS[self.score](
            dim,
            num_experts,
            chosen,
            normalized=normalized,
            groups=self.groups,
            chosen_groups=self.chosen_groups,
            scale=self.scale,
        )


@dataclass(frozen=True)
class GatedExpertsConfig:
    """`GatedMixtureOfExperts`: each token passes through `chosen` of `num_experts` gated feed-forward networks.

    It has no dropout. `normalized`: whether the shares of the chosen sum to 1, before the scale of the `router`.
    `shared_dim`: the hidden dim of a network that every token passes through, with a sigmoid gate where `shared_gate`.
    """

    hidden_dim: int
    num_experts: int
    chosen: int
    activation: str = "silu"
    normalized: bool = True
    shared_dim: int | None = None
    shared_gate: bool = True
    router: RouterConfig = field(default_factory=RouterConfig)

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build the mixture of experts of one block."""
        activation = _activation(self.activation)
        shared = None
        if self.shared_dim is not None:
            shared = GatedFeedForward(dim, whole_number("shared_dim", self.shared_dim), activation=activation)
        return GatedMixtureOfExperts(
            self.router.make(dim, self.num_experts, self.chosen, self.normalized),
            self.hidden_dim,
            activation=activation,
            shared=shared,
            shared_gate=self.shared_gate,
        )


@dataclass(frozen=True)
class DenseAndExpertsConfig:
    """`DenseAndExperts`: a gated feed-forward network, and beside it `chosen` of `num_experts` for each token.

    It has the norms of its inputs itself, `norm`; the model needs `sandwich`, whose norm before is left out here.
    """

    dense: GatedFeedForwardConfig
    hidden_dim: int
    num_experts: int
    chosen: int
    activation: str = "gelu_tanh"
    norm: RMSNormConfig = field(default_factory=RMSNormConfig)

    def make(self, dim: int, dropout: float) -> nn.Module:
        """Build both of one block."""
        activation, sizes = _activation(self.activation), (self.hidden_dim, self.num_experts, self.chosen)
        experts = ScaledExperts(dim, *sizes, activation=activation, eps=self.norm.eps)
        return DenseAndExperts(self.dense.make(dim, dropout), experts, self.norm.make)


NormConfig: TypeAlias = RMSNormConfig | LayerNormConfig
AnyFeedForwardConfig: TypeAlias = (
    FeedForwardConfig | GatedFeedForwardConfig | ExpertsConfig | GatedExpertsConfig | DenseAndExpertsConfig
)


@dataclass(frozen=True)
class AttentionConfig:
    """Settings of the attention of all layers; `Projections` and `Attention` of `regard.nn` explain each.

    - `bias`: whether query, key, value and output maps add one, or the names of those that do.
    - `norm`: of each head's queries and keys, before the rotary embedding; with `whole_norm` of all heads together.
    - `gate`: of what each head reads, before the output map.
    - `value_norm`: of each head's values.
    - `tied_values`: whether values are the projected keys, before their norm.
    - `scale`: of q · k, instead of 1/√head_dim.
    - `softcap`: c · tanh(score / c).
    - `sinks`: whether each head learns a logit that takes weight and gives no value.
    - `dropout`: the probability with which a weight is dropped in training.
    - `normalizer`: what takes the place of softmax.
    - `forget_gate`: whether each token has a gate for each head, by which what comes before it fades.
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
    value_norm: NormConfig | None = None
    tied_values: bool = False
    whole_norm: bool = False
    gate: OutputGateConfig | None = None
    forget_gate: bool = False

    def key_heads(self, dim: int) -> tuple[int, int]:
        """The number of key heads, and their dim."""
        num_kv_heads = self.num_heads if self.num_kv_heads is None else self.num_kv_heads
        return num_kv_heads, dim // self.num_heads if self.head_dim is None else self.head_dim

    def make(self, dim: int, layer: LayerConfig) -> Attention | LinearAttention | PathAttention | RelativeAttention:
        """Build the attention of one block.

        Raises:
            ConfigurationError: positions of a layer, and a setting that such attention has not.
        """
        if layer.linear is not None and layer.linear.heads is not None:
            return layer.linear.make(layer.linear.heads.make(dim), layer.rotary)
        if layer.linear is not None:
            return layer.linear.make(self._projections(dim), layer.rotary)
        if layer.positions is not None:
            return self._positioned(dim, layer.positions, layer.mask)
        projections = self._projections(dim) if layer.keys_from is None else self._query_projections(dim)
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
            forget_gate=self.forget_gate,
        )

    def _positioned(self, dim: int, positions: LayerPositions, mask: Mask) -> PathAttention | RelativeAttention:
        """The attention of a layer with positions of its own."""
        lacks = ["scale", "softcap", "sinks", "normalizer", "gate"]
        lacks += [] if isinstance(positions, PathPositionsConfig) else ["forget_gate"]
        given = [f"{name}={getattr(self, name)!r}" for name in lacks if getattr(self, name) not in (None, False)]
        if given:
            raise ConfigurationError(
                f"a layer has positions={positions!r}, whose attention has no {', '.join(lacks)}; the attention of the "
                f"model sets {' and '.join(given)}: give the layer one without these, or a rotary in place of positions"
            )
        projections = self._projections(dim)
        if isinstance(positions, PathPositionsConfig):
            return positions.make(projections, mask, forget_gate=self.forget_gate, dropout=self.dropout)
        return positions.make(projections, mask, dropout=self.dropout)

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim"):
            if (count := getattr(self, name)) is not None or name == "num_heads":
                whole_number(name, count)
        if self.whole_norm and self.norm is None:
            raise ConfigurationError("whole_norm=True is of a norm, and there is none: give the attention a norm=")
        if self.whole_norm and (self.value_norm is not None or self.tied_values):
            raise ConfigurationError(
                "whole_norm is of queries and keys alone, beside values of their own: leave value_norm and tied_values "
                "out, or whole_norm"
            )

    def _projections(self, dim: int) -> Projections:
        if self.whole_norm:
            return WholeNormProjections(dim, self.num_heads, **self._heads())
        value_norm = None if self.value_norm is None else self.value_norm.make
        return Projections(dim, self.num_heads, value_norm=value_norm, tied_values=self.tied_values, **self._heads())

    def _query_projections(self, dim: int) -> QueryProjections:
        """Those of a layer that reads the keys and values of another.

        Raises:
            ConfigurationError: queries that are normed over all heads.
        """
        if self.whole_norm:
            raise ConfigurationError(
                "a layer with keys_from norms the queries of each head, but whole_norm is of all heads together: leave "
                "one of them out"
            )
        return QueryProjections(dim, self.num_heads, **self._heads())

    def _heads(self) -> dict[str, Any]:
        """The arguments that all projections have."""
        norm = None if self.norm is None else self.norm.make
        return {"num_kv_heads": self.num_kv_heads, "head_dim": self.head_dim, "bias": self.bias, "norm": norm}


@dataclass(frozen=True)
class IndexerConfig:
    """`regard.nn.LightningIndexer`, which explains each setting: the keys that a token attends to are chosen."""

    num_heads: int
    head_dim: int
    count: int
    layout: Layout = "half"

    def make(self, dim: int, query_latent_dim: int) -> LightningIndexer:
        """Build the indexer of one block."""
        return LightningIndexer(
            dim,
            query_latent_dim,
            num_heads=self.num_heads,
            head_dim=self.head_dim,
            count=self.count,
            layout=self.layout,
        )


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Settings of the latent attention of all layers; `LatentProjections` and `LatentAttention` explain each.

    A layer's cache has latent_dim + rotary_dim numbers a token, for any number of heads, and those of the indexer's
    key; steps attend to these directly. A layer's `rotary` is of at most `rotary_dim` features.

    - `norm`: of both latents.
    - `scale`: of scores, instead of 1/√(head_dim + rotary_dim).
    - `indexer`: chooses the keys of each token; it needs a `query_latent_dim`.
    - `dropout`: the probability with which a weight is dropped in training.

    Raises:
        ConfigurationError: an indexer without a `query_latent_dim`.
    """

    num_heads: int
    latent_dim: int
    rotary_dim: int
    head_dim: int | None = None
    value_dim: int | None = None
    query_latent_dim: int | None = None
    bias: bool = False
    norm: NormConfig = field(default_factory=RMSNormConfig)
    scale: float | None = None
    indexer: IndexerConfig | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.indexer is not None and self.query_latent_dim is None:
            raise ConfigurationError(
                "an indexer reads the latent of queries, but query_latent_dim is None: give it, or leave indexer out"
            )

    def key_heads(self, dim: int) -> None:
        """None: it stores latents, which are no keys that other layers read."""
        return

    def make(self, dim: int, layer: LayerConfig) -> LatentAttention | LinearAttention:
        """Build the attention of one block.

        Raises:
            ConfigurationError: a layer of linear attention without heads of its own.
        """
        if layer.linear is not None and layer.linear.heads is not None:
            return layer.linear.make(layer.linear.heads.make(dim), layer.rotary)
        if layer.linear is not None:
            raise ConfigurationError(
                "a layer of linear attention has the heads of an AttentionConfig, but the model's attention is a "
                "LatentAttentionConfig: give the layer LinearAttentionConfig(heads=...)"
            )
        if layer.positions is not None:
            raise ConfigurationError(
                f"a layer has positions={layer.positions!r}, which are of keys of heads, and latent attention stores "
                "latents: give the layer an AttentionConfig as attention, or a rotary in place of positions"
            )
        projections = LatentProjections(
            dim,
            self.num_heads,
            latent_dim=self.latent_dim,
            rotary_dim=self.rotary_dim,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            query_latent_dim=self.query_latent_dim,
            norm=self.norm.make,
            bias=self.bias,
        )
        indexer = None if layer.chosen_by is None else EarlierIndexer()
        if indexer is None and self.indexer is not None and self.query_latent_dim is not None:
            indexer = self.indexer.make(dim, self.query_latent_dim)
        return LatentAttention(
            projections, layer.rotary, scale=self.scale, indexer=indexer, mask=layer.mask, dropout=self.dropout
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
    "sigmoid_feature": SigmoidFeatureDecay(),
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
    - `decay`: learned gates per "head" or per "feature", "sigmoid_feature", "softplus" or
      "softplus_feature", or a decay of
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
    ones share the rotation. `feed_forward` and `attention` replace the model's in this layer, as in mixtures with some
    dense layers, and in models with other heads in some.
    `linear` makes the layer one of linear attention, over all tokens before.
    `keys_from` is the number of an earlier layer, from 0: this one has queries alone, reads the keys and values of that
    one, and stores nothing while it decodes. It attends to no more tokens than that one, with the same rotary and the
    same key heads.
    `positions`, in place of a rotary, are vectors by distance or reflections, which the layer learns.
    `chosen_by`, of latent attention with an indexer, is the number of an earlier layer too: this one has no indexer,
    and attends to the keys that that one has chosen. `branch_norm` norms what each part says instead of what it reads,
    as in the full layers of OLMo-hybrid.

    Raises:
        ConfigurationError: linear attention with `before`, `prefix` or `keys_from`; positions with a rotary, linear
            attention or `keys_from`.

    >>> LayerConfig(before=511, prefix=4).mask
    causal() & (window(before=511) | prefix(4))
    """

    before: int | None = None
    prefix: int = 0
    rotary: Rotary | None = None
    feed_forward: AnyFeedForwardConfig | None = None
    linear: LinearAttentionConfig | None = None
    attention: AttentionConfig | LatentAttentionConfig | None = None
    keys_from: int | None = None
    chosen_by: int | None = None
    branch_norm: bool = False
    positions: LayerPositions | None = None

    def __post_init__(self) -> None:
        beside = {"rotary": self.rotary, "linear": self.linear, "keys_from": self.keys_from}
        given = [f"{name}={value!r}" for name, value in beside.items() if value is not None]
        if self.positions is not None and given:
            raise ConfigurationError(
                f"a layer has positions={self.positions!r}, which are of its own keys and take the place of a rotary, "
                f"and {' and '.join(given)}: leave one of them out"
            )
        if self.linear is not None and self.keys_from is not None:
            raise ConfigurationError(
                f"a layer of linear attention has a state and no keys, but has keys_from={self.keys_from}: leave one "
                "of them out"
            )
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
class LayerInputsConfig:
    """`LayerInputs`: a vector of this dim for each token and layer, which the layer's output is gated with.

    `vocabulary_size`: of its table; the model's if None. Tokens beyond it have the vector of token 0.
    """

    dim: int
    vocabulary_size: int | None = None
    activation: str = "gelu_tanh"

    def make(self, config: LanguageModelConfig) -> LayerInputs:
        """Build the table and the gates of all layers."""
        return LayerInputs(
            config.dim,
            self.dim,
            layers=len(config.layers),
            vocabulary_size=config.vocabulary_size if self.vocabulary_size is None else self.vocabulary_size,
            activation=_activation(self.activation),
            norm=config.norm.make,
        )


@dataclass(frozen=True)
class GatedInputStreamConfig:
    """`GatedInputStream`: after each block its layer's vector of the token is added, and all is scaled: Gemma 4."""

    inputs: LayerInputsConfig | None = None

    def make(self, config: LanguageModelConfig) -> ResidualStream:
        """Build the stream of a model."""
        inputs = None if self.inputs is None else self.inputs.make(config)
        return GatedInputStream(len(config.layers), inputs)


@dataclass(frozen=True)
class AlternatingUpdatesConfig:
    """`AlternatingUpdates`: `copies` of the vectors go through the model, blocks compute the one that is `active`.

    `limit`: of the coefficients, in training. `scaled`: whether a learned scale of each feature precedes the gate of
    the layer's inputs.
    """

    inputs: LayerInputsConfig
    copies: int = 4
    active: int = 0
    limit: float | None = 120.0
    scaled: bool = True

    def make(self, config: LanguageModelConfig) -> ResidualStream:
        """Build the stream of a model."""
        return AlternatingUpdates(
            config.dim,
            self.inputs.make(config),
            layers=len(config.layers),
            copies=self.copies,
            active=self.active,
            limit=self.limit,
            scaled=self.scaled,
            norm=config.norm.make,
        )


StreamConfig: TypeAlias = GatedInputStreamConfig | AlternatingUpdatesConfig


@dataclass(frozen=True)
class LanguageModelConfig:
    """The architecture of a `LanguageModel`.

    - `vocabulary_size`: tokens are 0..vocabulary_size - 1.
    - `dim`: of the vectors that go through the blocks.
    - `layers`: what each layer attends to, from the first to the last.
    - `norm`: of all layers.
    - `attention`, `feed_forward`: of the layers that have none of their own.
    - `sandwich`: a norm after each part too, as in Gemma 2; else before it alone.
    - `tied`: the output layer is the embedding; else it has a matrix of its own.
    - `embedding_scale`: what embeddings are multiplied by: √dim for Gemma.
    - `logit_softcap`: c · tanh(logit / c) of the final logits.
    - `dropout`: of embeddings, of what each part says and of hidden features, in training.
    - `laurel_rank`: of a low-rank map beside each attention, as in Gemma 3n (`LaurelNorm`); needs `sandwich`.
    - `stream`: what goes from block to block, if it is more than the output of one.

    Raises:
        ConfigurationError: sizes below 1, what are no settings; no layers, or layers that are no `LayerConfig`s;
            `keys_from` of a layer that has no keys for it; a `chosen_by` that names no earlier layer with an indexer
            and the same mask; a `laurel_rank` without `sandwich`.

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
    (4, RMSNormConfig(eps=1e-06, offset=0.0, gain=True))
    """

    vocabulary_size: int
    dim: int
    layers: tuple[LayerConfig, ...]
    attention: AttentionConfig | LatentAttentionConfig
    feed_forward: AnyFeedForwardConfig
    norm: NormConfig = field(default_factory=RMSNormConfig)
    sandwich: bool = False
    tied: bool = False
    embedding_scale: float | None = None
    logit_softcap: float | None = None
    dropout: float = 0.0
    laurel_rank: int | None = None
    stream: StreamConfig | None = None

    def __post_init__(self) -> None:
        whole_number("vocabulary_size", self.vocabulary_size)
        whole_number("dim", self.dim)
        if not isinstance(self.layers, Iterable):
            raise ConfigurationError(f"layers is {self.layers!r}; it needs a LayerConfig for each layer, one at least")
        for name, settings in (("attention", self.attention), ("feed_forward", self.feed_forward)):
            if not hasattr(settings, "make"):
                raise ConfigurationError(
                    f"{name} is {settings!r}; it needs settings of all layers, such as "
                    + ("AttentionConfig(num_heads=8)" if name == "attention" else "FeedForwardConfig(hidden_dim)")
                )
        object.__setattr__(self, "layers", tuple(self.layers))
        other = next((layer for layer in self.layers if not isinstance(layer, LayerConfig)), None)
        if not self.layers or other is not None:
            has = f"holds {other!r}" if self.layers else "is empty"
            raise ConfigurationError(f"layers {has}; it needs a LayerConfig for each layer, one at least")
        attention = [self.attention_of(layer) for layer in self.layers]
        check_shared_keys(self.layers, [each.key_heads(self.dim) for each in attention])
        check_no_gates(self.layers, [isinstance(each, AttentionConfig) and each.forget_gate for each in attention])
        indexers = [each.indexer if isinstance(each, LatentAttentionConfig) else None for each in attention]
        check_choices(self.layers, [indexer is not None for indexer in indexers])
        if self.laurel_rank is not None and not self.sandwich:
            raise ConfigurationError(
                f"laurel_rank is {self.laurel_rank}, of a map beside the norms of sandwich=True: set it, or leave "
                "laurel_rank out"
            )

    @property
    def key_sources(self) -> tuple[int | None, ...]:
        """For each layer the number of that whose keys and values several read; None where a layer has them alone."""
        return key_sources(self.layers)

    def attention_of(self, layer: LayerConfig) -> AttentionConfig | LatentAttentionConfig:
        """The settings of a layer's attention: its own, or the model's."""
        return self.attention if layer.attention is None else layer.attention

    def make_block(self, layer: LayerConfig) -> TransformerBlock:
        """Build the block of a layer."""
        attention = self.attention_of(layer).make(self.dim, layer)
        feed_forward = self.feed_forward if layer.feed_forward is None else layer.feed_forward
        attended = self._branch_residual() if layer.branch_norm else self._attention_residual()
        fed = self._branch_residual() if layer.branch_norm else self._feed_forward_residual(feed_forward)
        residuals = iter([attended, fed])
        return TransformerBlock(attention, feed_forward.make(self.dim, self.dropout), residuals.__next__)

    def make_stream(self) -> ResidualStream:
        """Build what goes from block to block."""
        return PlainStream() if self.stream is None else self.stream.make(self)

    def _attention_residual(self) -> Residual:
        if self.laurel_rank is None:
            return self._residual()
        return LaurelNorm(self.dim, self.laurel_rank, self.norm.make, self.dropout)

    def _branch_residual(self) -> Residual:
        return BranchNorm(self.norm.make(self.dim), self.dropout)

    def _feed_forward_residual(self, feed_forward: AnyFeedForwardConfig) -> Residual:
        if not isinstance(feed_forward, DenseAndExpertsConfig):
            return self._residual()
        if not self.sandwich:
            raise ConfigurationError("a DenseAndExpertsConfig has the norms of its input itself: set sandwich=True")
        return OutputNorm(self.norm.make(self.dim), self.dropout)

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
            AlternatingUpdatesConfig,
            AttentionConfig,
            Axial,
            BonusRule,
            DecoupledDeltaRule,
            DeltaRule,
            DenseAndExpertsConfig,
            DynamicNTK,
            ExpertsConfig,
            FeatureDecay,
            FeedForwardConfig,
            GatedExpertsConfig,
            GatedFeedForwardConfig,
            IndexerConfig,
            GatedInputStreamConfig,
            GeneralizedDeltaRule,
            HeadDecay,
            InterleavedSections,
            LanguageModelConfig,
            LatentAttentionConfig,
            LayerConfig,
            LayerInputsConfig,
            LayerNormConfig,
            LinearAttentionConfig,
            LinearHeadsConfig,
            LinearScaling,
            Llama3,
            LongRoPE,
            NTK,
            NormalizerConfig,
            OutputGateConfig,
            PathPositionsConfig,
            Proportional,
            RMSNormConfig,
            RelativePositionsConfig,
            Rotary,
            RouterConfig,
            Sections,
            ShortConvolutionConfig,
            SigmoidFeatureDecay,
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
