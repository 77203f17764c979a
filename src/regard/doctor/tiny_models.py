"""Models of transformers with tiny random configurations: two layers, a dim of 32, a hundred words."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import ConfigurationError, require

VOCABULARY = 100
LAYERS = 2
_KEYS: tuple[tuple[Any, str], ...] = (
    (
        VOCABULARY,
        "vocab_size text_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size vocab_size_per_layer_input",
    ),
    (
        32,
        "hidden_size d_model n_embd dim embedding_size word_embed_proj_dim emb_dim "
        "cross_attention_hidden_size input_embedding_size lru_width attention_hidden_size "
        "moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size d_inner",
    ),
    (64, "intermediate_size ffn_dim d_ff n_inner encoder_ffn_dim decoder_ffn_dim ffn_hidden_size"),
    (
        2,
        "num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers num_decoder_layers "
        "num_encoder_layers num_blocks num_key_value_heads num_kv_heads kv_channels num_experts_per_tok "
        "moe_topk moe_k top_k_experts expert_top_k bos_token_id decoder_start_token_id "
        "linear_num_key_heads ngram",
    ),
    (
        4,
        "num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads "
        "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts "
        "num_local_experts moe_num_experts n_experts mamba_dt_rank linear_num_value_heads",
    ),
    (
        8,
        "head_dim d_kv rotary_dim swa_head_dim attention_head_dim qk_rope_head_dim qk_nope_head_dim "
        "v_head_dim swa_v_head_dim qk_head_dim mamba_n_heads mamba_d_head mamba_num_heads mamba_head_dim "
        "hidden_size_per_layer_input linear_key_head_dim linear_value_head_dim",
    ),
    (
        16,
        "kv_lora_rank q_lora_rank o_lora_rank sliding_window attention_window local_attention_window_size "
        "mamba_d_state state_size ssm_state_size index_head_dim index_topk index_n_heads",
    ),
    (
        256,
        "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions max_source_positions "
        "max_sequence_length context_length",
    ),
    (1, "n_group topk_group first_k_dense_replace pad_token_id"),
    (3, "eos_token_id"),
    (True, "is_decoder use_cache"),
    (0.0, "dropout attention_dropout"),
    (0, "num_nextn_predict_layers"),
)
SIZES = {name: value for value, names in _KEYS for name in names.split()}
"""Values of configuration keys, where a configuration has the key."""


def class_names() -> tuple[str, ...]:
    """Names of the decoder and encoder-decoder classes that transformers' automatic classes know.

    Raises:
        MissingExtra: transformers is not installed.
    """
    automatic = require("transformers.models.auto.modeling_auto", extra="huggingface")
    names: set[str] = set()
    for mapping in (
        automatic.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        automatic.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    ):
        for value in mapping.values():
            names |= {value} if isinstance(value, str) else set(value)
    return tuple(sorted(names))


KINDS_OF_LAYERS = ("layer_types", "layers_block_type", "block_types", "mlp_layer_types")
VARIATIONS: tuple[dict[str, Any], ...] = (
    {},
    {"num_key_value_heads": 4, "swa_num_key_value_heads": 4},
    {"head_dim": 8},
    dict.fromkeys(KINDS_OF_LAYERS),
    {**dict.fromkeys(KINDS_OF_LAYERS), "num_hidden_layers": 4},
    {**dict.fromkeys(KINDS_OF_LAYERS), "head_dim": None, "num_hidden_layers": None, "num_layers": None},
)
"""Changes to SIZES, tried in this order until a model runs; None leaves a key as the class has it."""
OF_CLASSES: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0}},
    "Dots1ForCausalLM": {"n_shared_experts": 1},
    "EncoderDecoderModel": {"add_cross_attention": True},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64},
    "Gemma3nForCausalLM": {"intermediate_size": 64},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"]},
    "Lfm2MoeForCausalLM": {"layer_types": ["full_attention", "conv"], "num_dense_layers": 1},
    "LongcatFlashForCausalLM": {"head_dim": 8, "qk_head_dim": 16},
    "Mamba2ForCausalLM": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "MusicgenForCausalLM": {"num_codebooks": 1, "pad_token_id": 100, "bos_token_id": 100},
    "MusicgenMelodyForCausalLM": {"num_codebooks": 1, "pad_token_id": 100, "bos_token_id": 100},
    "ReformerModelWithLMHead": {
        "axial_pos_embds": False,
        "attn_layers": ["local", "lsh"],
        "attention_head_size": 8,
        "num_buckets": 4,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "XmodForCausalLM": {"default_language": "en_XX"},
    "Zamba2ForCausalLM": {"attention_head_dim": 16, "attention_hidden_size": 64},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
"""Values that some classes need instead of those of SIZES."""


def tiny_config(config_class: type, changes: Mapping[str, Any] | None = None) -> Any:
    """A configuration of the class with the values of SIZES, and of its parts."""
    plain, changes = config_class(), changes or {}
    aliases = getattr(config_class, "attribute_map", {})
    known = {*inspect.signature(config_class.__init__).parameters, *vars(plain), *aliases}
    chosen: dict[str, Any] = {name: value for name, value in SIZES.items() if name in known and _is_wanted(plain, name)}
    for name in KINDS_OF_LAYERS:
        value = getattr(plain, name, None)
        is_computed = isinstance(getattr(config_class, aliases.get(name, name), None), property)
        if isinstance(value, list) and value and isinstance(value[0], str) and not is_computed:
            chosen[name] = [*dict.fromkeys(value), *value][:LAYERS]  # of different kinds, where there are any
    for name, value in vars(plain).items():
        if hasattr(value, "to_dict") and hasattr(type(value), "model_type"):
            chosen[name] = tiny_config(type(value), changes).to_dict()
    for name, value in changes.items():
        if value is None:
            chosen.pop(name, None)
        elif name in known:
            chosen[name] = value
    for alias, name in aliases.items():
        if alias in chosen and name in chosen:
            del chosen[alias]
    return config_class(**chosen)


def _is_wanted(plain: Any, name: str) -> bool:
    """Whether a configuration has a number under this name: None stays, as a mechanism that is off."""
    try:
        present = getattr(plain, name, None)
    except Exception:  # a number of each layer
        return False
    if present is None and name in ("sliding_window", "q_lora_rank", "rotary_dim", "n_inner", "head_dim"):
        return False
    return not isinstance(present, (list, dict))


def tiny_model(name: str) -> nn.Module:
    """A class of transformers with a tiny random configuration, in evaluation.

    Matrices have random numbers of variance 1 / inputs, more than most configurations prescribe, so that attention is
    not uniform.

    Raises:
        ConfigurationError: there is no such class, or it cannot be constructed from a tiny configuration.
    """
    transformers = require("transformers", extra="huggingface")
    model_class = getattr(transformers, name, None)
    if model_class is None or getattr(model_class, "config_class", None) is None:
        raise ConfigurationError(f"transformers has no model class {name!r}")
    failure = ""
    for variation in VARIATIONS:
        changes = {**variation, **OF_CLASSES.get(name, {})}
        torch.manual_seed(0)
        try:
            with warnings.catch_warnings(), torch.no_grad():
                warnings.simplefilter("ignore")
                model = model_class(tiny_config(model_class.config_class, changes)).eval()
                strengthen(model)
                ids = torch.arange(20, 28)[None]
                model(ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}))
                return model
        except Exception as error:
            first = (str(error).strip().splitlines() or [""])[0][:160]
            failure = failure or f"{type(error).__name__}: {first}"
    raise ConfigurationError(f"{name} has no tiny configuration: {failure}")


def strengthen(model: nn.Module) -> None:
    """Draw the matrices of a model again, with variance 1 / inputs, and embeddings with variance 1.

    Tables of sines stay, which are embeddings in some models.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.Embedding) and "Sinusoidal" not in type(module).__name__:
                module.weight.copy_(torch.randn(module.weight.shape, generator=generator))
        for module in model.modules():
            weight = getattr(module, "weight", None)
            is_linear = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
            if is_linear and isinstance(weight, torch.Tensor) and weight.ndim == 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * max(weight.shape[1], 1) ** -0.5)
