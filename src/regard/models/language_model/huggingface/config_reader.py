"""Read the settings of config.json and its rotary positions; settings that no architecture reads are refused.

Rotary positions are read in the formats of transformers 4 and 5.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from ....errors import CheckpointError
from ....positions import (
    DynamicNTK,
    LinearScaling,
    Llama3,
    LongRoPE,
    Proportional,
    Rotary,
    Scaling,
    YaRN,
    yarn_attention_factor,
)
from ....utils.numbers import lies_between

# Settings of transformers that say nothing of what a model computes from tokens: where it came from, how it was
# initialised and trained, what its tokenizer marks, what a call returns.
HARMLESS = {
    "_attn_implementation_autoset",
    "_name_or_path",
    "_sliding_window_pattern",
    "architectures",
    "bos_token_id",
    "cache_implementation",
    "chunk_size_feed_forward",
    "dtype",
    "eos_token_id",
    "id2label",
    "initial_context_length",
    "initializer_range",
    "is_encoder_decoder",
    "label2id",
    "max_position_embeddings",
    "model_type",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "pad_token_id",
    "problem_type",
    "return_dict",
    "router_aux_loss_coef",
    "torch_dtype",
    "transformers_version",
    "use_cache",
}


# Switches that are off in every architecture known here, or say nothing of what a model computes. Another one that is
# off may be on by default, and then off changes the result.
OFF_BY_DEFAULT = {
    "add_cross_attention",
    "do_sample",
    "is_decoder",
    "mlp_bias",
    "output_scores",
    "qkv_bias",
    "remove_invalid_values",
    "return_dict_in_generate",
    "rope_interleaved",
    "tf_legacy_loss",
    "tie_encoder_decoder",
    "torchscript",
    "use_bfloat16",
    "use_bidirectional_attention",
    "use_mrope",
    "use_qk_norm",
    "use_sliding_window",
}


LARGEST_SIZES = {
    "altup_num_inputs": 2**10,
    "decoder_sparse_step": 2**12,
    "global_head_dim": 2**16,
    "head_dim": 2**16,
    "index_head_dim": 2**16,
    "index_n_heads": 2**16,
    "index_topk": 2**26,
    "hidden_size": 2**20,
    "hidden_size_per_layer_input": 2**20,
    "intermediate_size": 2**24,
    "kv_lora_rank": 2**20,
    "laurel_rank": 2**20,
    "linear_conv_kernel_dim": 2**12,
    "linear_head_dim": 2**16,
    "linear_key_head_dim": 2**16,
    "linear_num_heads": 2**16,
    "linear_num_key_heads": 2**16,
    "linear_num_value_heads": 2**16,
    "linear_value_head_dim": 2**16,
    "moe_intermediate_size": 2**24,
    "n_group": 2**14,
    "n_routed_experts": 2**14,
    "n_shared_experts": 2**14,
    "num_attention_heads": 2**16,
    "num_experts": 2**14,
    "num_experts_per_tok": 2**14,
    "num_global_key_value_heads": 2**16,
    "num_hidden_layers": 2**12,
    "num_key_value_heads": 2**16,
    "num_local_experts": 2**14,
    "q_lora_rank": 2**20,
    "qk_nope_head_dim": 2**16,
    "qk_rope_head_dim": 2**16,
    "shared_expert_intermediate_size": 2**24,
    "top_k_experts": 2**14,
    "topk_group": 2**14,
    "v_head_dim": 2**16,
    "vocab_size": 2**26,
    "vocab_size_per_layer_input": 2**26,
}
"""The largest sizes that are read, far above those of any model: the sizes of all parameters fit into 64 bits."""


class ModelSettings:
    """The settings of a checkpoint's config.json over the defaults of its architecture; it tracks which are read.

    origin: the name of the file, where it is another one.
    """

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], *, origin: str = "config.json") -> None:
        self.values, self.defaults, self.origin = values, defaults, origin
        self.read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """Read a setting, or the default of the architecture, or this default.

        Raises:
            CheckpointError: a size that is no whole number, below 1 or larger than that of any model.
        """
        self.read.add(name)
        value = self.values.get(name, self.defaults.get(name, default))
        if name in LARGEST_SIZES and value is not None:
            _check_size(name, value)
        return value

    def need(self, name: str) -> Any:
        """Read a required setting.

        Raises:
            CheckpointError: it is not.
        """
        value = self.get(name)
        if value is None:
            raise CheckpointError(f"{self.origin} says nothing of {name!r}, which a {self.model_type} model needs")
        return value

    def is_off(self, name: str) -> bool:
        """Whether a setting is 0, False or null, which is then read; else `get` reads it."""
        if self.values.get(name, self.defaults.get(name)):
            return False
        self.read.add(name)
        return True

    def of_layers(self, name: str, count: int) -> list[Any]:
        """Read a required setting that is a list with a value for each layer, or one value for all.

        Raises:
            CheckpointError: it is not; another number of layers; a size that is out of range.
        """
        self.read.add(name)
        given = self.values.get(name, self.defaults.get(name))
        values = given if isinstance(given, list) else [self.need(name)] * count
        if len(values) != count:
            raise CheckpointError(
                f"config.json's {name} has {len(values)} values; it needs one for each of the {count} layers"
            )
        for value in values if name in LARGEST_SIZES else ():
            _check_size(name, value)
        return values

    def only(self, name: str, *supported: Any, default: Any = None) -> Any:
        """Read a setting of which only some values are supported.

        Raises:
            CheckpointError: it has another one.
        """
        value = self.get(name, default)
        if value not in supported:
            some = ", ".join(repr(other) for other in supported)
            raise CheckpointError(
                f"{self.origin} says {name}={value!r}, which changes what the model computes and is not supported "
                f"here; supported: {some}"
            )
        return value

    def check_all_read(self, ignore: Collection[str]) -> None:
        """Refuse settings that were not read and have an effect: neither None nor a known switch that is off.

        Raises:
            CheckpointError: there are some.
        """
        unread = self.values.keys() - self.read - HARMLESS - set(ignore)
        off = {name for name in unread & OFF_BY_DEFAULT if self.values[name] is False}
        unknown = sorted(name for name in unread - off if self.values[name] is not None)
        if unknown:
            said = ", ".join(f"{name}={self.values[name]!r}" for name in unknown)
            raise CheckpointError(
                f"{self.origin} has {len(unknown)} settings that are unknown here for a {self.model_type} model, and "
                f"may change what it computes: {said}. Name those that change nothing in ignore={tuple(unknown)}"
            )

    @property
    def model_type(self) -> str:
        """The name of the architecture in the checkpoint."""
        return str(self.values.get("model_type"))


# What transformers reads of each kind, beside its name and the base.
READ = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor", "original_max_position_embeddings"},  # the second one is not used there
    "yarn": {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"}
    | {"original_max_position_embeddings"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "longrope": {"factor", "attention_factor", "short_factor", "long_factor", "original_max_position_embeddings"},
    "proportional": {"factor"},
}
ALWAYS = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


MROPE = ("mrope_section", "mrope_interleaved")
"""How three positions of a token share the features, which are one position for text."""


def _check_size(name: str, value: Any) -> None:
    if type(value) is not int or not 1 <= value <= LARGEST_SIZES[name]:
        raise CheckpointError(
            f"config.json says {name}={str(value)[:80]}; it needs a whole number in 1..{LARGEST_SIZES[name]:,}"
        )


def rotary_of(settings: ModelSettings, head_dim: int) -> Rotary:
    """The rotary of all layers: `rope_parameters`, or `rope_theta` and `rope_scaling`."""
    rope = _rotary_settings(settings)
    return _rotary(rope, settings.get("rope_theta", 10000.0), head_dim, settings.get("max_position_embeddings"))


def yarn_score_factor(settings: ModelSettings) -> float:
    """The factor of DeepSeek's attention scores with YaRN: the square of that of `mscale_all_dim`; else 1."""
    rope = _rotary_settings(settings)
    weight = rope.get("mscale_all_dim")
    if not weight or rope.get("rope_type", rope.get("type", "default")) == "default":
        return 1.0
    return yarn_attention_factor(_needed("yarn", rope, "factor"), float(weight)) ** 2


