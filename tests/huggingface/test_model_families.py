"""Families that the plug takes in part: equal to eager attention, and what stays with transformers is named."""

import pytest
import torch
import transformers
from torch import Tensor, nn

import regard.huggingface

VOCABULARY, LENGTH = 61, 17
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": None, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1, "topk_group": 1}
WINDOWS = {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2}
MIXED = {"layer_types": ["linear_attention", "full_attention"] * 2}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
# By the configuration and the class of transformers: the settings, and what computes attention by itself, how often.
FAMILIES = {
    ("Qwen3NextConfig", "Qwen3NextForCausalLM"): (
        SIZES
        | EXPERTS
        | MIXED
        | {"shared_expert_intermediate_size": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        {"Qwen3NextGatedDeltaNet": 2},
    ),
    ("KimiLinearConfig", "KimiLinearForCausalLM"): (
        SIZES | LATENT | EXPERTS | MIXED | {"linear_head_dim": 8, "linear_num_heads": 4, "head_dim": 8},
        {"KimiLinearDeltaAttention": 2},
    ),
    ("OlmoHybridConfig", "OlmoHybridForCausalLM"): (SIZES | MIXED, {"OlmoHybridGatedDeltaNet": 2}),
    ("Gemma3nTextConfig", "Gemma3nForCausalLM"): (
        SIZES
        | WINDOWS
        | {"num_kv_shared_layers": 2, "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8}
        | {"laurel_rank": 4, "activation_sparsity_pattern": [0.0] * 4},
        {},
    ),
    ("Gemma4TextConfig", "Gemma4ForCausalLM"): (
        SIZES | WINDOWS | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "global_head_dim": 16},
        {},
    ),
}


def of(config: str, kind: str) -> nn.Module:
    settings, _ = FAMILIES[config, kind]
    torch.manual_seed(2)
    model = getattr(transformers, kind)._from_config(
        getattr(transformers, config)(**settings), attn_implementation="eager"
    )
    return model.eval()


@pytest.fixture(params=FAMILIES, ids=lambda names: names[1])
def pair(request) -> tuple[nn.Module, nn.Module, dict[str, int]]:
    """A model with eager attention, the same with ours, and what stays with transformers."""
    eager, ours = of(*request.param), of(*request.param)
    ours.load_state_dict(eager.state_dict())
    left = FAMILIES[request.param][1]
    report = regard.huggingface.swap(ours)
    assert len(report.replaced) == 4 - sum(left.values())
    return eager, ours, left


def tokens() -> tuple[Tensor, Tensor]:
    """Two texts, the second padded on its left."""
    ids, padding = torch.randint(3, VOCABULARY, (2, LENGTH)), torch.ones(2, LENGTH, dtype=torch.int64)
    padding[1, :6] = 0
    return ids, padding


def test_logits_are_eagers(pair, close):
    eager, ours, _ = pair
    ids, padding = tokens()
    with torch.no_grad():
        close(ours(ids), eager(ids))
        close(ours(ids, attention_mask=padding), eager(ids, attention_mask=padding), padding)


def test_steps_with_a_cache_are_eagers(pair, close):
    eager, ours, _ = pair
    ids, _ = tokens()
    with torch.no_grad():
        firsts = [model(ids[:, :-2], use_cache=True).past_key_values for model in (ours, eager)]
        for column in (-2, -1):
            here = ids[:, column].unsqueeze(1)
            close(*(model(here, past_key_values=past) for model, past in zip((ours, eager), firsts, strict=True)))


def test_weights_are_eagers(pair, close):
    eager, ours, _ = pair
    ids, _ = tokens()
    with torch.no_grad():
        found, expected = (model(ids, output_attentions=True).attentions for model in (ours, eager))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is not None:
            close(one, other)


def test_what_stays_with_transformers_has_a_line(pair):
    _, ours, left = pair
    report = regard.huggingface.swap(ours)
    counted: dict[str, int] = {}
    for name, reason in report.skipped.items():
        kind = type(ours.get_submodule(name)).__name__
        counted[kind] = counted.get(kind, 0) + 1
        assert f"  {name}: {kind} computes attention by itself" in str(report).split("\n")
        assert reason == f"{kind} computes attention by itself"
    assert counted == left


def test_the_vision_of_t5gemma2_stays_with_transformers(close):
    text = SIZES | WINDOWS | {"query_pre_attn_scalar": 8}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 8, "patch_size": 4}
    config = transformers.T5Gemma2Config(
        encoder={"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}, decoder=text
    )
    torch.manual_seed(2)
    eager = transformers.T5Gemma2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    torch.manual_seed(2)
    ours = transformers.T5Gemma2ForConditionalGeneration._from_config(config, attn_implementation="eager").eval()
    report = regard.huggingface.swap(ours)
    assert str(report).split("\n")[1:] == [
        "  model.encoder.vision_tower.head.attention: MultiheadAttention computes attention by itself"
    ]
    assert len(report.replaced) == 9
    (ids, _), (source, padding) = tokens(), tokens()
    inputs = {"input_ids": source, "attention_mask": padding, "decoder_input_ids": ids, "output_attentions": True}
    with torch.no_grad():
        found, expected = ours(**inputs), eager(**inputs)
    close(found, expected)
    for kind in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        for one, other in zip(found[kind], expected[kind], strict=True):
            close(one[1, :, 6:] if kind == "encoder_attentions" else one, other[1, :, 6:] if kind[0] == "e" else other)
