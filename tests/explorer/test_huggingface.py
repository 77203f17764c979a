"""Models of transformers recorded: results unchanged by a bit, weights those that eager attention returns."""

import copy

import numpy as np
import pytest
import torch

import regard.huggingface
from regard.explorer import Atlas, RankedTranslation, record

transformers = pytest.importorskip("transformers")

COMMON = {"vocab_size": 61, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = COMMON | {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DECODER = ENCODER | {"num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SEQ2SEQ = COMMON | {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_start_token_id": 1}
SEQ2SEQ |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
T5 = COMMON | {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 1}
MODELS = {
    "Bert": ("Model", ENCODER),
    "Llama": ("ForCausalLM", DECODER),
    "Mistral": ("ForCausalLM", DECODER | {"sliding_window": 5}),
    "Gemma2": (
        "ForCausalLM",
        DECODER | {"sliding_window": 5, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.0},
    ),
    "GptOss": (
        "ForCausalLM",
        DECODER
        | {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}},
    ),
    "T5": ("ForConditionalGeneration", T5 | {"relative_attention_num_buckets": 8, "dropout_rate": 0.0}),
    "Bart": ("ForConditionalGeneration", SEQ2SEQ | {"init_std": 0.3, "forced_eos_token_id": None}),
}
ENTRIES = "attentions", "encoder_attentions", "decoder_attentions", "cross_attentions"


@pytest.fixture
def pair():
    """A function from the name of a family to two models of the same weights: eager's, and one with our attention."""

    def make(family):
        kind, settings = MODELS[family]
        config = getattr(transformers, f"{family}Config")(**settings)
        theirs = getattr(transformers, family + kind)._from_config(config, attn_implementation="eager").eval()
        ours = copy.deepcopy(theirs)
        regard.huggingface.swap(ours)
        return theirs, ours

    return make


def asked(family, length=13):
    tokens = torch.randint(3, 60, (2, length))
    return (
        {"input_ids": tokens[:, :-2], "decoder_input_ids": tokens}
        if family in ("T5", "Bart")
        else {"input_ids": tokens}
    )


def kept_by(family, expected):
    """The weights that eager attention returned, in the order in which maps are made: encoder, then by layer."""
    lists = [getattr(expected, entry) for entry in ENTRIES if getattr(expected, entry, None) is not None]
    if family not in ("T5", "Bart"):
        return list(lists[0])
    encoder, decoder, cross = lists
    return [*encoder, *(weights for both in zip(decoder, cross, strict=True) for weights in both)]


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", ["float16", "keep"])
def test_every_map_is_what_eager_attention_returns(family, dtype, pair, tmp_path):
    theirs, ours = pair(family)
    inputs = asked(family)
    with torch.no_grad():
        plain = ours(**inputs)
        with record(ours, dtype=dtype) as recording:
            recorded = ours(**inputs)
        expected = kept_by(family, theirs(**inputs, output_attentions=True))
    assert torch.equal(plain[0], recorded[0])
    recording.atlas().save(tmp_path / "run.atlas")
    maps = Atlas.open(tmp_path / "run.atlas").maps
    assert len(maps) == 2 * len(expected)
    for number, (weights, one) in enumerate((layer, one) for layer in range(len(expected)) for one in range(2)):
        shown = maps[number]
        assert shown.sequence == one
        every = [shown.weights(h, slice(0, shown.queries), slice(0, shown.keys)) for h in range(shown.heads)]
        assert (shown.rounding == 0.0) == (dtype == "keep")
        assert shown.rounding < 0.1
        np.testing.assert_allclose(np.stack(every), expected[weights][one], rtol=shown.rounding, atol=1e-5)


def test_names_and_kinds(pair):
    _, bert = pair("Bert")
    with record(bert) as recording:
        bert(**asked("Bert"))
    assert [call.name for call in recording.calls] == [f"encoder.layer.{n}.attention.self" for n in range(2)]
    _, bart = pair("Bart")
    with record(bart) as recording:
        bart(**asked("Bart"))
    kinds = {call.name: call.kind for call in recording.calls}
    assert kinds["model.decoder.layers.1.encoder_attn"] == "cross"
    assert kinds["model.decoder.layers.1.self_attn"] == kinds["model.encoder.layers.0.self_attn"] == "self"
    assert len(kinds) == 6


@pytest.mark.parametrize("padded", [False, True])
def test_generated_text_is_one_map(padded, pair):
    theirs, ours = pair("Llama")
    prompt = torch.randint(3, 60, (2, 5))
    mask = torch.ones_like(prompt)
    if padded:
        mask[0, :2] = 0
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "attention_mask": mask}
    plain = ours.generate(prompt, **options)
    with record(ours, dtype="keep") as recording:
        text = ours.generate(prompt, **options)
    assert torch.equal(plain, text)
    atlas = recording.atlas(tokens=[[str(int(token)) for token in line] for line in text])
    assert len(atlas.maps) == 4
    whole = torch.cat([mask, torch.ones(2, 5)], 1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0).long()
    with torch.no_grad():
        expected = theirs(text[:, :-1], attention_mask=whole, position_ids=positions, output_attentions=True).attentions
    for shown in atlas.maps:
        assert (shown.queries, shown.keys, shown.steps) == (10, 10, 6)
        assert shown.query_tokens == shown.key_tokens == tuple(str(int(t)) for t in text[shown.sequence, :-1])
        layer = int(shown.name.split(".")[2])
        first = 2 if padded and shown.sequence == 0 else 0  # eager gives padded rows the mean of everything
        for head in range(4):
            weights = shown.weights(head, slice(first, 10), slice(0, 10))
            np.testing.assert_allclose(weights, expected[layer][shown.sequence, head, first:], atol=1e-5)