def partial_rotary_of(settings: ModelSettings, head_dim: int, share: float) -> Rotary:
    """The rotary of all layers, of the first `partial_rotary_factor` of each head's features; without it this share."""
    rope = _rotary_settings(settings)
    for name in MROPE:
        rope.pop(name, None)
    own = rope.pop("partial_rotary_factor", None)
    share = settings.get("partial_rotary_factor", share) if own is None else own
    if not lies_between(0, share, 1) and share != 1:
        raise CheckpointError(f"config.json says partial_rotary_factor={share!r}; it needs a number above 0, at most 1")
    base, longest = settings.get("rope_theta", 10000.0), settings.get("max_position_embeddings")
    return _rotary(rope, base, int(head_dim * share), longest)


def phi3_rotary(settings: ModelSettings, head_dim: int) -> Rotary:
    """The rotary of Phi 3: its original length is a setting of its own, and "su" is an older name of "longrope"."""
    rope, original = _rotary_settings(settings), settings.get("original_max_position_embeddings")
    if rope.get("rope_type", rope.get("type")) in ("su", "yarn"):
        rope = {**rope, "rope_type": "longrope"}
    if rope.get("rope_type", rope.get("type")) == "longrope":
        rope = {"original_max_position_embeddings": original, **rope}
    return _rotary(rope, settings.get("rope_theta", 10000.0), head_dim, settings.get("max_position_embeddings"))


