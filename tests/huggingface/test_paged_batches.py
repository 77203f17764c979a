"""Continuous batching of transformers with attention by regard: the tokens of eager attention for each text alone."""

import pytest
import torch

import regard.huggingface
from regard.errors import ConfigurationError
from regard.huggingface.paged_batches import BATCHED, paged_attention_forward

transformers = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 128,
    "eos_token_id": None,
}
MODELS = {
    "llama": ("Llama", {}),
    "mistral, windows": ("Mistral", {"sliding_window": 7}),
    "gemma2, softcap and windows": (
        "Gemma2",
        {"sliding_window": 7, "attn_logit_softcapping": 3.0, "query_pre_attn_scalar": 8},
    ),
    "gpt_oss, sinks": ("GptOss", {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def small(name, implementation="eager"):
    family, settings = MODELS[name]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**COMMON | settings)
    return getattr(transformers, f"{family}ForCausalLM")._from_config(config, attn_implementation=implementation).eval()


def settings(count=12):
    return transformers.GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)


def in_batch(model, prompts):
    few = transformers.ContinuousBatchingConfig(page_size=16, num_blocks=40, max_batch_tokens=64)
    answers = model.generate_batch(
        prompts, generation_config=settings(), continuous_batching_config=few, progress_bar=False
    )
    by_prompt = {tuple(answer.prompt_ids): answer.generated_tokens for answer in answers.values()}
    return [by_prompt[tuple(prompt)] for prompt in prompts]


@pytest.fixture
def prompts():
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 97, (length,), generator=generator).tolist() for length in (5, 41, 17, 1, 23)]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_of_each_text_alone(name, prompts, monkeypatch):
    model = small(name)
    expected = [
        model.generate(torch.tensor([prompt]), generation_config=settings())[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    regard.huggingface.register()
    model, calls = small(name, "regard"), []
    monkeypatch.setattr(
        "regard.huggingface.paged_batches.paged_attention_forward",
        lambda *args, **named: calls.append(1) or paged_attention_forward(*args, **named),
    )
    assert in_batch(model, prompts) == expected
    assert len(calls) >= 3 * 12
    assert model.config._attn_implementation == "regard"
    assert model(torch.tensor([[1, 2]])).logits.shape == (1, 2, 97)


@pytest.mark.filterwarnings("ignore:The `paged|` prefix is no longer needed:FutureWarning")
def test_the_name_with_its_old_prefix(prompts):
    regard.huggingface.register()
    named, expected = small("llama", "paged|regard"), in_batch(small("llama", "paged|eager"), prompts)
    assert named.config._attn_implementation == "regard"
    assert in_batch(named, prompts) == expected
    model = small("llama", "sdpa")
    model.set_attn_implementation("paged|regard")
    assert in_batch(model, prompts) == expected


def test_a_model_that_is_swapped(prompts):
    model = small("llama", "sdpa")
    assert not regard.huggingface.swap(model).skipped
    found = in_batch(model, prompts)
    model.set_attn_implementation("sdpa")
    assert in_batch(model, prompts) == found
    assert not any(module in BATCHED for module in model.modules())


def test_other_models_keep_theirs(prompts):
    regard.huggingface.register()
    ours, theirs = small("llama", "regard"), small("llama", "paged|eager")
    answers = in_batch(ours, prompts)
    assert {module in BATCHED for module in ours.modules()} == {True}
    assert in_batch(theirs, prompts) == answers
    assert {module in BATCHED for module in theirs.modules()} == {False}


def test_registering_twice_changes_nothing():
    regard.huggingface.register()
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    before = functions["paged|eager"]
    regard.huggingface.register()
    assert functions["paged|eager"] is before


def test_a_call_outside_of_a_batch():
    regard.huggingface.register()
    model = small("llama", "regard")
    in_batch(model, [[1, 2]])
    model.set_attn_implementation("paged|eager")
    with pytest.raises(ConfigurationError, match=r"a cache: set_attn_implementation\('regard'\) first"):
        model(torch.tensor([[1, 2]]))
