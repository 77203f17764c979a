"""transformers' own models, eager, with the same weights: the same logits, also with padding and a cache."""

import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard import masks
from regard.errors import CheckpointError
from regard.lenses import Weights
from regard.models import LanguageModel
from regard.models.language_model import (
    AttentionConfig,
    GatedExpertsConfig,
    GatedFeedForwardConfig,
    LatentAttentionConfig,
    LayerConfig,
    RMSNormConfig,
    RouterConfig,
)
from regard.models.language_model.huggingface.architectures import configuration
from regard.positions import Rotary, YaRN

from .conftest import CHECKPOINTS, ROTARIES, VOCABULARY

LENGTH = 23  # longer than the windows, and than what the rotary scalings call the original length

every = pytest.mark.parametrize("name", CHECKPOINTS)


def close(ours, theirs):
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def text(batch=2, length=LENGTH):
    return torch.randint(3, VOCABULARY, (batch, length))


@every
@torch.no_grad()
def test_logits_are_theirs(name, pair):
    model, ours = pair(name)
    tokens = text()
    close(ours(tokens), model(tokens).logits)


@every
@pytest.mark.parametrize("length", [1, 3])
@torch.no_grad()
def test_logits_of_short_texts_are_theirs(name, length, pair):
    model, ours = pair(name)
    tokens = text(length=length)
    close(ours(tokens), model(tokens).logits)


@every
@torch.no_grad()
def test_prefill_and_decode_are_theirs(name, pair):
    model, ours = pair(name)
    tokens = text()
    cache, past = ours.make_cache(), None
    for part in tokens.split([11, 1, 1, 7, 1, 1, 1], dim=1):
        logits, cache = ours.step(part, cache)
        output = model(part, past_key_values=past, use_cache=True)
        past = output.past_key_values
        close(logits, output.logits)


@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "dynamic" not in name and "longrope" not in name])
@torch.no_grad()
def test_steps_are_the_whole(name, pair):
    _, ours = pair(name)
    tokens = text()
    cache, outputs = ours.make_cache(), []
    for part in tokens.split([11, 1, 1, 7, 1, 1, 1], dim=1):
        logits, cache = ours.step(part, cache)
        outputs.append(logits)
    close(torch.cat(outputs, 1), ours(tokens))


# With padding on the left transformers counts positions from the padding on, we from the text on: scalings that read
# how long the sequence is differ, and no other.
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if "dynamic" not in name and "longrope" not in name])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_padded_logits_are_theirs(name, side, pair):
    model, ours = pair(name)
    tokens, lengths = text(batch=3), torch.tensor([LENGTH, 9, 1])
    at = torch.arange(LENGTH)
    exists = at >= LENGTH - lengths[:, None] if side == "left" else at < lengths[:, None]
    tokens = tokens.masked_fill(~exists, 0)
    if side == "left":
        logits = ours(tokens, mask=~masks.prefix(0), positions=at - LENGTH + lengths[:, None])
    else:
        logits = ours(tokens, mask=masks.padding(lengths=lengths))
    close(logits[exists], model(tokens, attention_mask=exists.long()).logits[exists])


# transformers' generate computes the whole cache of a Phi 3 anew at the step where its text outgrows the original
# length; a cache here has the keys as they were rotated, as in transformers' own steps with a cache.
@pytest.mark.parametrize("name", [name for name in CHECKPOINTS if name != "phi3, longrope"])
@torch.no_grad()
def test_greedy_text_is_theirs(name, pair):
    model, ours = pair(name)
    tokens = text(length=7)
    expected = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    found = list(ours.generate(tokens, 12))
    assert torch.stack(found, 1).tolist() == expected[:, 7:].tolist()


def greedy_theirs(model, tokens, count):
    """Greedy tokens by transformers' own steps with a cache, without its `generate`."""
    output, chosen = model(tokens, use_cache=True), []
    for _ in range(count):
        chosen.append(output.logits[:, -1].argmax(-1))
        output = model(chosen[-1][:, None], past_key_values=output.past_key_values, use_cache=True)
    return torch.stack(chosen, 1)


