"""Registration, the choice for a loaded model, and what is said where transformers is missing."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import masking_utils, modeling_utils

import regard.huggingface
from regard.errors import ConfigurationError
from regard.huggingface.attention_function import (
    IGNORED_KEYWORDS,
    SUPPORTED_KEYWORDS,
    UNSUPPORTED_KEYWORDS,
    attention_forward,
)
from regard.huggingface.mask_tensor import symbolic_mask


def test_both_functions_are_known_under_one_name_also_twice():
    regard.huggingface.register()
    regard.huggingface.register()
    assert regard.huggingface.NAME == "regard"
    assert modeling_utils.ALL_ATTENTION_FUNCTIONS["regard"] is attention_forward
    assert masking_utils.ALL_MASK_ATTENTION_FUNCTIONS["regard"] is symbolic_mask
    assert (
        "regard" in masking_utils.AttentionMaskInterface._global_mapping
    )  # where transformers looks whether it exists


def test_without_a_mask_function_transformers_would_give_no_mask_and_we_would_still_be_causal(pair, ask, close):
    eager, ours = pair("llama")
    modeling_utils.AttentionInterface.register("no mask function", attention_forward)
    try:
        ours.set_attn_implementation("no mask function")
        inputs = ask("llama")
        with torch.no_grad():
            close(ours(**inputs), eager(**inputs))
    finally:
        del modeling_utils.AttentionInterface._global_mapping["no mask function"]


def test_a_model_may_be_made_with_it(ask, close, pair):
    regard.huggingface.register()
    eager, _ = pair("qwen3")
    made = type(eager)._from_config(eager.config.__class__(**eager.config.to_dict()), attn_implementation="regard")
    made.load_state_dict(eager.state_dict())
    inputs = ask("qwen3")
    with torch.no_grad():
        close(made.eval()(**inputs), eager(**inputs))


def test_swap_says_what_it_did(pair):
    eager, _ = pair("bart")
    swapped = regard.huggingface.swap(eager)
    assert len(swapped.replaced) == 6
    assert "model.decoder.layers.0.encoder_attn" in swapped.replaced
    assert not swapped.skipped
    assert not swapped.warnings
    assert str(swapped) == "6 attention modules use 'regard', 0 do not"
    assert eager.config._attn_implementation == "regard"
    eager.set_attn_implementation("sdpa")
    assert eager.config._attn_implementation == "sdpa"


def test_swap_names_what_cannot_be_plugged():
    config = transformers.GPTJConfig(vocab_size=7, n_embd=8, n_layer=2, n_head=2, rotary_dim=2, n_positions=16)
    model = transformers.GPTJModel(config)
    swapped = regard.huggingface.swap(model)
    assert swapped.replaced == ()
    assert swapped.skipped == {f"h.{layer}.attn": "GPTJAttention computes attention by itself" for layer in (0, 1)}
    assert str(swapped).splitlines() == [
        "0 attention modules use 'regard', 2 do not",
        "  h.0.attn: GPTJAttention computes attention by itself",
        "  h.1.attn: GPTJAttention computes attention by itself",
    ]
    assert model.config._attn_implementation != "regard"


def test_swap_names_a_part_that_keeps_its_own_choice(pair):
    _, ours = pair("llama")
    attention = ours.model.layers[1].self_attn
    attention.config = type(ours.config)(**ours.config.to_dict())
    attention.config._attn_implementation = "eager"
    swapped = regard.huggingface.swap(ours)
    assert swapped.replaced == ("model.layers.0.self_attn",)
    assert swapped.skipped == {
        "model.layers.1.self_attn": "LlamaAttention has attn_implementation='eager' in its own configuration"
    }


def sparse_model() -> transformers.HYV4ForCausalLM:
    """A model whose indexer selects the keys of each query."""
    config = transformers.HYV4Config(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        index_topk=4,
        index_n_heads=2,
        index_head_dim=16,
        pad_token_id=0,
    )
    return transformers.HYV4ForCausalLM(config).eval()


@pytest.fixture
def refused(monkeypatch) -> None:
    """Keys that an indexer selects are not known, as once they were not."""
    refused = {"indices": "keys that an indexer selects"}
    monkeypatch.setattr(sys.modules["regard.huggingface.register"], "UNSUPPORTED_KEYWORDS", refused)


@pytest.mark.usefixtures("refused")
def test_swap_leaves_models_that_pass_an_unknown_keyword_to_transformers():
    model, tokens = sparse_model(), torch.arange(3, 23)[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        before = model(tokens).logits
        swapped = regard.huggingface.swap(model)
        assert torch.equal(model(tokens).logits, before)
    names = [f"model.layers.{layer}.self_attn" for layer in (0, 1)]
    reason = (
        "HYV4Attention passes indices (keys that an indexer selects), unknown to 'regard': it keeps "
        "attn_implementation='eager'"
    )
    assert swapped.skipped == dict.fromkeys(names, reason)
    assert not swapped.replaced
    assert not swapped.warnings
    assert str(swapped).splitlines() == [
        "0 attention modules use 'regard', 2 do not",
        *(f"  {name}: {reason}" for name in names),
    ]
    model.set_attn_implementation("regard")
    assert regard.huggingface.swap(model).skipped == swapped.skipped
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, before)


@pytest.mark.usefixtures("refused")
def test_swap_takes_the_other_models_beside_one_that_is_left(pair):
    both = torch.nn.ModuleDict({"sparse": sparse_model(), "llama": pair("llama")[0]})
    swapped = regard.huggingface.swap(both)
    assert set(swapped.skipped) == {f"sparse.model.layers.{layer}.self_attn" for layer in (0, 1)}
    assert swapped.replaced
    assert all(name.startswith("llama.") for name in swapped.replaced)


KNOWN = SUPPORTED_KEYWORDS | IGNORED_KEYWORDS | UNSUPPORTED_KEYWORDS.keys()
ARGUMENTS = {"query", "key", "value", "attention_mask", "dropout", "scaling"}


def test_every_keyword_that_an_installed_model_passes_is_known():
    """As their sources have them: the next kind of selection shows here, before a model raises."""
    passed: dict[str, set[str]] = {}
    for file in (Path(transformers.__file__).parent / "models").glob("*/modeling_*.py"):
        source = file.read_text("utf-8")
        for call in re.finditer(r"= attention_interface\(\n((?: {12,}.*\n)+?) {8,}\)\n", source):
            for name in re.findall(r"^ {12,20}(\w+)=", call[1], re.MULTILINE):
                passed.setdefault(name, set()).add(file.parent.name)
    assert len(set().union(*passed.values())) > 200
    assert {name: models for name, models in passed.items() if name not in KNOWN | ARGUMENTS} == {}
    assert UNSUPPORTED_KEYWORDS.keys() <= passed.keys()


def test_swap_finds_the_models_inside_a_module(pair, ask, close):
    """As in a SentenceTransformer, whose first module holds the model as `auto_model`."""
    eager, _ = pair("bart")
    other, _ = pair("llama")
    wrapper = nn.Sequential(nn.ModuleDict({"auto_model": eager}), nn.Linear(2, 2), other)
    report = regard.huggingface.swap(wrapper)
    assert len(report.replaced) == 8
    assert "0.auto_model.model.decoder.layers.0.encoder_attn" in report.replaced
    assert "2.model.layers.1.self_attn" in report.replaced
    assert eager.config._attn_implementation == other.config._attn_implementation == "regard"


def test_swap_of_a_sentence_transformer():
    sentence_transformers = pytest.importorskip("sentence_transformers")
    config = transformers.BertConfig(
        vocab_size=7, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8
    )
    inner = nn.Module()
    inner.auto_model = transformers.BertModel(config)
    report = regard.huggingface.swap(sentence_transformers.SentenceTransformer(modules=[inner]))
    assert report.replaced == ("0.auto_model.encoder.layer.0.attention.self",)


def test_swap_needs_a_model_of_transformers():
    with pytest.raises(ConfigurationError, match=r"swap needs a model of transformers .* this is a Linear without one"):
        regard.huggingface.swap(nn.Linear(2, 2))
    with pytest.raises(ConfigurationError, match="this is a str without one"):
        regard.huggingface.swap("bert")  # type: ignore[arg-type]


def test_an_unknown_keyword_reaches_the_user_by_name(pair, ask):
    with pytest.raises(ConfigurationError, match="LlamaAttention gives its attention temperature=0.5"):
        pair("llama")[1](**ask("llama"), temperature=0.5)


def run(command, program):
    return subprocess.run(
        [*command, "-c", program],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_importing_does_not_load_transformers(warm_python):
    done = run(warm_python, "import sys, regard, regard.huggingface; print('transformers' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr


@pytest.mark.parametrize("call", ["register()", "swap(None)"])
def test_without_transformers_the_extra_is_named(call, warm_python):
    done = run(warm_python, f"import sys; sys.modules['transformers'] = None; import regard.huggingface as h; h.{call}")
    last = done.stderr.strip().splitlines()[-1]
    assert (
        "needs the package 'transformers', which is not installed; pip install 'regard[huggingface]' brings it" in last
    )
