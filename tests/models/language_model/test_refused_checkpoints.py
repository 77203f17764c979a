"""What from_huggingface cannot read exactly it refuses, and says what it is."""

import json
import subprocess
import sys

import pytest
import torch

from regard.errors import CheckpointError, ConfigurationError, MissingExtra
from regard.models import LanguageModel
from regard.models.language_model.huggingface.architectures import ARCHITECTURES, configuration

safetensors = pytest.importorskip("safetensors.torch")

LLAMA = {
    "model_type": "llama",
    "vocab_size": 11,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


def told(folder, **changes):
    """A folder with a config.json of a small Llama."""
    config = {name: value for name, value in (LLAMA | changes).items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def weights(**changes):
    """The tensors of that Llama."""
    square, shapes = (8, 8), {"gate": (12, 8), "up": (12, 8), "down": (8, 12)}
    layer = "model.layers.0."
    tensors = {
        "model.embed_tokens.weight": torch.randn(11, 8),
        "model.norm.weight": torch.ones(8),
        "lm_head.weight": torch.randn(11, 8),
        f"{layer}input_layernorm.weight": torch.ones(8),
        f"{layer}post_attention_layernorm.weight": torch.ones(8),
        **{f"{layer}self_attn.{name}_proj.weight": torch.randn(square) for name in "qkvo"},
        **{f"{layer}mlp.{name}_proj.weight": torch.randn(shape) for name, shape in shapes.items()},
    }
    return {name: tensor for name, tensor in (tensors | changes).items() if tensor is not ...}


def saved(folder, **changes):
    safetensors.save_file(weights(**changes), folder / "model.safetensors")
    return told(folder)


def refuses(folder, message):
    with pytest.raises(CheckpointError, match=message):
        LanguageModel.from_huggingface(folder)


def test_the_small_llama_itself_is_read(tmp_path):
    assert LanguageModel.from_huggingface(saved(tmp_path))(torch.arange(5)[None]).shape == (1, 5, 11)


def test_another_architecture_is_named(tmp_path):
    message = "config.json is of a 'bert' model; LanguageModel reads 'deepseek_v2', 'deepseek_v3', 'deepseek_v32'"
    refuses(told(tmp_path, model_type="bert"), message)


def test_missing_tensors_are_named_and_counted(tmp_path):
    gone = {f"model.layers.0.self_attn.{name}_proj.weight": ... for name in "qkvo"}
    message = (
        r"of the 12 tensors that the model needs 4 missing \(model.layers.0.self_attn.q_proj.weight, .*, \.\.\.\)$"
    )
    refuses(saved(tmp_path, **gone), message)


def test_extra_tensors_are_named_and_counted(tmp_path):
    extra = {"model.layers.1.mlp.gate_proj.weight": torch.zeros(1), "score.weight": torch.zeros(1)}
    refuses(saved(tmp_path, **extra), r"2 extra \(model.layers.1.mlp.gate_proj.weight, score.weight\)")


def test_misshapen_tensors_are_named_and_counted(tmp_path):
    message = r"1 of another shape \(lm_head.weight: the file has \[9, 8\], the model needs \[11, 8\]\)"
    refuses(saved(tmp_path, **{"lm_head.weight": torch.zeros(9, 8)}), message)


def test_what_old_versions_saved_beside_is_passed_over(tmp_path):
    folder = saved(tmp_path, **{"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2)})
    LanguageModel.from_huggingface(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_a_pickle_is_refused_with_the_way_to_convert_it(name, tmp_path):
    (told(tmp_path) / name).write_bytes(b"")
    refuses(
        tmp_path, rf"pickles \({name}\), which can run code.*save_pretrained\(new_folder\) of transformers converts"
    )


def test_no_weights_at_all(tmp_path):
    refuses(told(tmp_path), "neither model.safetensors nor model.safetensors.index.json")


def test_a_truncated_file(tmp_path):
    path = saved(tmp_path) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    refuses(tmp_path, "model.safetensors is not a whole safetensors file")


def test_a_part_that_is_not_there(tmp_path):
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (told(tmp_path) / "model.safetensors.index.json").write_text(json.dumps(index))
    refuses(tmp_path, "model-00001-of-00002.safetensors cannot be read")


@pytest.mark.parametrize("name", ["../other.safetensors", "/etc/passwd"])
def test_parts_are_beside_their_index(name, tmp_path):
    (told(tmp_path) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    refuses(tmp_path, f"names '{name}', which is not a file beside it")


def test_an_index_without_places(tmp_path):
    (told(tmp_path) / "model.safetensors.index.json").write_text("{}")
    refuses(tmp_path, "needs a weight_map from tensors to files")


def test_no_folder(tmp_path):
    refuses(tmp_path / "meta-llama", "is not a folder: from_huggingface reads a local one and downloads nothing")


def test_no_configuration(tmp_path):
    refuses(tmp_path, "there is no config.json in")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "is not JSON"), ("[]", "holds a JSON list"), ("[" * 100_000, "is not JSON")],
    ids=["truncated", "a list", "nested"],
)
def test_a_configuration_that_is_none(text, message, tmp_path):
    (tmp_path / "config.json").write_text(text)
    refuses(tmp_path, message)


def test_what_regard_saved_is_for_load(tmp_path, make):
    make().save(tmp_path)
    refuses(tmp_path, r"names no model_type.*LanguageModel.load\(folder\) reads what regard saved")


def test_an_output_layer_that_is_tied_and_another(tmp_path):
    told(saved(tmp_path), tie_word_embeddings=True)
    refuses(tmp_path, "the output layer is the embedding, but lm_head.weight holds other numbers")
    both = torch.randn(11, 8)
    changes = {"lm_head.weight": both, "model.embed_tokens.weight": both.clone()}
    safetensors.save_file(weights(**changes), tmp_path / "model.safetensors")
    LanguageModel.from_huggingface(tmp_path)


def test_weights_that_are_whole_numbers(tmp_path):
    names = weights()
    whole = {name: tensor.to(torch.int8) for name, tensor in names.items()}
    refuses(saved(tmp_path, **whole), "is torch.int8: it needs floating-point numbers")


DEEPSEEK = {"model_type": "deepseek_v3", "moe_intermediate_size": 6, "num_key_value_heads": 2, "n_group": 2}
V2, V32, GLM = ({**DEEPSEEK, "model_type": name} for name in ("deepseek_v2", "deepseek_v32", "glm_moe_dsa"))
V2 |= {"num_experts_per_tok": 2}
KIMI = {"model_type": "kimi_linear", "num_key_value_heads": 2}
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
LONG = {"rope_theta": 10000.0, "original_max_position_embeddings": 8}
GEMMA_4 = {"model_type": "gemma4_text", "num_hidden_layers": 3, "head_dim": 4, "num_key_value_heads": 1}
GEMMA_3N = GEMMA_4 | {"model_type": "gemma3n_text", "num_kv_shared_layers": 0}
WRONG = [
    ({"hidden_act": "relu6"}, "says hidden_act='relu6', which changes what the model computes and is not supported"),
    ({"pretraining_tp": 2}, "says pretraining_tp=2"),
    ({"num_hidden_layers": 10**12}, r"says num_hidden_layers=1000000000000; it needs a whole number in 1\.\.4,096"),
    ({"num_hidden_layers": 0}, "says num_hidden_layers=0; it needs"),
    ({"hidden_size": 10**30}, r"says hidden_size=10+; it needs a whole number in 1\.\.1,048,576"),
    ({"vocab_size": 2.5}, "says vocab_size=2.5; it needs"),
    ({"intermediate_size": -3}, "says intermediate_size=-3; it needs"),
    ({"num_attention_heads": "8"}, "says num_attention_heads=8; it needs"),
    ({"model_type": "gpt_oss", "num_local_experts": 10**9}, "says num_local_experts=1000000000; it needs"),
    ({"model_type": "phi3", "resid_pdrop": 0.1}, "says resid_pdrop=0.1"),
    ({"model_type": "phi3", "partial_rotary_factor": 0.75}, "says partial_rotary_factor=0.75"),
    ({"model_type": "mixtral", "router_jitter_noise": 0.1}, "says router_jitter_noise=0.1"),
    ({"model_type": "qwen2", "attention_bias": True}, "says attention_bias=True"),
    ({"hidden_size": ...}, "says nothing of 'hidden_size', which a llama model needs"),
    ({"sliding_window": 4}, r"1 settings that are unknown here.*sliding_window=4.*ignore=\('sliding_window',\)"),
    ({"qk_norm": True, "clip": 8.0}, "2 settings that are unknown here for a llama model.*: clip=8.0, qk_norm=True"),
    ({"quantization_config": {"quant_method": "gptq"}}, "quantised, with quant_method='gptq'.*dequantize"),
    (
        {"rope_parameters": {"rope_type": "mrope"}},
        "rope_type='mrope', which is not supported here; supported: 'default'",
    ),
    ({"rope_parameters": {"rope_type": "linear"}}, "says nothing of 'factor', which a 'linear' rotary needs"),
    ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0, "extrapolation": 2} | LONG}, "unknown here: extrapolation=2"),
    (
        {"rope_parameters": {"rope_type": "linear", "factor": 0.5}},
        "describes no 'llama' model: LinearScaling needs a factor",
    ),
    (
        {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": None},
        "'max_position_embeddings'",
    ),
    ({"is_causal": False}, "says is_causal=False, which changes what the model computes and is not supported"),
    ({"is_causal": None}, "says is_causal=None"),
    ({"model_type": "gemma2", "is_causal": False}, "says is_causal=False"),
    ({"use_rotary": False}, r"1 settings that are unknown here.*use_rotary=False.*ignore=\('use_rotary',\)"),
    ({"rotary_dim": 0}, "rotary_dim=0"),
    ({"model_type": "mistral", "sliding_window": 0}, "sliding_window=0; it needs a whole number of at least 1"),
    ({"model_type": "mistral", "sliding_window": True}, "sliding_window=True; it needs a whole number"),
    ({"model_type": "gemma2", "sliding_window": -1, "head_dim": 4}, "sliding_window=-1; it needs a whole number"),
    ({"model_type": "mistral", "layer_types": ["full_attention"]}, r"says layer_types=\['full_attention'\]"),
    ({"model_type": "gemma2", "use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    ({"model_type": "gemma2", "layer_types": ["full_attention"] * 2}, "names 2 layers; it needs"),
    ({"model_type": "qwen3", "layer_types": ["linear_attention"]}, "has 'linear_attention'; it needs"),
    ({"model_type": "qwen2", "layer_types": ["sliding_attention"]}, "but use_sliding_window is false"),
    ({"model_type": "qwen2_moe", "layer_types": ["sliding_attention"]}, "but use_sliding_window is false"),
    ({"model_type": "qwen2_moe", "attention_bias": True}, "says attention_bias=True"),
    ({"model_type": "qwen2_moe", "mlp_only_layers": [0.5]}, r"mlp_only_layers=\[0.5\]; it needs a list of the numbers"),
    ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "says decoder_sparse_step=0; it needs"),
    (
        {"model_type": "qwen2_moe", "shared_expert_intermediate_size": ...} | {"num_experts": 0},
        "num_experts=0; it needs",
    ),
    ({"model_type": "qwen3_moe", "num_experts": 4, "num_local_experts": 5}, "num_local_experts=5.*supported: 4"),
    ({"model_type": "qwen3_moe", "layer_types": ["full_attention"]}, r"says layer_types=\['full_attention'\]"),
    ({"model_type": "qwen3_moe", "mlp_bias": True}, "says mlp_bias=True"),
    ({"model_type": "qwen3_moe", "n_shared_experts": 1}, "n_shared_experts=1"),
    (DEEPSEEK | {"quantization_config": FP8}, "quantised, with quant_method='fp8'.*dequantize"),
    (DEEPSEEK | {"num_key_value_heads": 1}, "says num_key_value_heads=1.*supported: 2, None"),
    (DEEPSEEK | {"head_dim": 12}, "says head_dim=12.*supported: 64, None"),
    (DEEPSEEK | {"qk_head_dim": 12}, "says qk_head_dim=12.*supported: 192, None"),
    (DEEPSEEK | {"kv_lora_rank": 0}, "says kv_lora_rank=0; it needs a whole number"),
    (DEEPSEEK | {"v_head_dim": None}, "says nothing of 'v_head_dim', which a deepseek_v3 model needs"),
    (DEEPSEEK | {"norm_topk_prob": None}, "says nothing of 'norm_topk_prob', which a deepseek_v3 model needs"),
    (DEEPSEEK | {"rope_interleave": None}, "says nothing of 'rope_interleave', which a deepseek_v3 model needs"),
    ({"model_type": "qwen3_moe", "num_local_experts": None}, "says nothing of 'num_experts', which a qwen3_moe model"),
    (DEEPSEEK | {"scoring_func": "softmax"}, "says scoring_func='softmax'.*supported: 'sigmoid', None"),
    (DEEPSEEK | {"topk_method": "greedy"}, "says topk_method='greedy'.*supported: 'noaux_tc', None"),
    (DEEPSEEK | {"moe_layer_freq": 2}, "says moe_layer_freq=2"),
    (DEEPSEEK | {"mlp_bias": True}, "says mlp_bias=True"),
    (DEEPSEEK | {"pretraining_tp": 4}, "says pretraining_tp=4"),
    (DEEPSEEK | {"n_group": 0}, "says n_group=0; it needs a whole number"),
    (DEEPSEEK | {"n_shared_experts": 0}, "says n_shared_experts=0; it needs a whole number"),
    (DEEPSEEK | {"routed_scaling_factor": None}, "says nothing of 'routed_scaling_factor'"),
    (DEEPSEEK | {"first_k_dense_replace": -1}, "says first_k_dense_replace=-1; it needs a whole number, 0 or more"),
    (DEEPSEEK | {"first_k_dense_replace": 1.0}, "says first_k_dense_replace=1.0; it needs a whole number"),
    (DEEPSEEK | {"hidden_act": "tanh"}, "says hidden_act='tanh'"),
    (DEEPSEEK | {"index_topk": 4}, "unknown here for a deepseek_v3 model.*: index_topk=4"),
    (DEEPSEEK | {"mlp_layer_types": ["dense"]}, r"unknown here for a deepseek_v3 model.*: mlp_layer_types=\['dense'\]"),
    (DEEPSEEK | {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    (DEEPSEEK | {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "mscale_all_dim": 1.0}}, "mscale_all_dim=1"),
    (DEEPSEEK | {"rope_scaling": {"type": "yarn", "mscale_all_dim": 1.0}}, "nothing of 'factor', which a 'yarn'"),
    (V2 | {"norm_topk_prob": True}, "says norm_topk_prob=True"),
    (V2 | {"mlp_bias": True}, "says mlp_bias=True"),
    (V2 | {"rope_interleave": False}, "says rope_interleave=False"),
    (V2 | {"topk_method": "noaux_tc"}, "says topk_method='noaux_tc'.*supported: 'greedy', 'group_limited_greedy'"),
    (V2 | {"scoring_func": "sigmoid"}, "says scoring_func='sigmoid'"),
    (V2 | {"topk_method": "group_limited_greedy"}, "says nothing of 'topk_group', which a deepseek_v2 model needs"),
    (V32 | {"rope_interleave": False}, "says rope_interleave=False"),
    (V32 | {"indexer_rope_interleave": True}, "says indexer_rope_interleave=True.*supported: False, None"),
    (V32 | {"index_topk": 0}, "says index_topk=0; it needs"),
    (V32 | {"layer_types": ["full_attention"]}, r"says layer_types=\['full_attention'\]"),
    (V32 | {"mlp_layer_types": ["dense", "sparse"]}, "it needs 'dense' or 'sparse' for each of the 1 layers"),
    (V32 | {"mlp_layer_types": ["moe"]}, r"says mlp_layer_types=\['moe'\]; it needs 'dense' or 'sparse'"),
    (V32 | {"num_experts": 7}, "unknown here for a deepseek_v32 model.*: num_experts=7"),
    (V32 | {"q_lora_rank": None}, "describes no 'deepseek_v32' model: an indexer reads the latent of queries"),
    (GLM | {"indexer_rope_interleave": False}, "says indexer_rope_interleave=False.*supported: True, None"),
    (GLM | {"indexer_types": ["shared"]}, r"says indexer_types=\['shared'\]; it needs 'full' or 'shared' for each of"),
    (GLM | {"indexer_types": ["full", "full"]}, r"says indexer_types=\['full', 'full'\]; it needs.*the 1 layers"),
    (GLM | {"index_topk_pattern": "X"}, r"says indexer_types=\['X'\]; it needs 'full' or 'shared'"),
    ({**DEEPSEEK, "model_type": "glm4_moe_lite", "first_k_dense_replace": 2}, "says first_k_dense_replace=2"),
    (KIMI | {"mla_use_nope": False}, "says mla_use_nope=False"),
    (KIMI | {"rope_scaling": {"type": "yarn"}}, "says rope_scaling="),
    (KIMI | {"moe_router_activation_func": "softmax"}, "says moe_router_activation_func='softmax'"),
    (KIMI | {"use_grouped_topk": False}, "says use_grouped_topk=False"),
    (KIMI | {"layer_types": ["sliding_attention"]}, r"says layer_types=\['sliding_attention'\]; it needs 'linear_att"),
    (KIMI | {"linear_attn_config": {"kda_layers": [], "full_attn_layers": []}}, r"says layer_types=\[None\]; it needs"),
    (KIMI | {"linear_attn_config": {"window": 3}}, "linear_attn_config has settings that are unknown here: window=3"),
    (KIMI | {"linear_attn_config": {"head_dim": 0}}, "says linear_head_dim=0; it needs a whole number"),
    (
        KIMI | {"num_experts": 4, "n_routed_experts": 5},
        "says num_experts=4 and n_routed_experts=5, which are one setti",
    ),
    ({"model_type": "youtu", "n_routed_experts": 4}, "unknown here for a youtu model.*: n_routed_experts=4"),
    ({"model_type": "gpt_oss", "hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"model_type": "qwen3_next", "attention_bias": True}, "says attention_bias=True"),
    ({"model_type": "qwen3_next", "hidden_act": "gelu"}, "says hidden_act='gelu'"),
    (
        {"model_type": "qwen3_next", "partial_rotary_factor": 1.5},
        "partial_rotary_factor=1.5; it needs a number above 0",
    ),
    ({"model_type": "qwen3_next", "layer_types": ["sliding_attention"]}, "has 'sliding_attention'; it needs 'linear_"),
    (
        {"model_type": "qwen3_next", "layer_types": ["full_attention"] * 2},
        "names 2 layers; it needs 'linear_attention'",
    ),
    ({"model_type": "qwen3_next", "linear_num_value_heads": 0}, "linear_num_value_heads=0; it needs"),
    ({"model_type": "qwen3_next", "linear_use_gate": True}, "linear_use_gate=True"),
    ({"model_type": "olmo_hybrid", "attention_bias": True}, "says attention_bias=True"),
    ({"model_type": "olmo_hybrid", "linear_key_head_dim": 2.5}, "linear_key_head_dim=2.5; it needs"),
    ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "fp8"}}, "quant_method='fp8'"),
    ({"model_type": "gpt_oss", "experts_per_token": 2}, "experts_per_token=2"),
    (GEMMA_4 | {"enable_moe_block": True}, "says nothing of 'moe_intermediate_size', which a gemma4_text model needs"),
    (GEMMA_4 | {"enable_moe_block": True, "moe_intermediate_size": 2, "num_experts": 0}, "num_experts=0; it needs"),
    (GEMMA_4 | {"use_bidirectional_attention": "all"}, "says use_bidirectional_attention='all'"),
    (GEMMA_4 | {"num_kv_shared_layers": 3}, r"says num_kv_shared_layers=3; it needs a whole number in 0\.\.2"),
    (GEMMA_4 | {"num_kv_shared_layers": True}, "says num_kv_shared_layers=True"),
    (
        GEMMA_4 | {"num_kv_shared_layers": 1},
        "num_kv_shared_layers=1 of 3 layers, which leaves no layer of 'full_attention' before them",
    ),
    (GEMMA_4 | {"hidden_size_per_layer_input": 10**30}, "says hidden_size_per_layer_input=10+; it needs"),
    (GEMMA_4 | {"vocab_size_per_layer_input": 0}, "says vocab_size_per_layer_input=0; it needs"),
    (
        GEMMA_4 | {"per_layer_config": {"1": {"num_attention_heads": 3}}},
        "per_layer_config has num_attention_heads=3 of layer 1; it needs head_dim or num_key_value_heads of layers in",
    ),
    (GEMMA_4 | {"per_layer_config": {"3": {}}}, r"per_layer_config has a layer '3'; it needs .* in 0\.\.2"),
    (GEMMA_4 | {"layer_types": ["full_attention"] * 2}, "names 2 layers; it needs"),
    (GEMMA_4 | {"layer_types": ["chunked_attention"] * 3}, "has 'chunked_attention'; it needs"),
    (
        GEMMA_4 | {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
        "describes no 'gemma4_text' model: Proportional.*needs a share in 0..1",
    ),
    (GEMMA_3N | {"intermediate_size": [12, 12]}, "intermediate_size has 2 values; it needs one for each of the 3"),
    (GEMMA_3N | {"intermediate_size": [12, 12, 0]}, "says intermediate_size=0; it needs"),
    (GEMMA_3N | {"activation_sparsity_pattern": [0.5]}, "activation_sparsity_pattern has 1 values; it needs one for"),
    (GEMMA_3N | {"altup_lb_loss": 1.0}, "altup_lb_loss=1.0"),
    (
        {"model_type": "gemma3_text", "rope_parameters": {"full_attention": {}, "factor": 2.0}},
        "rope_parameters have factor beside",
    ),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=lambda value: str(value)[:40])
def test_settings_that_change_the_result_are_named(changes, message, tmp_path):
    refuses(told(tmp_path, **changes), message)


@pytest.mark.parametrize("quiet", [{"something_new": None}, {"torchscript": False}, {"is_causal": True}], ids=str)
def test_settings_that_say_nothing_are_passed_over(quiet):
    assert configuration(LLAMA | quiet) == configuration(LLAMA)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_attention_both_ways_is_refused_of_every_architecture(name):
    with pytest.raises(CheckpointError, match="says is_causal=False"):
        configuration({"model_type": name, "is_causal": False})


def test_what_the_caller_vouches_for_is_passed_over(tmp_path):
    told(saved(tmp_path), unsloth_version="2026.1")
    refuses(tmp_path, "unsloth_version='2026.1'")
    LanguageModel.from_huggingface(tmp_path, ignore=("unsloth_version",))


def test_heads_that_do_not_divide(tmp_path):
    with pytest.raises(ConfigurationError, match="num_heads is 2 and num_kv_heads 3"):
        LanguageModel.from_huggingface(told(saved(tmp_path), num_key_value_heads=3))


def test_a_fused_projection_of_another_height_stays_as_it_is(tmp_path):
    name = "model.layers.0.self_attn.qkv_proj.weight"
    gone = {f"model.layers.0.self_attn.{part}_proj.weight": ... for part in "qkv"}
    refuses(saved(tmp_path, **gone, **{name: torch.zeros(23, 8)}), rf"3 missing .*1 extra \({name}\)")


def test_half_of_a_packed_parameter_is_missing(tmp_path):
    name = "model.layers.0.mlp.experts.down_proj"
    packed = {f"{name}_scales": torch.zeros(1, dtype=torch.uint8)}
    refuses(saved(tmp_path, **packed), rf"1 extra \({name}_scales\)")


def test_transformers_is_not_needed(tmp_path, warm_python):
    program = f"""
import sys
sys.modules["transformers"] = None
from regard.models import LanguageModel
print(LanguageModel.from_huggingface({str(saved(tmp_path))!r}).config.dim)
"""
    done = subprocess.run([*warm_python, "-c", program], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "8", done.stderr


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch, make):
    saved(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    for call in (LanguageModel.from_huggingface, lambda folder: make().save(folder / "new")):
        with pytest.raises(MissingExtra, match=r"'safetensors', which is not installed; pip install 'regard\[transl"):
            call(tmp_path)
