"""Continuous batching of transformers with attention by regard: the tokens of eager attention for each text alone."""

import pytest
import torch

import regard.huggingface
from regard.errors import ConfigurationError

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
    model, calls = small(name, "sdpa" if "gemma2" not in name and "gpt" not in name else "eager"), []
    before = model.config._attn_implementation
    real = regard.huggingface.paged_batches.paged_attention_forward
    monkeypatch.setattr(
        "regard.huggingface.paged_batches.paged_attention_forward",
        lambda *args, **named: calls.append(1) or real(*args, **named),
    )
    with regard.huggingface.paged(model):
        assert in_batch(model, prompts) == expected
    assert len(calls) >= 3 * 12
    assert model.config._attn_implementation == before


def test_other_models_keep_theirs(prompts):
    ours, theirs = small("llama"), small("llama", "paged|eager")
    with regard.huggingface.paged(ours):
        assert in_batch(theirs, prompts) == in_batch(ours, prompts)
        with regard.huggingface.paged(theirs):
            assert in_batch(theirs, prompts) == in_batch(ours, prompts)
    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    assert functions["paged|eager"].__module__.startswith("transformers")


def test_a_failure_inside_restores_all():
    model = small("llama", "sdpa")
    with pytest.raises(ZeroDivisionError), regard.huggingface.paged(model):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"


def test_what_has_no_batches():
    with (
        pytest.raises(
            ConfigurationError, match="needs a model of transformers that has generate_batch; this is a Linear"
        ),
        regard.huggingface.paged(torch.nn.Linear(2, 2)),
    ):
        pass
    model = small("llama")
    message = "is for continuous batching, which passes a cache"
    with regard.huggingface.paged(model), pytest.raises(ConfigurationError, match=message):
        model(torch.tensor([[1, 2]]))