@torch.no_grad()
def test_longrope_that_outgrows_its_original_length_while_it_generates(checkpoint):
    """Tokens are those of transformers' steps; its `generate` reads the text again where it outgrows the length of 8.

    So its tokens are the same up to that step, and here differ after it; with a longer prompt they are all the same.
    """
    model, folder = checkpoint("phi3, longrope")
    ours = LanguageModel.from_huggingface(folder)
    for length in (5, 12):
        tokens = text(batch=8, length=length)
        found = torch.stack(list(ours.generate(tokens, 12)), 1)
        assert found.tolist() == greedy_theirs(model, tokens, 12).tolist()
        there = model.generate(
            tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=12, do_sample=False, eos_token_id=None
        )[:, length:]
        crossing = max(8 - length, -1) + 1  # tokens drawn before the text has more than 8
        assert found[:, :crossing].tolist() == there[:, :crossing].tolist()
        assert torch.equal(found, there) == (length > 8)


@pytest.mark.parametrize("name", ["mistral", "gemma3n", "gemma4"])
@torch.no_grad()
def test_greedy_text_of_a_padded_batch_is_theirs(name, pair):
    model, ours = pair(name)
    tokens, lengths = text(batch=3, length=9), torch.tensor([9, 4, 1])
    exists = torch.arange(9) >= 9 - lengths[:, None]
    tokens = tokens.masked_fill(~exists, 0)
    expected = model.generate(
        tokens, attention_mask=exists.long(), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found = list(ours.generate(tokens, 10, lengths=lengths))
    assert torch.stack(found, 1).tolist() == expected[:, 9:].tolist()


@pytest.mark.parametrize(
    "name",
    [
        *("mistral", "gpt_oss", "gemma2", "gemma3n", "gemma4, all kinds"),
        *("deepseek_v2", "deepseek_v3, yarn", "deepseek_v32", "glm_moe_dsa", "youtu"),
    ],
)
@torch.no_grad()
def test_weights_are_theirs(name, pair):
    model, ours = pair(name)
    tokens, weights = text(), Weights()
    seen = ours.observe(tokens, weights)
    expected = model(tokens, output_attentions=True)
    close(seen.logits, expected.logits)
    assert len(seen[weights]) == len(expected.attentions)
    for ours, theirs in zip(seen[weights], expected.attentions, strict=True):
        close(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
@torch.no_grad()
def test_parts_of_a_checkpoint_are_put_together(name, checkpoint, tmp_path):
    model, _ = checkpoint(name)
    model.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    tokens = text()
    close(LanguageModel.from_huggingface(tmp_path / "parts")(tokens), model(tokens).logits)


@torch.no_grad()
def test_numbers_keep_their_dtype_or_get_another(checkpoint):
    model, folder = checkpoint("llama")
    model.bfloat16().save_pretrained(folder)
    model = type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    tokens = text()
    ours = LanguageModel.from_huggingface(folder)
    assert {parameter.dtype for parameter in ours.parameters()} == {torch.bfloat16}
    assert ours(tokens).isfinite().all()
    wide = LanguageModel.from_huggingface(folder, dtype=torch.float32)
    close(wide(tokens), model(tokens).logits)


@pytest.mark.parametrize("name", ROTARIES)
@torch.no_grad()
def test_rotaries_in_the_words_of_transformers_4(name, checkpoint):
    model, folder = checkpoint(f"llama, {name}")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    told = config.pop("rope_parameters")
    config |= {"rope_theta": told.pop("rope_theta"), "rope_scaling": {"type": told.pop("rope_type"), **told}}
    path.write_text(json.dumps(config))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@torch.no_grad()
def test_rotaries_in_the_words_of_the_first_gemma_3(checkpoint):
    model, folder = checkpoint("gemma3, all kinds")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5000.0, "rope_local_base_freq": 100.0}
    config |= {"rope_scaling": {"rope_type": "linear", "factor": 3.0}}
    path.write_text(json.dumps(config))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@pytest.mark.parametrize(
    ("name", "gone"),
    [
        ("llama", ["hidden_act", "rms_norm_eps", "attention_bias", "mlp_bias", "tie_word_embeddings"]),
        ("gemma2, untied, no caps", ["hidden_activation", "layer_types", "rms_norm_eps"]),
        ("gpt_oss", ["layer_types", "swiglu_alpha", "swiglu_limit", "attention_bias", "rope_parameters"]),
        ("gemma3", ["layer_types", "hidden_activation", "tie_word_embeddings"]),
        ("deepseek_v2", ["topk_method", "routed_scaling_factor", "n_shared_experts", "norm_topk_prob", "n_group"]),
        (
            "deepseek_v3",
            ["rope_interleave", "norm_topk_prob", "hidden_act", "n_shared_experts", "routed_scaling_factor"],
        ),
        ("deepseek_v3", ["head_dim", "qk_head_dim", "attention_bias", "rms_norm_eps", "tie_word_embeddings"]),
        ("deepseek_v32", ["layer_types", "mlp_layer_types", "rms_norm_eps", "hidden_act", "norm_topk_prob"]),
        ("glm4_moe_lite", ["mlp_layer_types", "rope_interleave", "rms_norm_eps", "routed_scaling_factor"]),
        ("glm_moe_dsa", ["indexer_types", "layer_types", "mlp_layer_types", "rms_norm_eps", "routed_scaling_factor"]),
        ("youtu", ["rope_interleave", "tie_word_embeddings", "hidden_act", "rms_norm_eps"]),
        ("gemma3n", ["altup_active_idx", "altup_coef_clip", "altup_correct_scale", "altup_num_inputs"]),
        ("gemma3n", ["final_logit_softcapping", "hidden_activation", "rms_norm_eps", "rope_parameters"]),
        ("gemma3n, usual layers", ["activation_sparsity_pattern", "layer_types", "tie_word_embeddings"]),
        ("gemma4", ["attention_k_eq_v", "hidden_activation", "rms_norm_eps", "rope_parameters", "use_double_wide_mlp"]),
        ("gemma4, usual layers", ["layer_types", "num_kv_shared_layers", "enable_moe_block"]),
        ("gemma4 unified, usual layers", ["layer_types", "num_kv_shared_layers", "use_bidirectional_attention"]),
        ("qwen3", ["layer_types", "tie_word_embeddings", "sliding_window", "use_sliding_window"]),
        ("qwen2_moe", ["layer_types", "mlp_only_layers", "norm_topk_prob", "qkv_bias", "sliding_window"]),
        ("qwen3_moe", ["decoder_sparse_step", "mlp_only_layers", "norm_topk_prob", "sliding_window"]),
    ],
)
@torch.no_grad()
def test_what_config_json_leaves_out_is_what_transformers_takes(name, gone, checkpoint):
    model, folder = checkpoint(name)
    path = folder / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in config.items() if key not in gone}))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@torch.no_grad()
