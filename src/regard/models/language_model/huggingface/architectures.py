"""The architectures of transformers that can be read, and the configuration that the settings of each describe."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ....errors import CheckpointError, RegardError
from ....positions.rotary import Layout
from ..config import (
    AlternatingUpdatesConfig,
    AttentionConfig,
    DenseAndExpertsConfig,
    ExpertsConfig,
    GatedExpertsConfig,
    GatedFeedForwardConfig,
    GatedInputStreamConfig,
    LanguageModelConfig,
    LatentAttentionConfig,
    LayerConfig,
    LayerInputsConfig,
    RMSNormConfig,
)
from .config_reader import ModelSettings, partial_rotary_of, phi3_rotary, rotaries_by_kind, rotary_of
from .latent_settings import (
    always_interleaved,
    chosen_layout,
    dense_at_first,
    dense_by_type,
    latent_attention,
    latent_rotary,
    lightning_indexer,
    routed_experts,
    shared_choices,
)
from .layer_settings import FULL, key_layers, layer_heads, layer_kinds, layer_sparsities
from .linear_settings import (
    ATTENTION_GATE,
    OLMO_HYBRID,
    QWEN3_5,
    QWEN3_NEXT,
    delta_net,
    hybrid_layers,
    kimi_delta,
    kimi_kinds,
)

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
"""Names of activations in transformers, and in our configurations."""


def configuration(given: Mapping[str, Any], ignore: Collection[str] = ()) -> LanguageModelConfig:
    """The configuration that a config.json describes.

    Raises:
        CheckpointError: another architecture; a setting that is missing, unknown or not supported.
    """
    name = given.get("model_type")
    if name not in ARCHITECTURES:
        raise CheckpointError(
            f"config.json is of a {name!r} model; LanguageModel reads {', '.join(map(repr, sorted(ARCHITECTURES)))}. "
            "Others run with regard inside through regard.huggingface.swap(model)"
        )
    architecture = ARCHITECTURES[str(name)]
    settings = ModelSettings(_renamed(given, architecture.names), architecture.defaults)
    try:
        settings.only("is_causal", True, default=True)  # of each: transformers attends both ways else, also for null
        config = architecture.read(settings)
    except CheckpointError:
        raise
    except RegardError as error:
        raise CheckpointError(f"config.json describes no {name!r} model: {error}") from None
    settings.check_all_read(ignore)
    return config


@dataclass(frozen=True)
class Architecture:
    """The mapping of an architecture's settings to a configuration, and its defaults for missing settings.

    names: those of settings in config.json that other architectures have by another name.
    """

    read: Callable[[ModelSettings], LanguageModelConfig]
    defaults: Mapping[str, Any]
    names: Mapping[str, str] = field(default_factory=dict)


def _renamed(given: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Settings by the names that they have in other architectures.

    Raises:
        CheckpointError: a setting has both names, and another value under each.
    """
    for name, other in names.items():
        if name in given and other in given and given[name] != given[other]:
            raise CheckpointError(
                f"config.json says {name}={given[name]!r} and {other}={given[other]!r}, which are one setting: leave "
                "one of them out"
            )
    return {names.get(name, name): value for name, value in given.items()}


def _llama(settings: ModelSettings) -> LanguageModelConfig:
    settings.only("pretraining_tp", 1, None)
    head_dim = _head_dim(settings)
    layer = LayerConfig(rotary=rotary_of(settings, head_dim))
    return _plain(settings, [layer] * settings.need("num_hidden_layers"), _attention(settings, head_dim))


