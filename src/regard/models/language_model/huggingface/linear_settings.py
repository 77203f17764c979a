"""Settings of config.json for models that mix layers of linear attention and of softmax attention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ....errors import CheckpointError
from ....linear import DeltaRule, SoftplusDecay, SoftplusFeatureDecay
from ..config import LayerConfig, LinearAttentionConfig
from ..linear_parts import LinearHeadsConfig, OutputGateConfig, ShortConvolutionConfig
from .config_reader import LARGEST_SIZES, ModelSettings

UNIT_EPS = 1e-6
"""Of the L2 norm of queries and keys, a constant in transformers."""

ATTENTION_GATE = OutputGateConfig("sigmoid")
"""The gate of Qwen3-Next's softmax attention."""

KINDS = ("linear_attention", "full_attention")

QWEN3_NEXT = {
    "head_dim": 256,
    "intermediate_size": 5632,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
QWEN3_5 = {
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 32768,
    "num_key_value_heads": 4,
}
OLMO_HYBRID = {
    "hidden_act": "silu",
    "linear_allow_neg_eigval": True,
    "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
}

KIMI_SETTINGS = {"full_attn_layers", "head_dim", "kda_layers", "num_heads", "short_conv_kernel_size"}
"""Those of `linear_attn_config`."""

INITIAL = ("linear_a_log_min", "linear_a_log_max", "linear_dt_min", "linear_dt_max", "linear_dt_init_floor")
"""Settings of how weights are drawn, which say nothing of what a model computes."""


def delta_net(
    settings: ModelSettings, *, norm_eps: float, largest: float = 1.0, defaults: Mapping[str, int] | None = None
) -> LinearAttentionConfig:
    """Gated DeltaNet of the settings `linear_*`: a convolution, unit queries and keys, a gated norm of what is read.

    defaults: of settings that are missing or None.
    """
    settings.only("hidden_act", "silu")  # of the convolution too
    for name in INITIAL:
        settings.get(name)
    names = "linear_num_value_heads", "linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"
    sizes = [_size(settings, name, defaults or {}) for name in names]
    return LinearAttentionConfig(
        feature_map="identity",
        decay=SoftplusDecay(),
        rule=DeltaRule(largest),
        heads=LinearHeadsConfig(*sizes, unit_eps=UNIT_EPS),
        convolution=ShortConvolutionConfig(settings.need("linear_conv_kernel_dim")),
        gate=OutputGateConfig("silu", norm_eps),
    )


def kimi_delta(settings: ModelSettings) -> LinearAttentionConfig:
    """Kimi Delta Attention: a decay for each feature, and a gate, each a product of two matrices of rank head_dim."""
    heads, dim, width = (
        _kimi_size(settings, name, inner)
        for name, inner in (
            ("linear_num_heads", "num_heads"),
            ("linear_head_dim", "head_dim"),
            ("linear_conv_kernel_dim", "short_conv_kernel_size"),
        )
    )
    settings.only("hidden_act", "silu")  # of the convolution too
    return LinearAttentionConfig(
        feature_map="identity",
        decay=SoftplusFeatureDecay(rank=dim),
        rule=DeltaRule(),
        heads=LinearHeadsConfig(heads, None, dim, dim, unit_eps=UNIT_EPS),
        convolution=ShortConvolutionConfig(width),
        gate=OutputGateConfig("sigmoid", settings.need("rms_norm_eps"), rank=dim),
    )


def kimi_kinds(settings: ModelSettings) -> list[Any]:
    """The kind of each layer of Kimi Linear: by `layer_types`, the numbers of `linear_attn_config`, or every fourth."""
    count, kinds, told = settings.need("num_hidden_layers"), settings.get("layer_types"), _kimi_table(settings)
    if kinds is None and told.keys() >= {"kda_layers", "full_attn_layers"}:
        numbered = dict.fromkeys(told["kda_layers"], KINDS[0]) | dict.fromkeys(told["full_attn_layers"], KINDS[1])
        kinds = [numbered.get(number) for number in range(1, count + 1)]  # there they count from 1
    if kinds is None:
        kinds = [KINDS[bool(number) and number % 4 == 0] for number in range(count)]
    if len(kinds) != count or not set(kinds) <= set(KINDS):
        raise CheckpointError(
            f"config.json says layer_types={kinds!r}; it needs {KINDS[0]!r} or {KINDS[1]!r} for each of the {count} "
            "layers"
        )
    return kinds


def _kimi_table(settings: ModelSettings) -> Mapping[str, Any]:
    """`linear_attn_config`, in which released files have settings of linear layers."""
    told = settings.get("linear_attn_config") or {}
    if unknown := sorted(told.keys() - KIMI_SETTINGS):
        raise CheckpointError(
            "config.json's linear_attn_config has settings that are unknown here: "
            + ", ".join(f"{name}={told[name]!r}" for name in unknown)
        )
    return told


def _kimi_size(settings: ModelSettings, name: str, inner: str) -> int:
    """A size, which `linear_attn_config` says in place of a setting of its own."""
    value = _kimi_table(settings).get(inner, settings.get(name))
    if type(value) is not int or not 1 <= value <= LARGEST_SIZES[name]:
        raise CheckpointError(
            f"config.json says {name}={value!r}; it needs a whole number in 1..{LARGEST_SIZES[name]:,}"
        )
    return value


def _size(settings: ModelSettings, name: str, defaults: Mapping[str, int]) -> int:
    """A size by its setting, or by its default where config.json lacks it or has None."""
    value = settings.get(name)
    return defaults.get(name) or settings.need(name) if value is None else value


def hybrid_layers(
    settings: ModelSettings, linear: LayerConfig, full: LayerConfig, is_full: Callable[[int], bool]
) -> list[LayerConfig]:
    """The layers by `layer_types`, or by the rule of the architecture if config.json lacks it."""
    count, kinds = settings.need("num_hidden_layers"), settings.get("layer_types")
    if kinds is None:
        kinds = [KINDS[is_full(number)] for number in range(count)]
    other = next((kind for kind in kinds if kind not in KINDS), None)
    if other is not None or len(kinds) != count:
        said = f"has {other!r}" if other is not None else f"names {len(kinds)} layers"
        raise CheckpointError(
            f"config.json's layer_types {said}; it needs {KINDS[0]!r} or {KINDS[1]!r} for each of the {count} layers"
        )
    return [linear if kind == KINDS[0] else full for kind in kinds]
