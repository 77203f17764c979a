"""Small models of transformers with random weights: a pair of each, one with eager attention, one with ours."""

import copy

import pytest
import torch

import regard.huggingface

pytest.importorskip("transformers")
import transformers

VOCABULARY, WINDOW = 61, 5

# Weights large enough that attention is far from uniform: whatever is wrong with it shows in the logits.
COMMON = {"vocab_size": VOCABULARY, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = COMMON | {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
ALTERNATING = ["sliding_attention", "full_attention"]
GEMMA = DECODER | {"sliding_window": WINDOW, "query_pre_attn_scalar": 8, "tie_word_embeddings": False}
T5GEMMA = GEMMA | {"layer_types": ALTERNATING, "attn_logit_softcapping": 2.0}
GRANITE = DECODER | {"sliding_window": WINDOW, "attention_multiplier": 8**-0.5}
PLAIN_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0}
SEQ2SEQ = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
    "init_std": 0.3,
}

MODELS = {
    "llama": ("Llama", "ForCausalLM", DECODER),
    "mistral": ("Mistral", "ForCausalLM", DECODER | {"sliding_window": WINDOW}),
    "gemma2": ("Gemma2", "ForCausalLM", GEMMA | {"attn_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", "ForCausalLM", GEMMA | {"layer_types": ALTERNATING}),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        DECODER
        | {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1, "rope_parameters": PLAIN_ROTARY},
    ),
    "llama4": (
        "Llama4",
        "ForCausalLM",
        DECODER
        | {"attention_chunk_size": 4, "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0]}
        | {"num_local_experts": 2, "intermediate_size_mlp": 48},
    ),
    "deepseek_v3": (
        "DeepseekV3",
        "ForCausalLM",
        DECODER
        | {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 12}
        | {"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "moe_intermediate_size": 16, "n_routed_experts": 2}
        | {"num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
    ),
    "qwen3": ("Qwen3", "ForCausalLM", DECODER),
    "granite_swa": ("GraniteSWA", "ForCausalLM", GRANITE),
    "granitemoe_swa": (
        "GraniteMoeSWA",
        "ForCausalLM",
        GRANITE | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "bert": (
        "Bert",
        "Model",
        COMMON | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    ),
    "modernbert": (
        "ModernBert",
        "Model",
        COMMON
        | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"local_attention": 6, "layer_types": ALTERNATING},
    ),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        COMMON
        | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
        | {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "dropout_rate": 0.0},
    ),
    "t5gemma": (
        "T5Gemma",
        "ForConditionalGeneration",
        {"vocab_size": VOCABULARY, "tie_word_embeddings": False, "initializer_range": 0.3}
        | {"encoder": T5GEMMA, "decoder": T5GEMMA | {"num_key_value_heads": 4}},
    ),
    "bart": ("Bart", "ForConditionalGeneration", COMMON | SEQ2SEQ),
    "marian": ("Marian", "MTModel", COMMON | SEQ2SEQ | {"pad_token_id": 60}),
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        COMMON | SEQ2SEQ | {"num_mel_bins": 8, "max_source_positions": 7, "max_target_positions": 40},
    ),
}
TRANSLATORS = ("t5", "t5gemma", "bart", "marian", "whisper")
ROUNDINGS = 48
"""How many roundings of float32, of the largest number, results and weights of these models may be from the exact ones.

Eager's own and ours are up to 30 away from those in float64, over all models, variants of the native code and vector
instructions of torch (`test_the_output_is_eagers`); a mask, position or scale that is wrong moves them by thousands.
"""


def eager(name, **changes):
    family, kind, settings = MODELS[name]
    config = getattr(transformers, f"{family}TextConfig" if name in ("gemma3", "llama4") else f"{family}Config")
    torch.manual_seed(1)
    return (
        getattr(transformers, family + kind)
        ._from_config(config(**settings | changes), attn_implementation="eager")
        .eval()
    )


@pytest.fixture
def pair():
    """A function from the name of a model to two of the same weights: (eager's, ours)."""

    def make(name, **changes):
        model = eager(name, **changes)
        ours = copy.deepcopy(model)
        swapped = regard.huggingface.swap(ours)
        assert swapped.replaced
        assert not swapped.skipped
        return model, ours

    return make


@pytest.fixture
def ask():
    """A function from the name of a model to what it is called with: two sequences of 13 tokens, no padding."""

    def make(name, length=13):
        tokens = torch.randint(3, VOCABULARY - 1, (2, length))
        if name == "whisper":
            return {"input_features": torch.randn(2, 8, 14), "decoder_input_ids": tokens}
        if name in TRANSLATORS:
            return {"input_ids": torch.randint(3, VOCABULARY - 1, (2, 11)), "decoder_input_ids": tokens}
        return {"input_ids": tokens}

    return make


def result(outputs):
    """What a model computes: logits, or the last hidden states."""
    return outputs.logits if "logits" in outputs else outputs.last_hidden_state


def in_float64(model):
    """A copy of a model that computes in float64."""
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # torch's grouped product has no float64
    return exact


@pytest.fixture
def exactly():
    """A function from a model and what it is called with to what it returns in float64."""

    def compute(model, **inputs):
        wide = {key: each.double() if key == "input_features" else each for key, each in inputs.items()}
        return in_float64(model)(**wide)

    return compute


@pytest.fixture
def close():
    """Compare what two models return, or tensors of them, where `at` says which tokens count.

    Within ROUNDINGS of what is computed in float64; of two in float32 each may be so far from it.
    """

    def check(ours, theirs, at=None):
        ours, theirs = (result(outputs) if hasattr(outputs, "keys") else outputs for outputs in (ours, theirs))
        if at is not None:
            ours, theirs = ours[at.bool()], theirs[at.bool()]
        roundings = ROUNDINGS * (1 if theirs.dtype == torch.float64 else 2)
        allowed = roundings * torch.finfo(torch.float32).eps * float(theirs.abs().max())
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=0, atol=allowed)

    return check