def test_translated_text_is_one_cross_map(pair):
    _, ours = pair("Bart")
    source = torch.randint(3, 60, (1, 7))
    with record(ours, dtype="keep") as recording:
        text = ours.generate(source, max_new_tokens=5, min_new_tokens=5, do_sample=False, num_beams=1)
    atlas = recording.atlas()
    cross = [shown for shown in atlas.maps if shown.kind == "cross"]
    assert [(shown.queries, shown.keys, shown.steps) for shown in cross] == [(5, 7, 5)] * 2
    assert cross[0].query_positions.tolist() == [0, 1, 2, 3, 4]
    with record(ours, dtype="keep") as recording:
        ours(input_ids=source, decoder_input_ids=text[:, :-1])
    again = [shown for shown in recording.atlas().maps if shown.kind == "cross"]
    for one, other in zip(cross, again, strict=True):
        whole = slice(0, 5), slice(0, 7)
        np.testing.assert_allclose(one.weights(2, *whole), other.weights(2, *whole), atol=1e-5)


def test_two_translations_of_one_source_are_two_maps(pair):
    _, ours = pair("Bart")
    source = torch.randint(3, 60, (1, 7))
    options = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False, "num_beams": 1}
    encoded = ours.get_encoder()(source)
    for given in ({"inputs": source}, {"inputs": source, "encoder_outputs": encoded}):
        with record(ours) as recording:
            ours.generate(**given, **options)
            ours.generate(**given, **options)
        maps = [shown for shown in recording.atlas().maps if shown.name.startswith("model.decoder.layers.1")]
        assert [(shown.kind, shown.call, shown.queries, shown.keys) for shown in maps] == [
            ("self", 0, 5, 5),
            ("self", 5, 5, 5),
            ("cross", 0, 5, 7),
            ("cross", 5, 5, 7),
        ]