def test_heads_of_full_layers_in_the_words_of_the_first_gemma_4(checkpoint):
    model, folder = checkpoint("gemma4, all kinds")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    del config["per_layer_config"]
    path.write_text(json.dumps(config | {"global_head_dim": 16, "num_global_key_value_heads": 1}))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)
    # Without attention_k_eq_v transformers does not read the key heads of full layers.
    plain = {"attention_k_eq_v": False, "global_head_dim": 16, "num_global_key_value_heads": 1}
    attention = [layer.attention for layer in configuration(config | plain).layers]
    assert {(one.num_kv_heads, one.head_dim) for one in attention if isinstance(one, AttentionConfig)} == {
        (2, 12),
        (2, 16),
    }


@pytest.mark.parametrize("name", ["gemma3n", "gemma4"])
@torch.no_grad()
def test_keys_that_no_layer_reads_are_passed_over(name, checkpoint):
    """Released files hold keys and values of layers that read those of another, and transformers drops them."""
    safetensors = pytest.importorskip("safetensors.torch")
    model, folder = checkpoint(name)
    tensors = safetensors.load_file(folder / "model.safetensors")
    extra = [f"model.layers.4.self_attn.{part}.weight" for part in ("k_proj", "v_proj", "k_norm", "v_norm")]
    assert not tensors.keys() & set(extra)
    safetensors.save_file(tensors | {part: torch.randn(3) for part in extra}, folder / "model.safetensors")
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@pytest.mark.parametrize("both", [False, True])
@torch.no_grad()
def test_the_number_of_experts_by_both_names(both, checkpoint):
    model, folder = checkpoint("qwen3_moe, windows")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["num_experts"] = config["num_local_experts"] if both else config.pop("num_local_experts")
    config["max_window_layers"] = 1  # saved by transformers 4, and read of the dense Qwens alone
    path.write_text(json.dumps(config))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


