"""Small checkpoints of transformers with random weights, and small models of our own."""

import functools

import pytest
import torch

from regard.models.language_model import (
    AttentionConfig,
    GatedFeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerConfig,
)
from regard.positions import Rotary

VOCABULARY, WINDOW = 61, 5

# Weights large enough that attention is far from uniform, so that whatever is wrong with it shows in the logits; and
# small enough that what float32 rounds off stays below 1e-5.
COMMON = {
    "vocab_size": VOCABULARY,
    "initializer_range": 0.15,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 16,
}
ORIGINAL = {"original_max_position_embeddings": 8}
ROTARIES = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": {"rope_type": "yarn", "factor": 2.0} | ORIGINAL,
    "llama3": {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | ORIGINAL,
    "longrope": {"rope_type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]}
    | {"long_factor": [2.0, 2.5, 3.0, 3.5, 4.0, 4.5]}
    | ORIGINAL,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
# Smaller ones here: what a layer reads is normed, which raises the rounding of texts of few tokens.
HYBRID = {
    "initializer_range": 0.07,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
SHARED = {"shared_expert_intermediate_size": 28}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 14, "kv_lora_rank": 10, "v_head_dim": 5}
LATENT |= {"head_dim": 6, "qk_rope_head_dim": 6, "qk_nope_head_dim": 7, "n_routed_experts": 8, "num_experts_per_tok": 3}
LATENT |= {"moe_intermediate_size": 20, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1}
ATTENTION = {"num_key_value_heads", "q_lora_rank", "kv_lora_rank", "v_head_dim", "head_dim"}
ATTENTION |= {"qk_rope_head_dim", "qk_nope_head_dim"}
KIMI = LATENT | {"q_lora_rank": None, "num_local_experts": 8, "linear_head_dim": 8, "linear_num_heads": 3}
KIMI |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "initializer_range": 0.07}
KIMI = {name: value for name, value in KIMI.items() if name not in ("n_routed_experts", "first_k_dense_replace")}
EVEN = {"qk_nope_head_dim": 8}  # of transformers' DeepSeek V2
INDEX = {"index_topk": 5, "index_n_heads": 8, "index_head_dim": 11}  # of few heads many scores are 0, all equal
MSCALES = {"factor": 4.0, "mscale": 0.7, "mscale_all_dim": 1.3}


LATER_GEMMA = {
    "initializer_range": 0.05,  # with more layers than others have, each of which norms scale up again
    "sliding_window": WINDOW,
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size_per_layer_input": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
}
GEMMA_3N = LATER_GEMMA | {
    "laurel_rank": 5,
    "vocab_size_per_layer_input": VOCABULARY - 9,
    "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.3],
}
GEMMA_4 = LATER_GEMMA | {"global_head_dim": 16}

UNIFIED = {
    name: value for name, value in GEMMA_4.items() if "per_layer_input" not in name and name != "num_kv_shared_layers"
}
USUAL = {"layer_types": None, "activation_sparsity_pattern": None, "initializer_range": 0.03}


def scaled(name):
    return {"rope_parameters": {"rope_theta": 10000.0} | ROTARIES[name]}


# By name: the family, and what differs from COMMON.
CHECKPOINTS = {
    "llama": ("Llama", {}),
    "llama, biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, all heads": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "llama, one key head": ("Llama", {"num_key_value_heads": 1, "hidden_act": "gelu"}),
    **{f"llama, {name}": ("Llama", scaled(name)) for name in ROTARIES},
    "mistral": ("Mistral", {"sliding_window": WINDOW}),
    "mistral, no window": ("Mistral", {"sliding_window": None}),
    "deepseek_v2": ("DeepseekV2", LATENT | EVEN),
    "deepseek_v2, best groups": (
        "DeepseekV2",
        LATENT
        | EVEN
        | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 1.7, "first_k_dense_replace": 0},
    ),
    "deepseek_v2, no latent of the query, yarn": (
        "DeepseekV2",
        LATENT | EVEN | {"q_lora_rank": None, "rope_parameters": {"rope_theta": 10000.0} | ROTARIES["yarn"] | MSCALES},
    ),
    "deepseek_v3": ("DeepseekV3", LATENT),
    "deepseek_v3, biases, two shared, tied": (
        "DeepseekV3",
        LATENT | {"attention_bias": True, "n_shared_experts": 2, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
    ),
    "deepseek_v3, halves, no latent of the query, one group": (
        "DeepseekV3",
        LATENT
        | {"rope_interleave": False, "q_lora_rank": None, "n_group": 1, "topk_group": 1}
        | {"norm_topk_prob": False, "hidden_act": "gelu"},
    ),
    "deepseek_v3, yarn": (
        "DeepseekV3",
        LATENT | {"rope_parameters": {"rope_theta": 10000.0} | ROTARIES["yarn"] | MSCALES},
    ),
    "deepseek_v3, all dense": ("DeepseekV3", LATENT | {"first_k_dense_replace": 3}),
    "glm4_moe_lite": ("Glm4MoeLite", LATENT),
    "glm4_moe_lite, by type": ("Glm4MoeLite", LATENT | {"mlp_layer_types": ["sparse", "dense", "sparse"]}),
    "glm_moe_dsa": ("GlmMoeDsa", LATENT | INDEX),
    "glm_moe_dsa, shared choices": (
        "GlmMoeDsa",
        LATENT
        | INDEX
        | {"num_hidden_layers": 5, "indexer_types": ["full", "shared", "shared", "full", "shared"], "index_topk": 2},
    ),
    "kimi_linear": ("KimiLinear", KIMI),
    "kimi_linear, a latent of the query, biases": (
        "KimiLinear",
        KIMI
        | {"q_lora_rank": 14, "attention_bias": True, "n_shared_experts": 2, "norm_topk_prob": False}
        | {"mlp_layer_types": ["sparse", "dense", "sparse"], "linear_conv_kernel_dim": 3}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "youtu": ("Youtu", {name: LATENT[name] for name in LATENT if name in ATTENTION}),
    "deepseek_v32": ("DeepseekV32", LATENT | INDEX),
    "deepseek_v32, one key": ("DeepseekV32", LATENT | INDEX | {"index_topk": 1}),
    "gemma2": ("Gemma2", {"sliding_window": WINDOW, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "gemma2, untied, no caps": (
        "Gemma2",
        {"sliding_window": WINDOW, "tie_word_embeddings": False, "attn_logit_softcapping": None}
        | {"final_logit_softcapping": None},
    ),
    "gemma3": ("Gemma3", {"sliding_window": WINDOW, "query_pre_attn_scalar": 20}),
    "gemma3, all kinds": (
        "Gemma3",
        {
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
            },
        },
    ),
    "gemma3n": ("Gemma3n", GEMMA_3N),
    "gemma3n, no layer shares": (
        "Gemma3n",
        GEMMA_3N
        | {"num_kv_shared_layers": 0, "altup_active_idx": 2, "altup_num_inputs": 3, "altup_correct_scale": False}
        | {"intermediate_size": [48, 31, 20, 48, 48], "tie_word_embeddings": False}
        | {"activation_sparsity_pattern": [0.0] * 5},
    ),
    "gemma3n, usual layers": ("Gemma3n", GEMMA_3N | USUAL | {"num_hidden_layers": 12, "num_kv_shared_layers": 5}),
    "gemma3n, other rotaries": (
        "Gemma3n",
        GEMMA_3N
        | {
            "attention_bias": True,
            "vocab_size_per_layer_input": 70,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
            },
        },
    ),
    "gemma4": ("Gemma4", GEMMA_4),
    "gemma4, usual layers": ("Gemma4", GEMMA_4 | USUAL | {"num_hidden_layers": 8, "num_kv_shared_layers": 0}),
    "gemma4, no inputs of layers": (
        "Gemma4",
        GEMMA_4
        | {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0, "global_head_dim": 24}
        | {"tie_word_embeddings": False, "final_logit_softcapping": 2.0, "use_bidirectional_attention": "vision"},
    ),
    "gemma4, values are keys": (
        "Gemma4",
        GEMMA_4
        | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "num_kv_shared_layers": 0}
        | {"hidden_size_per_layer_input": 0, "hidden_activation": "silu"},
    ),
    "gemma4 unified": ("Gemma4Unified", {**UNIFIED, "attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4 unified, usual layers": ("Gemma4Unified", UNIFIED | USUAL | {"num_hidden_layers": 8}),
    "gemma4, experts": (
        "Gemma4",
        GEMMA_4
        | {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
        | {"hidden_size_per_layer_input": 0, "attention_k_eq_v": True, "num_global_key_value_heads": 1}
        | {"num_kv_shared_layers": 0},  # with shared keys transformers needs inputs of layers
    ),
    "gemma4, experts, twice as wide": (
        "Gemma4",
        GEMMA_4
        | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 12}
        | {"use_double_wide_mlp": True, "hidden_activation": "silu", "initializer_range": 0.03},
    ),
    "gemma4, all kinds": (
        "Gemma4",
        GEMMA_4
        | {
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "use_double_wide_mlp": True,
            "attention_bias": True,
            "num_kv_shared_layers": 3,
            "num_hidden_layers": 6,
            "layer_types": ["full_attention", "sliding_attention"] * 2 + ["full_attention"] * 2,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 100.0},
                "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 5000.0},
            },
        },
    ),
    "qwen3_next": ("Qwen3Next", HYBRID | EXPERTS | SHARED | {"head_dim": 16}),
    "qwen3_next, dense, grouped": (
        "Qwen3Next",
        HYBRID
        | EXPERTS
        | SHARED
        | {"head_dim": 8, "partial_rotary_factor": 0.5}
        | {"mlp_only_layers": [0, 2], "linear_num_key_heads": 1, "linear_num_value_heads": 3, "rope_theta": 100.0}
        | {"layer_types": ["full_attention", "linear_attention", "linear_attention"]},
    ),
    "qwen3_5": ("Qwen3_5", HYBRID | {"head_dim": 16, "linear_num_value_heads": 4}),
    "olmo_hybrid": ("OlmoHybrid", HYBRID | {"head_dim": 8}),
    "olmo_hybrid, rotary, grouped": (
        "OlmoHybrid",
        HYBRID
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}, "linear_allow_neg_eigval": False}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8},
    ),
    "gpt_oss": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 5, "num_experts_per_tok": 2}),
    "gpt_oss, one expert": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "mixtral, windows": ("Mixtral", {"num_local_experts": 3, "num_experts_per_tok": 3, "sliding_window": WINDOW}),
    "phi3": ("Phi3", {"pad_token_id": 0}),
    "phi3, windows, tied": ("Phi3", {"sliding_window": WINDOW, "tie_word_embeddings": True}),
    "phi3, longrope": (
        "Phi3",
        {
            "head_dim": 8,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **ORIGINAL}
            | {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 2.5, 3.0, 3.5]},
        }
        | ORIGINAL,
    ),
    "qwen2": ("Qwen2", {}),
    "qwen2, windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen2_moe": ("Qwen2Moe", EXPERTS | SHARED),
    "qwen2_moe, normalised": ("Qwen2Moe", EXPERTS | SHARED | {"norm_topk_prob": True, "qkv_bias": False}),
    "qwen2_moe, windows": (
        "Qwen2Moe",
        EXPERTS | SHARED | {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    ),
    "qwen2_moe, windows by layer_types": (
        "Qwen2Moe",
        EXPERTS
        | SHARED
        | {"use_sliding_window": True, "sliding_window": WINDOW}
        | {"layer_types": ["full_attention", "sliding_attention", "sliding_attention"]},
    ),
    "qwen2_moe, some layers dense": ("Qwen2Moe", EXPERTS | SHARED | {"decoder_sparse_step": 2, "hidden_act": "gelu"}),
    "qwen3": ("Qwen3", {}),
    "qwen3, windows": ("Qwen3", {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}),
    "qwen3_moe": ("Qwen3Moe", EXPERTS),
    "qwen3_moe, normalised, biases": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": True, "attention_bias": True}),
    "qwen3_moe, windows": ("Qwen3Moe", EXPERTS | {"use_sliding_window": True, "sliding_window": WINDOW}),
    "qwen3_moe, some layers dense": (
        "Qwen3Moe",
        EXPERTS | {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_hidden_layers": 4},
    ),
    "qwen3_moe, all chosen, tied": (
        "Qwen3Moe",
        EXPERTS | {"num_experts": 2, "tie_word_embeddings": True, "mlp_only_layers": [0, 7]},
    ),
}


def theirs(name, **changes):
    """A model of transformers, with eager attention and no weight at a value that hides a mistake."""
    transformers = pytest.importorskip("transformers")
    family, settings = CHECKPOINTS[name]
    texts = "Gemma3", "Gemma3n", "Gemma4", "Gemma4Unified", "Qwen3_5"  # whose plain name is of one with images
    kind = getattr(transformers, f"{family}TextConfig" if family in texts else f"{family}Config")
    torch.manual_seed(1)
    model = getattr(transformers, f"{family}ForCausalLM")._from_config(
        kind(**COMMON | settings | changes), attn_implementation="eager"
    )
    with torch.no_grad():
        for of, buffer in model.named_buffers():
            if of.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
        for parameter in model.parameters():
            if parameter.ndim == 1 or "bias" in str(parameter.shape) or not parameter.any():
                parameter.add_(0.3 * torch.randn_like(parameter))  # norms, biases and sinks begin all alike
        for name, buffer in model.named_buffers():
            if name.endswith("layer_scalar"):
                buffer.add_(0.3 * torch.randn_like(buffer))
        if family in texts[1:]:  # without 1/√D: norms of trained queries keep scores from rounding off more
            for name, parameter in model.named_parameters():
                if name.endswith("q_norm.weight"):
                    parameter.mul_(0.3)
    return model.eval()


@pytest.fixture
def checkpoint(tmp_path):
    """A function from a name to a model of transformers, and the folder that it was saved to."""

    def save(name, **changes):
        model = theirs(name, **changes)
        folder = tmp_path / "theirs"
        model.save_pretrained(folder)
        return model, folder

    return save


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """A function from a name to a model of transformers and ours of the same weights, neither to be changed.

    Made once for all tests, but for those whose rotary frequencies transformers stores anew as texts get longer.
    """

    def load(name):
        model, folder = theirs(name), tmp_path_factory.mktemp("theirs")
        model.save_pretrained(folder)
        return model, LanguageModel.from_huggingface(folder)

    shared = functools.cache(load)
    return lambda name: load(name) if "dynamic" in name or "longrope" in name else shared(name)


def small(layers=None, **changes):
    """A model of our own with windows, groups and everything else that is not asked for."""
    rotary = Rotary(8)
    settings = {
        "vocabulary_size": VOCABULARY,
        "dim": 32,
        "layers": layers or (LayerConfig(before=4, rotary=rotary), LayerConfig(rotary=Rotary(8, base=500.0))),
        "attention": AttentionConfig(num_heads=4, num_kv_heads=2, sinks=True, softcap=20.0),
        "feed_forward": GatedFeedForwardConfig(48),
    }
    return LanguageModel(LanguageModelConfig(**settings | changes)).eval()


@pytest.fixture
def make():
    return small