def _mistral(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    rotary = rotary_of(settings, head_dim)
    window = None if settings.get("sliding_window") is None else _window(settings)
    settings.only("layer_types", None)  # transformers reads them of Ministral alone
    layer = LayerConfig(window, rotary=rotary)
    layers = [layer] * settings.need("num_hidden_layers")
    return _plain(settings, layers, _attention(settings, head_dim))


def _mixtral(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    settings.only("router_jitter_noise", 0.0, None)
    settings.only("attention_bias", False, None)
    settings.only("layer_types", None)
    window = None if settings.get("sliding_window") is None else _window(settings)
    layer = LayerConfig(window, rotary=rotary_of(settings, head_dim))
    experts = GatedExpertsConfig(
        settings.need("intermediate_size"),
        settings.need("num_local_experts"),
        settings.need("num_experts_per_tok"),
        _activation(settings, "hidden_act"),
    )
    layers = [layer] * settings.need("num_hidden_layers")
    return _plain(settings, layers, _attention(settings, head_dim), experts)


def _phi3(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    for name in ("resid_pdrop", "embd_pdrop"):
        settings.only(name, 0.0, None)
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, None)
    settings.only("partial_rotary_factor", 1.0, None)
    settings.only("layer_types", None)
    window = None if settings.get("sliding_window") is None else _window(settings)
    layer = LayerConfig(window, rotary=phi3_rotary(settings, head_dim))
    return _plain(settings, [layer] * settings.need("num_hidden_layers"), _attention(settings, head_dim))


def _qwen2(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, None)
    attention = _attention(settings, head_dim, bias=("query", "key", "value"))
    return _plain(settings, _qwen_layers(settings, head_dim, _last_layers_slide), attention)


def _qwen3(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    layers = _qwen_layers(settings, head_dim, _last_layers_slide)
    return _plain(settings, layers, _attention(settings, head_dim, norm=_norm(settings)))


def _qwen2_moe(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, None)
    attention = _attention(settings, head_dim, bias=("query", "key", "value") if settings.get("qkv_bias") else False)
    layers = _qwen_layers(settings, head_dim, lambda number, bound: number % 2 == 0 and number < bound)
    experts = _qwen_experts(
        settings, settings.need("num_experts"), shared_dim=settings.need("shared_expert_intermediate_size")
    )
    return _plain(settings, _with_dense_layers(settings, layers), attention, experts)


def _qwen3_moe(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    settings.only("mlp_bias", False, None)
    settings.only("layer_types", None)
    settings.get("max_window_layers")  # transformers reads it of the other Qwens alone: here all layers have the window
    window, slides = settings.get("sliding_window"), settings.get("use_sliding_window")
    layer = LayerConfig(
        _window(settings) if slides and window is not None else None, rotary=rotary_of(settings, head_dim)
    )
    count = settings.get("num_experts") or settings.get("num_local_experts", 128) or settings.need("num_experts")
    settings.only("num_local_experts", count, default=count)  # the same, by the name in transformers 5
    layers = _with_dense_layers(settings, [layer] * settings.need("num_hidden_layers"))
    attention = _attention(settings, head_dim, norm=_norm(settings))
    return _plain(settings, layers, attention, _qwen_experts(settings, count))


def _qwen3_next(settings: ModelSettings) -> LanguageModelConfig:
    experts = _qwen_experts(
        settings, settings.need("num_experts"), shared_dim=settings.need("shared_expert_intermediate_size")
    )
    return _qwen_hybrid(settings, _with_dense_layers(settings, _qwen_hybrid_layers(settings)), experts)


def _qwen3_5(settings: ModelSettings) -> LanguageModelConfig:
    return _qwen_hybrid(settings, _qwen_hybrid_layers(settings), _gated(settings))


def _qwen_hybrid_layers(settings: ModelSettings) -> list[LayerConfig]:
    full = LayerConfig(rotary=partial_rotary_of(settings, _head_dim(settings), 0.25))
    linear = LayerConfig(linear=delta_net(settings, norm_eps=settings.need("rms_norm_eps")))
    every = settings.get("full_attention_interval", 4)
    return hybrid_layers(settings, linear, full, lambda number: (number + 1) % every == 0)


def _qwen_hybrid(
    settings: ModelSettings, layers: list[LayerConfig], feed_forward: GatedExpertsConfig | GatedFeedForwardConfig
) -> LanguageModelConfig:
    """The configuration of Qwen3-Next and Qwen3.5."""
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, None)
    norm = RMSNormConfig(settings.need("rms_norm_eps"), offset=1.0)
    return LanguageModelConfig(
        **_common(settings, layers),
        attention=_attention(settings, _head_dim(settings), norm=norm, gate=ATTENTION_GATE),
        feed_forward=feed_forward,
        norm=norm,
    )


def _olmo_hybrid(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    for name in ("attention_bias", "mlp_bias"):
        settings.only(name, False, None)
    rope = settings.get("rope_parameters") or settings.get("rope_scaling")
    rotated = rope is not None and rope.get("rope_theta") is not None
    full = LayerConfig(rotary=rotary_of(settings, head_dim) if rotated else None, branch_norm=True)
    heads = settings.need("num_attention_heads")
    features = int(0.75 * settings.need("hidden_size") / (settings.get("linear_num_key_heads") or heads))
    linear = delta_net(
        settings,
        norm_eps=1e-5,
        largest=2.0 if settings.get("linear_allow_neg_eigval") else 1.0,
        defaults={
            "linear_num_key_heads": heads,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": features,
            "linear_value_head_dim": 2 * (settings.get("linear_key_head_dim") or features),
        },
    )
    last = settings.need("num_hidden_layers") - 1
    layers = hybrid_layers(
        settings,
        LayerConfig(linear=linear),
        full,
        lambda number: number % 4 == 3 or (last < 3 and number == last),
    )
    attention = _attention(settings, head_dim, norm=_norm(settings), whole_norm=True)
    return _plain(settings, layers, attention)


def _qwen_experts(settings: ModelSettings, num_experts: int, shared_dim: int | None = None) -> GatedExpertsConfig:
    return GatedExpertsConfig(
        settings.need("moe_intermediate_size"),
        num_experts,
        settings.need("num_experts_per_tok"),
        _activation(settings, "hidden_act"),
        normalized=bool(settings.get("norm_topk_prob")),
        shared_dim=shared_dim,
    )


def _with_dense_layers(settings: ModelSettings, layers: list[LayerConfig]) -> list[LayerConfig]:
    """The layers of a mixture, with a gated feed-forward network in those that are dense.

    Every `decoder_sparse_step`-th layer has experts, unless `mlp_only_layers` lists its number, which counts from 0.
    """
    step, dense = settings.need("decoder_sparse_step"), settings.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(number) is int for number in dense):
        raise CheckpointError(f"config.json says mlp_only_layers={dense!r}; it needs a list of the numbers of layers")
    feed_forward = _gated(settings)
    return [
        replace(layer, feed_forward=feed_forward) if number in dense or (number + 1) % step else layer
        for number, layer in enumerate(layers)
    ]


def _qwen_layers(settings: ModelSettings, head_dim: int, slides: Callable[[int, int], bool]) -> list[LayerConfig]:
    """The layers of Qwen 2 and 3: where windows are on, those have one of which `slides(number, max_window_layers)`."""
    layer = LayerConfig(rotary=rotary_of(settings, head_dim))
    if settings.get("use_sliding_window"):
        bound = settings.need("max_window_layers")
        return _layers(settings, layer, layer, lambda number: slides(number, bound))
    for name in ("max_window_layers", "sliding_window"):  # of no layer
        settings.get(name)
    if "sliding_attention" in (settings.get("layer_types") or ()):
        raise CheckpointError(
            "config.json's layer_types has 'sliding_attention', but use_sliding_window is false, so that transformers "
            "reads no window: set use_sliding_window to true there if these layers have one"
        )
    return _layers(settings, layer, layer, lambda number: False)


def _last_layers_slide(number: int, bound: int) -> bool:
    """Whether a layer of Qwen 2 or 3 has a window: all from `max_window_layers` on."""
    return number >= bound


def _gpt_oss(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    layer = LayerConfig(rotary=rotary_of(settings, head_dim))
    settings.only("hidden_act", "silu")
    chosen = settings.need("num_experts_per_tok")
    settings.only("experts_per_token", chosen, None)  # the same by the name in the first release
    experts = ExpertsConfig(
        settings.need("intermediate_size"),
        settings.need("num_local_experts"),
        chosen,
        alpha=settings.need("swiglu_alpha"),
        limit=settings.need("swiglu_limit"),
    )
    layers = _layers(settings, layer, layer, lambda number: number % 2 == 0)
    return _plain(settings, layers, _attention(settings, head_dim, sinks=True), experts)


def _gemma2(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    layer = LayerConfig(rotary=rotary_of(settings, head_dim))
    layers = _layers(settings, layer, layer, lambda number: number % 2 == 0)
    return _gemma(settings, layers, head_dim, query_key_norm=False)


def _gemma3(settings: ModelSettings) -> LanguageModelConfig:
    head_dim = _head_dim(settings)
    near, far = rotaries_by_kind(settings, head_dim)
    every = settings.get("sliding_window_pattern", settings.get("_sliding_window_pattern", 6))
    layers = _layers(settings, LayerConfig(rotary=near), LayerConfig(rotary=far), lambda number: (number + 1) % every)
    return _gemma(settings, layers, head_dim, query_key_norm=True)


def _gemma(
    settings: ModelSettings, layers: list[LayerConfig], head_dim: int, *, query_key_norm: bool
) -> LanguageModelConfig:
    """The configuration of Gemma 2 and 3."""
    settings.only("use_bidirectional_attention", None, False)
    settings.get("hidden_act")  # an older name, which transformers does not read for them either
    norm = RMSNormConfig(settings.need("rms_norm_eps"), offset=1.0)
    attention = _attention(
        settings,
        head_dim,
        norm=norm if query_key_norm else None,
        scale=settings.need("query_pre_attn_scalar") ** -0.5,
        softcap=settings.get("attn_logit_softcapping"),
    )
    common = _common(settings, layers)
    return LanguageModelConfig(
        **common,
        attention=attention,
        feed_forward=GatedFeedForwardConfig(
            settings.need("intermediate_size"), _activation(settings, "hidden_activation")
        ),
        norm=norm,
        sandwich=True,
        embedding_scale=common["dim"] ** 0.5,
        logit_softcap=settings.get("final_logit_softcapping"),
    )


def _gemma4(settings: ModelSettings) -> LanguageModelConfig:
    # "vision" is of image tokens alone.
    settings.only("use_bidirectional_attention", None, False, "vision")
    settings.get("vocab_size_per_layer_input")  # of no effect without inputs of layers
    kinds = [*layer_kinds(settings, every=6)[:-1], FULL]  # transformers makes the last layer full, whatever is said
    heads, readers = layer_heads(settings, kinds), key_layers(settings, kinds)
    norm = RMSNormConfig(settings.need("rms_norm_eps"))
    tied = bool(settings.get("attention_k_eq_v"))
    attention = _attention(settings, heads[0][1], norm=norm, scale=1.0, value_norm=RMSNormConfig(norm.eps, gain=False))
    feed_forward = GatedFeedForwardConfig(
        settings.need("intermediate_size"), _activation(settings, "hidden_activation")
    )
    wide = replace(feed_forward, hidden_dim=2 * feed_forward.hidden_dim)
    doubled, with_experts = bool(settings.get("use_double_wide_mlp")), _gemma4_experts(settings, norm)
    window, layers = _window(settings), []
    for kind, (kv_heads, dim), source in zip(kinds, heads, readers, strict=True):
        near, far = rotaries_by_kind(settings, dim, dim)
        full = kind == FULL
        layers.append(
            LayerConfig(
                None if full else window,
                rotary=far if full else near,
                attention=replace(attention, num_kv_heads=kv_heads, head_dim=dim, tied_values=tied and full),
                feed_forward=with_experts(wide) if doubled and source is not None else None,
                keys_from=source,
            )
        )
    inputs = None if settings.is_off("hidden_size_per_layer_input") else _layer_inputs(settings)
    return LanguageModelConfig(
        **_common(settings, layers),
        attention=attention,
        feed_forward=with_experts(feed_forward),
        norm=norm,
        sandwich=True,
        embedding_scale=settings.need("hidden_size") ** 0.5,
        logit_softcap=settings.get("final_logit_softcapping"),
        stream=GatedInputStreamConfig(inputs),
    )


def _gemma4_experts(
    settings: ModelSettings, norm: RMSNormConfig
) -> Callable[[GatedFeedForwardConfig], GatedFeedForwardConfig | DenseAndExpertsConfig]:
    """What puts experts beside a feed-forward network, where `enable_moe_block` says so."""
    names = "moe_intermediate_size", "num_experts", "top_k_experts"
    if settings.is_off("enable_moe_block"):
        for name in names:
            settings.get(name)
        return lambda dense: dense
    settings.get("enable_moe_block")
    hidden_dim, num_experts, chosen = (settings.need(name) for name in names)
    return lambda dense: DenseAndExpertsConfig(dense, hidden_dim, num_experts, chosen, dense.activation, norm)


def _gemma3n(settings: ModelSettings) -> LanguageModelConfig:
    kinds = layer_kinds(settings, every=5)
    count, head_dim, activation = len(kinds), _head_dim(settings), _activation(settings, "hidden_activation")
    near, far = rotaries_by_kind(settings, head_dim)
    norm = RMSNormConfig(settings.need("rms_norm_eps"))
    feed_forwards = [
        GatedFeedForwardConfig(size, activation, sparsity=sparsity)
        for size, sparsity in zip(
            settings.of_layers("intermediate_size", count), layer_sparsities(settings, count), strict=True
        )
    ]
    window = _window(settings)
    layers = [
        LayerConfig(
            None if kind == FULL else window,
            rotary=far if kind == FULL else near,
            feed_forward=feed_forward,
            keys_from=source,
        )
        for kind, feed_forward, source in zip(kinds, feed_forwards, key_layers(settings, kinds), strict=True)
    ]
    stream = AlternatingUpdatesConfig(
        _layer_inputs(settings),
        copies=settings.need("altup_num_inputs"),
        active=settings.need("altup_active_idx"),
        limit=settings.get("altup_coef_clip"),
        scaled=bool(settings.get("altup_correct_scale")),
    )
    return LanguageModelConfig(
        **_common(settings, layers),
        attention=_attention(settings, head_dim, norm=norm, scale=1.0, value_norm=RMSNormConfig(norm.eps, gain=False)),
        feed_forward=feed_forwards[0],
        norm=norm,
        sandwich=True,
        embedding_scale=settings.need("hidden_size") ** 0.5,
        logit_softcap=settings.get("final_logit_softcapping"),
        laurel_rank=settings.need("laurel_rank"),
        stream=stream,
    )


def _layer_inputs(settings: ModelSettings) -> LayerInputsConfig:
    """The inputs of layers of Gemma 3n and 4."""
    return LayerInputsConfig(
        settings.need("hidden_size_per_layer_input"),
        settings.need("vocab_size_per_layer_input"),
        _activation(settings, "hidden_activation"),
    )


def _deepseek_v2(settings: ModelSettings) -> LanguageModelConfig:
    for name in ("mlp_bias", "norm_topk_prob"):  # transformers divides no shares by their sum, whatever is said
        settings.only(name, False, None)
    grouped = settings.only("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    for name in ("n_group", "topk_group") if grouped else ():
        settings.need(name)
    experts = routed_experts(settings, _activation(settings, "hidden_act"), "softmax")
    if not grouped:
        experts = replace(experts, router=replace(experts.router, groups=1, chosen_groups=1))
    layer = LayerConfig(rotary=latent_rotary(settings, always_interleaved(settings)))
    layers = dense_at_first(settings, layer, _gated(settings))
    return _plain(settings, layers, latent_attention(settings), experts)


def _deepseek_v3(settings: ModelSettings) -> LanguageModelConfig:
    layer = LayerConfig(rotary=latent_rotary(settings, chosen_layout(settings)))
    layers = dense_at_first(settings, layer, _gated(settings))
    return _plain(settings, layers, latent_attention(settings), _sigmoid_experts(settings))


def _glm4_moe_lite(settings: ModelSettings) -> LanguageModelConfig:
    if settings.get("mlp_layer_types") is None:
        settings.only("first_k_dense_replace", 1)  # transformers reads no other number
    layer = LayerConfig(rotary=latent_rotary(settings, chosen_layout(settings)))
    layers = dense_by_type(settings, layer, _gated(settings))
    return _plain(settings, layers, latent_attention(settings), _sigmoid_experts(settings))


def _youtu(settings: ModelSettings) -> LanguageModelConfig:
    settings.only("mlp_bias", False, None)
    settings.get("embedding_initializer_range")  # of training
    layer = LayerConfig(rotary=latent_rotary(settings, chosen_layout(settings)))
    return _plain(settings, [layer] * settings.need("num_hidden_layers"), latent_attention(settings))


def _kimi_linear(settings: ModelSettings) -> LanguageModelConfig:
    for name in ("head_dim", "rope_theta", "rope_parameters"):  # of no effect without rotary positions
        settings.get(name)
    settings.only("rope_scaling", None)
    settings.only("mla_use_nope", True, None)
    settings.only("moe_router_activation_func", "sigmoid", None)
    settings.only("use_grouped_topk", True, None)
    kinds, linear = kimi_kinds(settings), kimi_delta(settings)
    layers = dense_by_type(settings, LayerConfig(), _gated(settings))
    layers = [
        replace(layer, linear=linear) if kind == "linear_attention" else layer
        for layer, kind in zip(layers, kinds, strict=True)
    ]
    return _plain(settings, layers, latent_attention(settings, rotated=False), _sigmoid_experts(settings))


def _deepseek_v32(settings: ModelSettings) -> LanguageModelConfig:
    return _indexed(settings, "half")


def _glm_moe_dsa(settings: ModelSettings) -> LanguageModelConfig:
    config, sources = _indexed(settings, "interleaved"), shared_choices(settings)
    layers = (replace(layer, chosen_by=source) for layer, source in zip(config.layers, sources, strict=True))
    return replace(config, layers=tuple(layers))


def _indexed(settings: ModelSettings, layout: Layout) -> LanguageModelConfig:
    """Latent attention to the keys that an indexer chooses, whose rotated features have this layout."""
    count = settings.need("num_hidden_layers")
    settings.only("layer_types", ["indexed_attention"] * count, None)
    layer = LayerConfig(rotary=latent_rotary(settings, always_interleaved(settings)))
    attention = latent_attention(settings, lightning_indexer(settings, layout))
    return _plain(settings, dense_by_type(settings, layer, _gated(settings)), attention, _sigmoid_experts(settings))


def _sigmoid_experts(settings: ModelSettings) -> GatedExpertsConfig:
    """The mixture of DeepSeek V3, and of those after it."""
    settings.only("topk_method", "noaux_tc", None)
    settings.only("mlp_bias", False, None)
    return routed_experts(settings, _activation(settings, "hidden_act"), "sigmoid")


def _plain(
    settings: ModelSettings,
    layers: list[LayerConfig],
    attention: AttentionConfig | LatentAttentionConfig,
    experts: ExpertsConfig | GatedExpertsConfig | None = None,
) -> LanguageModelConfig:
    """The configuration of Llama, and of architectures that differ from it in attention, experts and windows alone."""
    return LanguageModelConfig(
        **_common(settings, layers),
        attention=attention,
        feed_forward=_gated(settings) if experts is None else experts,
        norm=_norm(settings),
    )


def _gated(settings: ModelSettings) -> GatedFeedForwardConfig:
    return GatedFeedForwardConfig(
        settings.need("intermediate_size"), _activation(settings, "hidden_act"), bias=bool(settings.get("mlp_bias"))
    )


def _norm(settings: ModelSettings) -> RMSNormConfig:
    return RMSNormConfig(settings.need("rms_norm_eps"))


def _common(settings: ModelSettings, layers: list[LayerConfig]) -> dict[str, Any]:
    quantization = settings.get("quantization_config")
    if quantization is not None and quantization.get("quant_method") != "mxfp4":
        raise _quantised(quantization)
    return {
        "vocabulary_size": settings.need("vocab_size"),
        "dim": settings.need("hidden_size"),
        "layers": tuple(layers),
        "tied": bool(settings.get("tie_word_embeddings")),
    }


def _attention(settings: ModelSettings, head_dim: int, **more: Any) -> AttentionConfig:
    return AttentionConfig(
        settings.need("num_attention_heads"),
        settings.get("num_key_value_heads"),
        head_dim,
        dropout=settings.get("attention_dropout") or 0.0,
        **{"bias": bool(settings.get("attention_bias")), **more},
    )


def _layers(
    settings: ModelSettings, near: LayerConfig, far: LayerConfig, slides: Callable[[int], object]
) -> list[LayerConfig]:
    """The layers by `layer_types`, or by the rule of the architecture if config.json lacks it."""
    count, kinds = settings.need("num_hidden_layers"), settings.get("layer_types")
    if kinds is None:
        kinds = ["sliding_attention" if slides(number) else "full_attention" for number in range(count)]
    other = next((kind for kind in kinds if kind not in ("sliding_attention", "full_attention")), None)
    if other is not None or len(kinds) != count:
        said = f"has {other!r}" if other is not None else f"names {len(kinds)} layers"
        raise CheckpointError(
            f"config.json's layer_types {said}; it needs 'sliding_attention' or 'full_attention' for each of the "
            f"{count} layers"
        )
    if "sliding_attention" in kinds:
        near = LayerConfig(_window(settings), rotary=near.rotary)
    else:
        settings.get("sliding_window")  # of no layer
    return [near if kind == "sliding_attention" else far for kind in kinds]


def _window(settings: ModelSettings) -> int:
    """`before` of a `sliding_window`, which is one less, as the latter counts the query's own position."""
    window = settings.need("sliding_window")
    if type(window) is not int or window < 1:
        raise CheckpointError(
            f"config.json says sliding_window={window!r}; it needs a whole number of at least 1, for it counts the "
            "query's own key, or to be null where no layer has a window"
        )
    return window - 1


def _head_dim(settings: ModelSettings) -> int:
    return settings.get("head_dim") or settings.need("hidden_size") // settings.need("num_attention_heads")


def _activation(settings: ModelSettings, name: str) -> str:
    return ACTIVATIONS[settings.only(name, *ACTIVATIONS)]


def _quantised(quantization: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint is quantised, with quant_method={quantization.get('quant_method')!r}, which is not supported "
        "here: load it in transformers, call model.dequantize() and save that with save_pretrained(folder)"
    )


LLAMA = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "pretraining_tp": 1, "tie_word_embeddings": False}
GEMMA = {
    "hidden_activation": "gelu_pytorch_tanh",
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "num_key_value_heads": 4,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA_LATER = {
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 256,
    "rms_norm_eps": 1e-6,
    "sliding_window": 512,
    "tie_word_embeddings": True,
    "vocab_size_per_layer_input": 262_144,
}
GEMMA_4 = {
    **GEMMA_LATER,
    "max_position_embeddings": 131072,
    "num_key_value_heads": 4,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    },
}
QWEN_MOE = {
    "decoder_sparse_step": 1,
    "hidden_act": "silu",
    "max_position_embeddings": 32768,
    "norm_topk_prob": False,
    "rms_norm_eps": 1e-6,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
}
DEEPSEEK = {
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-6,
    "routed_scaling_factor": 2.5,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "v_head_dim": 128,
}
ARCHITECTURES = {
    "deepseek_v2": Architecture(
        _deepseek_v2,
        DEEPSEEK
        | {"first_k_dense_replace": 0, "max_position_embeddings": 2048, "moe_intermediate_size": 1407}
        | {"n_group": None, "n_routed_experts": 64, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"num_experts_per_tok": None, "routed_scaling_factor": 1.0, "topk_group": None, "topk_method": "greedy"},
    ),
    "deepseek_v3": Architecture(
        _deepseek_v3,
        DEEPSEEK | {"max_position_embeddings": 4096, "moe_intermediate_size": 2048, "rope_interleave": True},
    ),
    "deepseek_v32": Architecture(
        _deepseek_v32,
        DEEPSEEK
        | {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
        | {"max_position_embeddings": 163840, "moe_intermediate_size": 2048},
    ),
    "gemma2": Architecture(
        _gemma2,
        GEMMA | {"max_position_embeddings": 8192, "final_logit_softcapping": 30.0} | {"attn_logit_softcapping": 50.0},
    ),
    "gemma3_text": Architecture(_gemma3, GEMMA | {"max_position_embeddings": 131072}),
    "gemma3n_text": Architecture(
        _gemma3n,
        GEMMA_LATER
        | {"altup_active_idx": 0, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_num_inputs": 4}
        | {"final_logit_softcapping": 30.0, "intermediate_size": 16384, "laurel_rank": 64}
        | {"max_position_embeddings": 32768, "num_key_value_heads": 2, "num_kv_shared_layers": 15},
    ),
    "gemma4_text": Architecture(_gemma4, GEMMA_4),
    "gemma4_unified_text": Architecture(
        _gemma4,
        GEMMA_4 | {"hidden_size_per_layer_input": 0, "max_position_embeddings": 262144, "sliding_window": 1024},
    ),
    "glm4_moe_lite": Architecture(
        _glm4_moe_lite,
        DEEPSEEK
        | {"first_k_dense_replace": 1, "max_position_embeddings": 202752, "moe_intermediate_size": 1536}
        | {"n_group": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "q_lora_rank": 768}
        | {"qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "rope_interleave": True, "routed_scaling_factor": 1.8}
        | {"topk_group": 1, "v_head_dim": 256},
    ),
    "glm_moe_dsa": Architecture(
        _glm_moe_dsa,
        DEEPSEEK
        | {"index_head_dim": 128, "index_n_heads": 32, "index_skip_topk_offset": 2, "index_topk": 2048}
        | {"max_position_embeddings": 202752, "moe_intermediate_size": 2048, "n_group": 1, "q_lora_rank": 2048}
        | {"qk_nope_head_dim": 192, "rms_norm_eps": 1e-5, "topk_group": 1, "v_head_dim": 256},
    ),
    "gpt_oss": Architecture(
        _gpt_oss,
        {
            "attention_bias": True,
            "head_dim": 64,
            "hidden_act": "silu",
            "num_key_value_heads": 8,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
            | {"truncate": False},
            "rope_theta": 150000.0,
            "sliding_window": 128,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
            "tie_word_embeddings": False,
        },
    ),
    "kimi_linear": Architecture(
        _kimi_linear,
        DEEPSEEK
        | {"first_k_dense_replace": 1, "linear_conv_kernel_dim": 4, "linear_head_dim": 128, "linear_num_heads": 32}
        | {"moe_intermediate_size": 1024, "n_group": 1, "q_lora_rank": None, "rms_norm_eps": 1e-5, "topk_group": 1}
        | {"routed_scaling_factor": 2.446, "num_attention_heads": 32, "num_key_value_heads": 32},
        {
            "model_max_length": "max_position_embeddings",
            "moe_renormalize": "norm_topk_prob",
            "num_expert_group": "n_group",
            "num_experts": "n_routed_experts",
            "num_experts_per_token": "num_experts_per_tok",
            "num_shared_experts": "n_shared_experts",
        },
    ),
    "llama": Architecture(_llama, LLAMA | {"max_position_embeddings": 2048}),
    "mistral": Architecture(
        _mistral,
        LLAMA | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    ),
    "mixtral": Architecture(
        _mixtral,
        {
            "hidden_act": "silu",
            "max_position_embeddings": 131072,
            "num_experts_per_tok": 2,
            "num_key_value_heads": 8,
            "num_local_experts": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        },
    ),
    "olmo_hybrid": Architecture(_olmo_hybrid, OLMO_HYBRID),
    "phi3": Architecture(
        _phi3,
        {
            "hidden_act": "silu",
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
        },
    ),
    "qwen2": Architecture(
        _qwen2,
        LLAMA
        | {"max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096}
        | {"num_key_value_heads": 32},
    ),
    "qwen2_moe": Architecture(
        _qwen2_moe,
        QWEN_MOE
        | {"intermediate_size": 5632, "max_window_layers": 28, "moe_intermediate_size": 1408, "num_experts": 60}
        | {"num_experts_per_tok": 4, "num_key_value_heads": 16, "qkv_bias": True}
        | {"shared_expert_intermediate_size": 5632},
    ),
    "qwen3": Architecture(
        _qwen3,
        LLAMA
        | {"head_dim": 128, "max_position_embeddings": 32768, "max_window_layers": 28, "sliding_window": 4096}
        | {"num_key_value_heads": 32},
    ),
    "qwen3_5_text": Architecture(_qwen3_5, LLAMA | QWEN3_5),
    "qwen3_next": Architecture(_qwen3_next, QWEN_MOE | QWEN3_NEXT),
    "qwen3_moe": Architecture(
        _qwen3_moe,
        QWEN_MOE
        | {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8}
        | {"num_key_value_heads": 4},
    ),
    "youtu": Architecture(
        _youtu,
        {
            "hidden_act": "silu",
            "kv_lora_rank": 512,
            "max_position_embeddings": 131072,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "rms_norm_eps": 1e-6,
            "rope_interleave": True,
            "tie_word_embeddings": True,
            "v_head_dim": 128,
        },
    ),
}