def rotaries_by_kind(settings: ModelSettings, head_dim: int, full_head_dim: int | None = None) -> tuple[Rotary, Rotary]:
    """The rotaries of window layers and of full layers: `rope_parameters` by kind, or the settings of Gemma 3.

    full_head_dim: of the full layers, where it differs.
    """
    rope, longest = _rotary_settings(settings), settings.get("max_position_embeddings")
    local, base = settings.get("rope_local_base_freq", 10_000.0), settings.get("rope_theta", 1_000_000.0)
    kinds = "sliding_attention", "full_attention"
    if any(kind in rope for kind in kinds):
        beside = sorted(name for name, value in rope.items() if name not in kinds and value is not None)
        if beside:
            raise CheckpointError(f"config.json's rope_parameters have {', '.join(beside)} beside those of {kinds}")
        near, far = ({**(rope.get(kind) or {})} for kind in kinds)
    else:
        near, far = {}, rope
    full_head_dim = head_dim if full_head_dim is None else full_head_dim
    return _rotary(near, local, head_dim, longest), _rotary(far, base, full_head_dim, longest)


def _rotary_settings(settings: ModelSettings) -> dict[str, Any]:
    """The settings of the rotary, from whichever of the names is present."""
    scaling, parameters = settings.get("rope_scaling"), settings.get("rope_parameters")
    return dict(scaling or parameters or settings.defaults.get("rope_parameters") or {})


def _rotary(rope: Mapping[str, Any], base: float, head_dim: int, longest: int | None) -> Rotary:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in READ:
        raise CheckpointError(
            f"config.json says rope_type={kind!r}, which is not supported here; supported: "
            f"{', '.join(repr(name) for name in sorted(READ))}"
        )
    unknown = sorted(name for name, value in rope.items() if value is not None and name not in READ[kind] | ALWAYS)
    if unknown:
        raise CheckpointError(
            f"config.json has settings of a {kind!r} rotary that are unknown here: "
            + ", ".join(f"{name}={rope[name]!r}" for name in unknown)
        )
    if kind != "proportional" and rope.get("partial_rotary_factor", 1.0) not in (None, 1.0):
        raise CheckpointError(
            f"config.json says partial_rotary_factor={rope['partial_rotary_factor']!r}, which changes what the model "
            "computes and is not supported here"
        )
    return Rotary(head_dim, float(rope.get("rope_theta") or base), scaling=_scaling(kind, rope, longest))


def _scaling(kind: str, rope: Mapping[str, Any], longest: int | None) -> Scaling | None:
    original = rope.get("original_max_position_embeddings") or longest
    match kind:
        case "default":
            return None
        case "linear":
            return LinearScaling(_needed(kind, rope, "factor"))
        case "proportional":
            return Proportional(rope.get("partial_rotary_factor", 1.0), rope.get("factor", 1.0))
        case "dynamic":
            return DynamicNTK(_needed(kind, rope, "factor"), _length(kind, longest))
        case "yarn":
            return _yarn(rope, _length(kind, original), longest)
        case "llama3":
            return Llama3(
                _needed(kind, rope, "factor"),
                _length(kind, original),
                low_frequency_factor=_needed(kind, rope, "low_freq_factor"),
                high_frequency_factor=_needed(kind, rope, "high_freq_factor"),
            )
        case _:
            length = _length(kind, original)
            return LongRoPE(
                _needed(kind, rope, "short_factor"),
                _needed(kind, rope, "long_factor"),
                length,
                rope.get("factor") or _length(kind, longest) / length,
                attention_factor=rope.get("attention_factor"),
            )


def _yarn(rope: Mapping[str, Any], original: int, longest: int | None) -> YaRN:
    factor = rope.get("factor") or _length("yarn", longest) / original
    attention_factor, weights = rope.get("attention_factor"), (rope.get("mscale"), rope.get("mscale_all_dim"))
    if attention_factor is None and all(weights):
        upper, lower = (yarn_attention_factor(factor, float(weight or 0)) for weight in weights)
        attention_factor = upper / lower
    return YaRN(
        factor,
        original,
        beta_fast=rope.get("beta_fast") or 32.0,
        beta_slow=rope.get("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=rope.get("truncate", True),
    )


def _needed(kind: str, rope: Mapping[str, Any], name: str) -> Any:
    if rope.get(name) is None:
        raise CheckpointError(f"config.json says nothing of {name!r}, which a {kind!r} rotary needs")
    return rope[name]


def _length(kind: str, length: int | None) -> int:
    if length is None:
        raise CheckpointError(f"config.json says nothing of 'max_position_embeddings', which a {kind!r} rotary needs")
    return length