def test_a_bias_that_is_given_row_by_row_is_that_of_one_map(pair):
    """T5 adds a tensor to the scores of each step: a column longer every time."""
    theirs, ours = pair("T5")
    source, real = torch.randint(3, 60, (2, 7)), torch.arange(7) < torch.tensor([[5], [7]])
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": 1}
    with torch.no_grad():
        plain = ours.generate(source, attention_mask=real, **options)
        with record(ours, dtype="keep") as recording:
            text = ours.generate(source, attention_mask=real, **options)
        expected = theirs(source, real, decoder_input_ids=text[:, :-1], output_attentions=True)
    assert torch.equal(plain, text)
    maps = [shown for shown in recording.atlas().maps if shown.name.startswith("decoder")]
    assert [(shown.kind, shown.steps) for shown in maps] == [("self", 6), ("self", 6), ("cross", 6), ("cross", 6)] * 2
    for shown in maps:
        weights = expected.decoder_attentions if shown.kind == "self" else expected.cross_attentions
        whole = slice(0, shown.queries), slice(0, shown.keys)
        every = np.stack([shown.weights(head, *whole) for head in range(4)])
        np.testing.assert_allclose(every, weights[int(shown.name.split(".")[2])][shown.sequence], atol=1e-5)


@pytest.mark.parametrize("family", ["Llama", "Bart", "T5"])
def test_a_text_of_one_new_token(family, pair):
    _, ours = pair(family)
    prompt = torch.randint(3, 60, (1, 7))
    with record(ours) as recording:
        text = ours.generate(prompt, max_new_tokens=1, min_new_tokens=1, do_sample=False, num_beams=1)[0]
    words, source = ([str(int(token)) for token in of] for of in (text, prompt[0]))
    atlas = recording.atlas(tokens=words if family == "Llama" else (words, source))
    last = atlas.maps[-1]
    assert last.query_tokens == tuple(words[:-1])
    assert last.key_tokens == tuple(words[:-1] if family == "Llama" else source)


def test_beams_are_sequences(pair):
    _, ours = pair("Bart")
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "num_beams": 3}
    source = torch.randint(3, 60, (1, 7))
    plain = ours.generate(source, **options)
    with record(ours) as recording:
        assert torch.equal(ours.generate(source, **options), plain)
    cross = [shown for shown in recording.atlas().maps if shown.name == "model.decoder.layers.0.encoder_attn"]
    assert [shown.sequence for shown in cross] == [0, 1, 2]


def test_the_translations_of_a_beam_have_their_maps(pair):
    """As docs/looking.md says: the model says each of them once more."""
    theirs, ours = pair("Bart")
    ids = torch.randint(3, 60, (1, 7))
    options = {"num_beams": 3, "num_return_sequences": 3, "max_new_tokens": 4, "min_new_tokens": 4}
    found = ours.generate(ids, output_scores=True, return_dict_in_generate=True, **options)
    said = found.sequences
    with torch.no_grad(), record(ours, dtype="keep") as recording:
        ours(ids.expand(len(said), -1), decoder_input_ids=said[:, :-1], use_cache=False)
    given = [[f"{rank}.{place}" for place in range(said.shape[1] - 1)] for rank in range(3)]
    hypotheses = [RankedTranslation(rank, f"text {rank}", float(found.sequences_scores[rank])) for rank in range(3)]
    atlas = recording.atlas(tokens=(given, [f"s{place}" for place in range(7)]))
    atlas = atlas.with_hypotheses([hypotheses[of.sequence] for of in atlas.maps])
    cross = [of for of in atlas.maps if of.name == "model.decoder.layers.0.encoder_attn"]
    assert [of.hypothesis for of in cross] == hypotheses
    for rank, of in enumerate(cross):
        assert of.query_tokens == tuple(given[rank])
        with torch.no_grad():
            eager = theirs(ids, decoder_input_ids=said[rank : rank + 1, :-1], output_attentions=True)
        expected = eager.cross_attentions[0][0, 1].numpy()
        np.testing.assert_allclose(of.weights(1, slice(None), slice(None)), expected, atol=1e-5)


def test_what_was_not_swapped_is_not_caught(pair):
    theirs, _ = pair("Bert")
    with record(theirs) as recording:
        theirs(**asked("Bert"))
    with pytest.raises(ValueError, match=r"no attention was caught: BertModel has BertAttention.*swap\(model\)"):
        recording.atlas()
