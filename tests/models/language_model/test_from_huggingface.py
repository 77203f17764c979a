"""transformers' own models, eager, with the same weights: the same logits, also with padding and a cache."""

import json
from typing import Any

import pytest
import torch

from regard import masks
from regard.lenses import Weights
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, GatedExpertsConfig, LayerConfig, RMSNormConfig
from regard.models.language_model.huggingface.architectures import configuration
from regard.positions import Rotary

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


@torch.no_grad()
def test_greedy_text_of_a_padded_batch_is_theirs(pair):
    model, ours = pair("mistral")
    tokens, lengths = text(batch=3, length=9), torch.tensor([9, 4, 1])
    exists = torch.arange(9) >= 9 - lengths[:, None]
    tokens = tokens.masked_fill(~exists, 0)
    expected = model.generate(
        tokens, attention_mask=exists.long(), max_new_tokens=10, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found = list(ours.generate(tokens, 10, lengths=lengths))
    assert torch.stack(found, 1).tolist() == expected[:, 9:].tolist()


@pytest.mark.parametrize("name", ["mistral", "gpt_oss", "gemma2"])
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
