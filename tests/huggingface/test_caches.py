"""Decoding with every cache of transformers gives what eager attention gives: in steps, in chunks, by `generate`."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, QuantizedCache, StaticCache

DECODERS = ("llama", "mistral", "gemma2", "gemma3", "gpt_oss", "qwen3", "llama4", "deepseek_v3")
CACHES = {
    "dynamic": lambda model: DynamicCache(config=model.config),
    "without windows": lambda model: DynamicCache(),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=24),
}
CHUNKS = {"prefill, then steps": [6, *[1] * 11], "chunks": [3, 7, 1, 4, 2], "steps": [1] * 17, "all at once": [17]}
LEFT = torch.tensor([[1] * 17, [0] * 4 + [1] * 13])


def decode(model, cache, tokens, chunks, padding=None):
    outputs, seen = [], 0
    for chunk in tokens.split(chunks, 1):
        seen += chunk.shape[1]
        mask = None if padding is None else padding[:, :seen]
        outputs.append(model(chunk, attention_mask=mask, past_key_values=cache, use_cache=True).logits)
    return torch.cat(outputs, 1)


@pytest.mark.covering(strength=2)
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_is_eagers_and_the_full_forward(pair, close, name, kind, chunks):
    eager, ours = pair(name)
    tokens = torch.randint(3, 60, (2, 17))
    with torch.no_grad():
        mine = decode(ours, CACHES[kind](ours), tokens, chunks)
        close(mine, decode(eager, CACHES[kind](eager), tokens, chunks))
        close(mine, eager(tokens, use_cache=False).logits)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("name", DECODERS)
def test_decoding_with_left_padding(pair, close, name, kind):
    eager, ours = pair(name)
    tokens = torch.randint(3, 60, (2, 17))
    with torch.no_grad():
        mine = decode(ours, CACHES[kind](ours), tokens, [8, *[1] * 9], LEFT)
        close(mine, decode(eager, CACHES[kind](eager), tokens, [8, *[1] * 9], LEFT), LEFT)


@pytest.mark.parametrize("kind", CACHES)
def test_weights_over_a_cache_are_eagers(pair, close, kind):
    eager, ours = pair("gemma2")
    tokens = torch.randint(3, 60, (2, 9))
    seen = []
    for model in (ours, eager):
        cache = CACHES[kind](model)
        with torch.no_grad():
            model(tokens[:, :7], past_key_values=cache, use_cache=True)
            seen.append(model(tokens[:, 7:], past_key_values=cache, use_cache=True, output_attentions=True).attentions)
    for weights, expected in zip(*seen, strict=True):
        close(weights, expected)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_decoding_over_a_quantised_cache(pair, close, name):
    """Of one layer, whose keys no attention has changed, both models store the same codes."""
    eager, ours = pair(name, num_hidden_layers=1)
    tokens, logits = torch.randint(3, 60, (2, 17)), []
    for model in (ours, eager):
        cache = QuantizedCache("fp8", model.config)
        with torch.no_grad():
            logits.append(decode(model, cache, tokens, [6, *[1] * 11]))
        stored: Any = cache.layers[0]
        assert stored._quantized_keys[0].dtype == torch.float8_e4m3fn
    close(*logits)


@pytest.mark.parametrize("implementation", ["dynamic", "static"])
@pytest.mark.parametrize("name", DECODERS)
def test_generate(pair, close, name, implementation):
    prompt, padding = torch.randint(3, 60, (2, 8)), LEFT[:, :8]
    prompt[~padding.bool()] = 0
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "cache_implementation": implementation}
    mine, theirs = (
        model.generate(prompt, attention_mask=padding, return_dict_in_generate=True, output_logits=True, **options)
        for model in reversed(pair(name))
    )
    assert mine.sequences.tolist() == theirs.sequences.tolist()
    assert len(set(mine.sequences[:, 8:].flatten().tolist())) > 3  # more than one token again and again
    close(torch.stack(mine.logits), torch.stack(theirs.logits))


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("name", ["t5", "t5gemma", "bart", "marian", "whisper"])
def test_generate_from_a_source(pair, ask, name, beams):
    inputs = ask(name)
    del inputs["decoder_input_ids"]
    if name != "whisper":
        inputs["attention_mask"] = torch.tensor([[1] * 11, [1] * 6 + [0] * 5])
    options = {"max_new_tokens": 9, "min_new_tokens": 9, "do_sample": False, "num_beams": beams}
    eager, ours = pair(name)
    assert ours.generate(**inputs, **options).tolist() == eager.generate(**inputs, **options).tolist()


@pytest.mark.parametrize("name", ["t5", "t5gemma", "bart", "marian", "whisper"])
def test_a_decoder_in_steps_is_its_full_forward(pair, ask, close, name):
    eager, ours = pair(name)
    inputs = ask(name)
    tokens = inputs.pop("decoder_input_ids")
    cache, logits = EncoderDecoderCache(DynamicCache(), DynamicCache()), []
    with torch.no_grad():
        encoded = ours.get_encoder()(next(iter(inputs.values())))
        for step in tokens.split(1, 1):
            outputs = ours(encoder_outputs=encoded, decoder_input_ids=step, past_key_values=cache, use_cache=True)
            logits.append(outputs.logits)
        close(torch.cat(logits, 1), eager(**inputs, decoder_input_ids=tokens).logits)


def test_generate_returns_weights(pair, close):
    prompt = torch.randint(3, 60, (2, 8))
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "return_dict_in_generate": True}
    theirs, mine = (model.generate(prompt, output_attentions=True, **options).attentions for model in pair("mistral"))
    assert len(mine) == 4
    for weights, expected in zip(mine, theirs, strict=True):
        for layer, other in zip(weights, expected, strict=True):
            close(layer, other)