RELEASED = {
    "Qwen1.5-MoE-A2.7B": {
        "model_type": "qwen2_moe",
        "decoder_sparse_step": 1,
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "max_position_embeddings": 8192,
        "max_window_layers": 21,
        "moe_intermediate_size": 1408,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "num_hidden_layers": 24,
        "num_key_value_heads": 16,
        "rope_theta": 1000000.0,
        "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768,
        "use_sliding_window": False,
    },
    "Qwen3-30B-A3B": {
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 128,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "max_position_embeddings": 40960,
        "max_window_layers": 48,
        "mlp_only_layers": [],
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "num_attention_heads": 32,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 48,
        "num_key_value_heads": 4,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": None,
        "use_sliding_window": False,
    },
}
RELEASED |= {
    "DeepSeek-V3": {
        "model_type": "deepseek_v3",
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "ep_size": 1,
        "first_k_dense_replace": 3,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 2048,
        "moe_layer_freq": 1,
        "n_group": 8,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 128,
        "num_experts_per_tok": 8,
        "num_hidden_layers": 61,
        "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
        | {"original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "topk_group": 4,
        "topk_method": "noaux_tc",
        "v_head_dim": 128,
    },
    "DeepSeek-V2-Lite": {
        "model_type": "deepseek_v2",
        "aux_loss_alpha": 0.001,
        "first_k_dense_replace": 1,
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "kv_lora_rank": 512,
        "max_position_embeddings": 163840,
        "moe_intermediate_size": 1408,
        "moe_layer_freq": 1,
        "n_group": 1,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
        "num_attention_heads": 16,
        "num_experts_per_tok": 6,
        "num_hidden_layers": 27,
        "num_key_value_heads": 16,
        "pretraining_tp": 1,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
        | {"original_max_position_embeddings": 4096, "type": "yarn"},
        "rope_theta": 10000,
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "seq_aux": True,
        "topk_group": 1,
        "topk_method": "greedy",
        "v_head_dim": 128,
    },
}
ALL_RELEASED = {
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "output_router_logits": False,
    "rms_norm_eps": 1e-6,
    "router_aux_loss_coef": 0.001,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 151936,
}


@pytest.mark.parametrize(
    ("name", "layers", "attention", "experts"),
    [
        (
            "Qwen1.5-MoE-A2.7B",
            (LayerConfig(rotary=Rotary(128, 1e6)),) * 24,
            AttentionConfig(16, 16, 128, bias=("query", "key", "value")),
            GatedExpertsConfig(1408, 60, 4, normalized=False, shared_dim=5632),
        ),
        (
            "Qwen3-30B-A3B",
            (LayerConfig(rotary=Rotary(128, 1e6)),) * 48,
            AttentionConfig(32, 4, 128, norm=RMSNormConfig(1e-6)),
            GatedExpertsConfig(768, 128, 8),
        ),
    ],
)
def test_the_settings_of_released_mixtures(name, layers, attention, experts):
    config = configuration(ALL_RELEASED | RELEASED[name])
    assert (config.layers, config.attention, config.feed_forward) == (layers, attention, experts)
    assert (config.dim, config.norm, config.tied) == (2048, RMSNormConfig(1e-6), False)


@pytest.mark.parametrize(
    ("name", "layers", "dense", "weight", "latent", "experts"),
    [
        (
            "DeepSeek-V3",
            61,
            (3, 18432),
            1.0,
            {"num_heads": 128, "query_latent_dim": 1536},
            GatedExpertsConfig(
                2048, 256, 8, shared_dim=2048, shared_gate=False, router=RouterConfig("sigmoid", 8, 4, 2.5)
            ),
        ),
        (
            "DeepSeek-V2-Lite",
            27,
            (1, 10944),
            0.707,
            {"num_heads": 16},
            GatedExpertsConfig(
                1408, 64, 6, normalized=False, shared_dim=2816, shared_gate=False, router=RouterConfig("softmax")
            ),
        ),
    ],
)
def test_the_settings_of_released_latent_attention(name, layers, dense, weight, latent, experts):
    """The score of two heads of 192 features, with YaRN's factor: (0.1 · weight · ln 40 + 1)² / √192."""
    config, (first, hidden_dim) = configuration(ALL_RELEASED | RELEASED[name]), dense
    rotary = Rotary(64, 10000.0, "interleaved", YaRN(40, 4096, attention_factor=1.0))
    layer = LayerConfig(rotary=rotary)
    assert config.layers == (replace(layer, feed_forward=GatedFeedForwardConfig(hidden_dim)),) * first + (layer,) * (
        layers - first
    )
    scale = config.attention.scale
    assert scale == pytest.approx((0.1 * weight * math.log(40) + 1) ** 2 / math.sqrt(192), rel=1e-12)
    sizes = {"latent_dim": 512, "rotary_dim": 64, "head_dim": 128, "value_dim": 128}
    assert config.attention == LatentAttentionConfig(**sizes, scale=scale, **latent)
    assert config.feed_forward == experts


@torch.no_grad()
def test_kimi_linear_in_the_words_of_its_release(checkpoint):
    model, folder = checkpoint("kimi_linear")
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for name in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"):
        del config[name]
    config |= {"linear_attn_config": {"full_attn_layers": [2], "kda_layers": [1, 3], "head_dim": 8, "num_heads": 3}}
    config["linear_attn_config"]["short_conv_kernel_size"] = 4
    config |= {"mla_use_nope": True, "rope_theta": 10000.0, "rope_scaling": None, "use_grouped_topk": True}
    config |= {"moe_router_activation_func": "sigmoid", "moe_layer_freq": 1, "first_k_dense_replace": 1, "head_dim": 72}
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@torch.no_grad()
def test_layers_that_predict_further_tokens_are_left_out(checkpoint):
    safetensors = pytest.importorskip("safetensors.torch")
    model, folder = checkpoint("deepseek_v3")
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    extra = {f"model.layers.3.{name}.weight": torch.randn(3) for name in ("eh_proj", "self_attn.q_a_proj", "enorm")}
    safetensors.save_file(tensors | extra, path)
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)
    config = json.loads((folder / "config.json").read_text()) | {"num_nextn_predict_layers": 0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"3 extra \(model.layers.3.eh_proj.weight"):
        LanguageModel.from_huggingface(folder)


