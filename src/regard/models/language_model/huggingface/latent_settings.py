"""Read the settings of DeepSeek's kinds: latent attention, its indexer, and mixtures behind some dense layers."""

from __future__ import annotations

from dataclasses import replace

from ....errors import CheckpointError
from ....positions import Rotary
from ....positions.rotary import Layout
from ..config import (
    GatedExpertsConfig,
    GatedFeedForwardConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    RouterConfig,
)
from .config_reader import ModelSettings, rotary_of, yarn_score_factor

# Of training, and of the layers that predict further tokens, which no logit of the model itself depends on.
OF_NO_EFFECT = (
    "aux_loss_alpha",
    "auto_map",
    "ep_size",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "seq_aux",
)


def latent_attention(
    settings: ModelSettings, indexer: IndexerConfig | None = None, *, rotated: bool = True
) -> LatentAttentionConfig:
    """The latent attention of all layers; the norms of latents have the eps 1e-6 there, whatever `rms_norm_eps` is.

    rotated: whether the model has rotary positions, whose dim transformers takes from `head_dim`.
    """
    for name in OF_NO_EFFECT:
        settings.get(name)
    settings.only("pretraining_tp", 1, None)
    heads = settings.need("num_attention_heads")
    settings.only("num_key_value_heads", heads, None)
    head_dim, rotary_dim = settings.need("qk_nope_head_dim"), settings.need("qk_rope_head_dim")
    if rotated:
        settings.only("head_dim", rotary_dim, None)
    settings.only("qk_head_dim", head_dim + rotary_dim, None)
    return LatentAttentionConfig(
        heads,
        settings.need("kv_lora_rank"),
        rotary_dim,
        head_dim,
        settings.need("v_head_dim"),
        settings.get("q_lora_rank"),
        bias=bool(settings.get("attention_bias")),
        scale=(head_dim + rotary_dim) ** -0.5 * (yarn_score_factor(settings) if rotated else 1.0),
        indexer=indexer,
        dropout=settings.get("attention_dropout") or 0.0,
    )


def lightning_indexer(settings: ModelSettings, layout: Layout) -> IndexerConfig:
    """The indexer of all layers, whose rotated features have this layout."""
    settings.only("indexer_rope_interleave", layout == "interleaved", None)
    return IndexerConfig(
        settings.need("index_n_heads"), settings.need("index_head_dim"), settings.need("index_topk"), layout
    )


def latent_rotary(settings: ModelSettings, layout: Layout) -> Rotary:
    """The rotary of the features that are rotated."""
    return replace(rotary_of(settings, settings.need("qk_rope_head_dim")), layout=layout)


def chosen_layout(settings: ModelSettings) -> Layout:
    """The layout by `rope_interleave`."""
    return "interleaved" if settings.need("rope_interleave") else "half"


def always_interleaved(settings: ModelSettings) -> Layout:
    """The layout of models in which transformers reads no `rope_interleave`."""
    settings.only("rope_interleave", True, None)
    return "interleaved"


def routed_experts(settings: ModelSettings, activation: str, score: str) -> GatedExpertsConfig:
    """Experts in groups, and shared ones, which are one network of their hidden dims together."""
    settings.only("scoring_func", score, None)
    settings.only("moe_layer_freq", 1, None)
    hidden_dim = settings.need("moe_intermediate_size")
    return GatedExpertsConfig(
        hidden_dim,
        settings.need("n_routed_experts"),
        settings.need("num_experts_per_tok"),
        activation,
        normalized=bool(settings.need("norm_topk_prob")),
        shared_dim=hidden_dim * settings.need("n_shared_experts"),
        shared_gate=False,
        router=RouterConfig(
            score,
            settings.get("n_group") or 1,
            settings.get("topk_group") or 1,
            float(settings.need("routed_scaling_factor")),
        ),
    )


def dense_at_first(settings: ModelSettings, layer: LayerConfig, dense: GatedFeedForwardConfig) -> list[LayerConfig]:
    """The layers, of which the first `first_k_dense_replace` have no experts."""
    count, first = settings.need("num_hidden_layers"), settings.need("first_k_dense_replace")
    if type(first) is not int or first < 0:
        raise CheckpointError(f"config.json says first_k_dense_replace={first!r}; it needs a whole number, 0 or more")
    return [replace(layer, feed_forward=dense) if number < first else layer for number in range(count)]


def dense_by_type(settings: ModelSettings, layer: LayerConfig, dense: GatedFeedForwardConfig) -> list[LayerConfig]:
    """The layers by `mlp_layer_types`, or where config.json lacks these, the first ones dense."""
    kinds, count = settings.get("mlp_layer_types"), settings.need("num_hidden_layers")
    if kinds is None:
        return dense_at_first(settings, layer, dense)
    settings.get("first_k_dense_replace")  # transformers reads it in place of the types alone
    if not isinstance(kinds, list) or len(kinds) != count or not set(kinds) <= {"dense", "sparse"}:
        raise CheckpointError(
            f"config.json says mlp_layer_types={kinds!r}; it needs 'dense' or 'sparse' for each of the {count} layers"
        )
    return [replace(layer, feed_forward=dense) if kind == "dense" else layer for kind in kinds]


def shared_choices(settings: ModelSettings) -> list[int | None]:
    """For each layer the number of the last one before it that has an indexer, where it has none itself.

    By `indexer_types`, or what transformers makes these of: a pattern, or the layers after a first few, every so often.

    Raises:
        CheckpointError: another type, types of another number of layers, or none that comes before a "shared" one.
    """
    count, kinds = settings.need("num_hidden_layers"), settings.get("indexer_types")
    pattern, every = settings.get("index_topk_pattern"), settings.get("index_topk_freq")
    offset = settings.get("index_skip_topk_offset")
    if kinds is None and pattern is not None:
        kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
    if kinds is None:
        skipped = (max(number - offset + 1, 0) % max(every or 1, 1) for number in range(count))
        kinds = ["shared" if later else "full" for later in skipped]
    if len(kinds) != count or not set(kinds) <= {"full", "shared"} or kinds[0] != "full":
        raise CheckpointError(
            f"config.json says indexer_types={kinds!r}; it needs 'full' or 'shared' for each of the {count} layers, "
            "and 'full' for the first"
        )
    last = [max(earlier for earlier in range(number + 1) if kinds[earlier] == "full") for number in range(count)]
    return [None if source == number else source for number, source in enumerate(last)]
