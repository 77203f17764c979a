"""Edited terms of models of transformers and of our translator, whole and while they generate with a cache."""

from typing import Any

import pytest
import torch

import regard
from regard.heads import HeadTerms, capture_patch, editing, mean_outputs, mean_values

transformers = pytest.importorskip("transformers")
import regard.huggingface  # noqa: E402


def small(kind, config, **sizes):
    torch.manual_seed(2)
    model = kind(config(**sizes)).eval()
    regard.huggingface.swap(model)
    return model


def decoder():
    return small(
        transformers.LlamaForCausalLM,
        transformers.LlamaConfig,
        vocab_size=53,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        initializer_range=0.5,
        eos_token_id=None,
    )


def translator():
    return small(
        transformers.MarianMTModel,
        transformers.MarianConfig,
        vocab_size=53,
        d_model=24,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        pad_token_id=52,
        decoder_start_token_id=52,
        eos_token_id=51,
        forced_eos_token_id=None,
        init_std=0.5,
    )


TEXT = torch.tensor([[3, 17, 41, 5, 29, 11, 2]])

DECODER = {
    "a head": HeadTerms("model.layers.1", heads=[4]),
    "a token": HeadTerms(keys=[2]),
    "a link of a token that is generated": HeadTerms("model.layers.0", heads=[0, 5], queries=[9, 10], keys=[1, 8]),
}


@pytest.mark.parametrize("terms", DECODER.values(), ids=DECODER.keys())
@pytest.mark.parametrize("by", ["zero", "mask", "means"])
def test_a_language_model_generates_what_it_would_without_a_cache(terms, by):
    model, replace = decoder(), by
    if by == "means":
        means = mean_outputs if terms.keys is None else mean_values
        replace = means(model, lambda: model(TEXT.flip(1)))
    options = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    with torch.no_grad():
        plain = model.generate(TEXT, **options)
        with editing(model, terms, replace=replace):
            said = model.generate(TEXT, **options)
            whole = model(said.sequences).logits
    steps = torch.stack(said.logits, 1)
    torch.testing.assert_close(steps, whole[:, len(TEXT[0]) - 1 : -1], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(torch.stack(plain.logits, 1), steps, atol=1e-2)


CROSS = {
    "a head": HeadTerms("model.decoder.layers.1.encoder_attn", heads=[2]),
    "a word of the source": HeadTerms("model.decoder", keys=[3]),
    "a link": HeadTerms("model.decoder.layers.0.encoder_attn", queries=[2, 3], keys=[1, 4]),
    "the encoder": HeadTerms("model.encoder.layers.0", heads=[1], queries=[5]),
}


@pytest.mark.parametrize("terms", CROSS.values(), ids=CROSS.keys())
@pytest.mark.parametrize("by", ["zero", "mask", "patch"])
def test_a_translator_generates_what_it_would_without_a_cache(terms, by):
    model, replace = translator(), by
    other = TEXT.flip(1)
    target = torch.tensor([[52, 7, 9, 30, 8, 1]])
    if by == "patch":
        replace = capture_patch(model, lambda: model(other, decoder_input_ids=target), terms)
    options = {"do_sample": False, "num_beams": 1, "max_new_tokens": 6, "output_logits": True}
    with torch.no_grad():
        plain = model.generate(TEXT, return_dict_in_generate=True, **options)
        with editing(model, terms, replace=replace):
            said = model.generate(TEXT, return_dict_in_generate=True, **options)
        with editing(model, terms, replace=replace):
            whole = model(TEXT, decoder_input_ids=said.sequences[:, :-1]).logits
    steps = torch.stack(said.logits, 1)
    torch.testing.assert_close(steps, whole[:, : steps.shape[1]], rtol=1e-4, atol=1e-4)
    together = min(len(plain.logits), steps.shape[1])
    assert not torch.allclose(torch.stack(plain.logits, 1)[:, :together], steps[:, :together], atol=1e-2)


def test_an_edited_head_is_an_ablated_head():
    for model, name in ((decoder(), "model.layers.1.self_attn"), (translator(), "model.encoder.layers.1.self_attn")):
        given = {"decoder_input_ids": TEXT} if "encoder" in name else {}
        with torch.no_grad(), editing(model, HeadTerms(name, heads=[1, 3])):
            edited = model(TEXT, **given).logits
        with torch.no_grad(), regard.heads.ablating(model, {name: [1, 3]}):
            torch.testing.assert_close(model(TEXT, **given).logits, edited, rtol=1e-5, atol=1e-5)


def test_a_masked_token_is_one_that_attention_mask_hides():
    model = small(
        transformers.BertModel,
        transformers.BertConfig,
        vocab_size=53,
        hidden_size=24,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
    )
    hidden = torch.ones_like(TEXT)
    hidden[0, 3] = 0
    with torch.no_grad():
        expected = model(TEXT, attention_mask=hidden).last_hidden_state
        with editing(model, HeadTerms(keys=[3]), replace="mask"):
            edited = model(TEXT).last_hidden_state
    torch.testing.assert_close(edited, expected, rtol=1e-5, atol=1e-5)


def test_our_translator_is_edited_step_by_step_too():
    from regard.translation.run_folder import ENGLISH_FRENCH
    from regard.translation.translator import Translator

    translating = Translator.load(ENGLISH_FRENCH)
    model: Any = translating.model
    sentence = "The cat is on the table."
    plain = translating.translate([sentence])[0].candidates[0]
    for name in ("decoder.blocks.1.cross_attention", "encoder.blocks.2.attention"):
        with editing(model, HeadTerms(name)):
            edited = translating.translate([sentence])[0].candidates[0]
        assert edited.score != plain.score