def test_the_correction_of_a_router_stays_in_float32(checkpoint):
    model, folder = checkpoint("deepseek_v3")
    model.bfloat16()
    correction = model.model.layers[1].mlp.gate.e_score_correction_bias
    correction.data = correction.data.float() + 2**-12
    model.save_pretrained(folder)
    ours: Any = LanguageModel.from_huggingface(folder)
    assert torch.equal(ours.blocks[1].feed_forward.router.correction, correction)
    assert {value.dtype for name, value in ours.state_dict().items() if "correction" not in name} == {torch.bfloat16}
    with torch.no_grad():
        assert ours(text()).isfinite().all()


MXFP4 = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


@torch.no_grad()
def test_experts_in_four_bits_are_their_numbers(checkpoint):
    """Each packed number is exact in float32, so logits are those of transformers with the same numbers."""
    unpack = pytest.importorskip("transformers.integrations.mxfp4").convert_moe_packed_tensors
    safetensors = pytest.importorskip("safetensors.torch")
    model, folder = checkpoint("gpt_oss", hidden_size=64, intermediate_size=32)
    path = folder / "model.safetensors"
    tensors = safetensors.load_file(path)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, dim, out = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, out, dim // 32, 16), dtype=torch.uint8)
        scales = torch.randint(118, 124, (experts, out, dim // 32), dtype=torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        model.get_parameter(name).copy_(unpack(blocks, scales, dtype=torch.float32))
    safetensors.save_file(tensors, path)
    config = json.loads((folder / "config.json").read_text()) | MXFP4
    (folder / "config.json").write_text(json.dumps(config))
    tokens = text()
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


def test_what_drops_in_training_is_read(checkpoint):
    _, folder = checkpoint("llama", attention_dropout=0.25)
    ours: Any = LanguageModel.from_huggingface(folder)
    assert [block.attention.dropout for block in ours.blocks] == [0.25] * 3
    assert not ours.training


@torch.no_grad()
def test_convolutions_of_olmo_hybrid_are_read_together_and_apart(checkpoint):
    safetensors = pytest.importorskip("safetensors.torch")
    model, folder = checkpoint("olmo_hybrid")
    tokens, file = text(), folder / "model.safetensors"
    stored = safetensors.load_file(file)
    name = "model.layers.0.linear_attn.{}conv1d.weight"
    sizes = [16, 16, 24]  # of queries, keys and values
    parts = dict(zip("qkv", model.model.layers[0].linear_attn.conv1d.weight.split(sizes), strict=True))
    for apart in (False, True):
        rest = {key: tensor for key, tensor in stored.items() if "layers.0" not in key or "conv1d" not in key}
        own = {name.format(f"{part}_"): tensor.contiguous() for part, tensor in parts.items()}
        whole = {name.format(""): torch.cat([*parts.values()])}
        safetensors.save_file(rest | (own if apart else whole), file)
        close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)


@torch.no_grad()
def test_predictors_of_further_tokens_are_passed_over(checkpoint):
    safetensors = pytest.importorskip("safetensors.torch")
    model, folder = checkpoint("qwen3_next")
    file, tokens = folder / "model.safetensors", text()
    safetensors.save_file(safetensors.load_file(file) | {"mtp.fc.weight": torch.zeros(3)}, file)
    close(LanguageModel.from_huggingface(folder)(tokens), model(tokens).logits)
