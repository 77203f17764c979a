"""Our models recorded: results unchanged by a bit, weights those that they show themselves, steps put together."""

from typing import Any

import numpy as np
import pytest
import torch

from regard import nn
from regard.explorer import record, with_detected_roles
from regard.kernels.hooks import attention_hook
from regard.lenses import Weights
from regard.masks import causal
from regard.models.language_model import (
    AttentionConfig,
    GatedFeedForwardConfig,
    LanguageModel,
    LanguageModelConfig,
    LayerConfig,
)
from regard.models.recurrent import (
    BahdanauDecoder,
    BidirectionalEncoder,
    GlobalWindow,
    LuongDecoder,
    MonotonicWindow,
    PredictiveWindow,
    RecurrentTranslator,
)
from regard.models.recurrent.decoders import TanhReadout
from regard.models.recurrent.source_attention import SourceAttention
from regard.positions import Rotary
from regard.scores import Additive, Concat, General, Location
from regard.translation.build_model import build_model
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings, TransformerSettings

EMBEDDING, ENCODER, HIDDEN = 13, 7, 14
LENGTHS = torch.tensor([11, 4, 1])
SCORES = {
    "general": lambda: General(HIDDEN, 2 * ENCODER),
    "additive": lambda: Additive(HIDDEN, 2 * ENCODER, 5),
    "concat": lambda: Concat(HIDDEN, 2 * ENCODER, 5),
    "location": lambda: Location(HIDDEN, 29),
}
WINDOWS = {
    "global": lambda: GlobalWindow(),
    "local-m": lambda: MonotonicWindow(2),
    "local-p": lambda: PredictiveWindow(HIDDEN, 2),
}


def whole(shown):
    everything = slice(0, shown.queries), slice(0, shown.keys)
    return np.stack([shown.weights(head, *everything) for head in range(shown.heads)])


def close(shown, expected, atol=1e-6):
    np.testing.assert_allclose(whole(shown), expected.detach().numpy(), atol=atol)


def translator(decoder):
    encoder = BidirectionalEncoder(EMBEDDING, ENCODER)
    return RecurrentTranslator(19, 23, embedding_dim=EMBEDDING, encoder=encoder, decoder=decoder).eval()


def sentences():
    source = torch.randint(1, 19, (3, 11))
    source[torch.arange(11) >= LENGTHS[:, None]] = 0
    return source, LENGTHS, torch.randint(1, 23, (3, 5))


def luong(score, window, **options):
    attend = SourceAttention(SCORES[score](), WINDOWS[window]())
    return LuongDecoder(
        EMBEDDING, 2 * ENCODER, HIDDEN, attend=attend, readout=TanhReadout(2 * ENCODER, HIDDEN), **options
    )


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("stepwise", [False, True])
def test_a_recurrent_translator_is_one_map_a_sentence(score, window, stepwise):
    model, (source, lengths, target) = translator(luong(score, window)), sentences()

    def run():
        if not stepwise:
            return model(source, lengths, target)
        memory = model.encode(source, lengths)
        state, logits = model.start(memory), []
        for tokens in target.unbind(1):
            step = model.step(tokens, state, memory)
            state = step.state
            logits.append(step.logits)
        return torch.stack(logits, 1)

    plain = run()
    with record(model, dtype="keep") as recording:
        assert torch.equal(run(), plain)
    expected = model.attention_weights(source, lengths, target)
    atlas = recording.atlas(tokens=(list("vwxyz"), list("abcdefghijk")))
    assert [(shown.name, shown.kind, shown.steps) for shown in atlas.maps] == [
        ("decoder.attend", "cross", 5 if stepwise else 1)
    ] * 3
    for shown in atlas.maps:
        close(shown, expected[shown.sequence, None])
        assert shown.query_positions.tolist() == [0, 1, 2, 3, 4]
        assert (shown.query_tokens[1], shown.key_tokens[1]) == ("w", "b")
        real = int(LENGTHS[shown.sequence])
        exists = shown.exists(0, slice(0, 5), slice(0, 11))
        assert not exists[:, real:].any()
        if window == "global":
            assert exists[:, :real].all()


DOUBLE_LAYERS = {
    "dot": lambda: nn.Attention(nn.Projections(8, num_heads=2), mask=causal()),
    "additive": lambda: nn.Attention(nn.Projections(8, num_heads=2), score=Additive(4, 4, 5)),
    "linear": lambda: nn.LinearAttention(nn.Projections(8, num_heads=2)),
    "torch": lambda: torch.nn.TransformerEncoderLayer(8, 2, 11, batch_first=True, dropout=0.0),
}


@pytest.mark.parametrize("dtype", ["float16", "keep"])
@pytest.mark.parametrize("layer", DOUBLE_LAYERS)
def test_a_model_in_float64(layer, dtype):
    """Queries in half precision have a log-sum-exp in float32, as native code reads it; what is kept is as exact."""
    model = DOUBLE_LAYERS[layer]().double()
    x = torch.randn(2, 29, 8, dtype=torch.float64)
    seen = {}

    def look(problem, lse):
        seen["weights"] = Weights().compute(problem, lse)

    with attention_hook(look), torch.no_grad():
        plain = model(x) if layer != "torch" else None
    with record(model, dtype=dtype) as recording, torch.no_grad():
        output = model(x)
    atlas = recording.atlas(tokens=[str(number) for number in range(29)])
    assert with_detected_roles(atlas).maps
    for shown in atlas.maps:
        kept = whole(shown)
        np.testing.assert_allclose(kept.sum(-1), 1.0, atol=2e-3 if dtype == "float16" else 1e-6)
        if plain is not None:
            assert torch.equal(output, plain)
            close(shown, seen["weights"][shown.sequence], atol=2e-3 if dtype == "float16" else 1e-6)


def test_bahdanau_asks_word_by_word():
    model = translator(
        BahdanauDecoder(EMBEDDING, 2 * ENCODER, HIDDEN, score=SCORES["additive"](), cell="gru", readout_dim=17)
    )
    source, lengths, target = sentences()
    plain = model(source, lengths, target)
    with record(model, dtype="keep") as recording:  # of each step; unseen, all are one native call, rounded otherwise
        torch.testing.assert_close(model(source, lengths, target), plain, rtol=1e-5, atol=1e-6)
    expected = model.attention_weights(source, lengths, target)
    atlas = recording.atlas()
    assert [shown.steps for shown in atlas.maps] == [5, 5, 5]
    for shown in atlas.maps:
        close(shown, expected[shown.sequence, None])


def language_model(**first):
    rotary = Rotary(8)
    config = LanguageModelConfig(
        vocabulary_size=61,
        dim=32,
        layers=(LayerConfig(rotary=rotary, **first), LayerConfig(rotary=rotary)),
        attention=AttentionConfig(num_heads=4, num_kv_heads=2, sinks=True, softcap=20.0),
        feed_forward=GatedFeedForwardConfig(48),
    )
    return LanguageModel(config).eval()


def test_a_language_model_as_it_shows_itself():
    model, tokens = language_model(), torch.randint(0, 61, (2, 9))
    plain = model(tokens)
    with record(model, dtype="keep") as recording:
        assert torch.equal(model(tokens), plain)
    lens = Weights()
    seen = model.observe(tokens, lens)
    atlas = recording.atlas()
    assert [shown.kind for shown in atlas.maps] == ["self"] * 4
    for number, shown in enumerate(atlas.maps):
        close(shown, seen[lens][number // 2][shown.sequence])


def test_a_generated_text_is_one_map():
    model, prompt = language_model(), torch.randint(0, 61, (2, 4))
    with record(model, dtype="keep") as recording:
        text = torch.stack(list(model.generate(prompt, 6)), 1)
    text = torch.cat([prompt, text], 1)
    atlas = recording.atlas(tokens=[[str(int(token)) for token in line] for line in text])
    assert [(shown.queries, shown.keys, shown.steps) for shown in atlas.maps] == [(9, 9, 6)] * 4
    with record(model, dtype="keep") as recording:
        model(text[:, :-1])
    for one, other in zip(atlas.maps, recording.atlas().maps, strict=True):
        np.testing.assert_allclose(whole(one), whole(other), atol=1e-5)
        assert one.metrics["distance"] == pytest.approx(other.metrics["distance"], rel=1e-4)


def test_a_window_drops_keys_and_what_follows_stays_apart():
    model, prompt = language_model(before=3), torch.randint(0, 61, (1, 6))
    with record(model, dtype="keep") as recording:
        text = torch.stack(list(model.generate(prompt, 60)), 1)
    atlas = recording.atlas()
    windowed, full = (
        [of for of in atlas.maps if of.name == name] for name in dict.fromkeys(m.name for m in atlas.maps)
    )
    assert len(full) == 1
    assert len(windowed) > 1
    assert sum(shown.queries for shown in windowed) == 65
    with record(model, dtype="keep") as recording:
        model(torch.cat([prompt, text[:, :-1]], 1))
    expected = whole(recording.atlas().maps[0])
    for shown in windowed:
        here = expected[:, shown.query_positions][:, :, shown.key_positions]
        np.testing.assert_allclose(whole(shown), here, atol=1e-5)
    at = [position for shown in windowed for position in shown.query_positions.tolist()]
    assert at == list(range(65))


def test_a_transformer_by_its_layers():
    settings = {"dim": 12, "num_heads": 3, "hidden_dim": 17, "encoder_layers": 1, "decoder_layers": 2}
    model: Any = build_model(TransformerSettings.model_validate(settings), 19, 23).eval()
    source, lengths, target = sentences()
    plain = model(source, lengths, target)
    with record(model, dtype="keep") as recording:
        assert torch.equal(model(source, lengths, target), plain)
    lens = Weights()
    seen: Any = model.observe(source, lengths, target, lens)
    atlas = recording.atlas(tokens=(list("vwxyz"), list("abcdefghijk")))
    names = [shown.name for shown in atlas.maps[::3]]
    assert [name.split(".")[0] for name in names] == ["encoder"] + ["decoder"] * 4
    assert [shown.kind for shown in atlas.maps[::3]] == ["self", "self", "cross", "self", "cross"]
    expected = [seen.encoder[0].attention[lens]]
    for layer in seen.decoder:
        expected += [layer.attention[lens], layer.cross_attention[lens]]
    for number, shown in enumerate(atlas.maps):
        close(shown, expected[number // 3][shown.sequence])
    sides = [(shown.query_tokens[0], shown.key_tokens[0]) for shown in atlas.maps[:9:3]]
    assert sides == [("a", "a"), ("v", "v"), ("v", "a")]


def test_a_translators_steps_are_one_map_each():
    settings = {"dim": 12, "num_heads": 3, "hidden_dim": 17, "encoder_layers": 1, "decoder_layers": 1}
    model: Any = build_model(TransformerSettings.model_validate(settings), 19, 23).eval()
    source, lengths, target = sentences()

    def run():
        memory = model.encode(source, lengths)
        state, logits = model.start(memory), []
        for tokens in target.unbind(1):
            step = model.step(tokens, state, memory)
            state = step.state
            logits.append(step.logits)
        return torch.stack(logits, 1)

    plain = run()
    with record(model, dtype="keep") as recording:
        assert torch.equal(run(), plain)
    with record(model, dtype="keep") as at_once:
        model(source, lengths, target)
    steps, whole_target = recording.atlas().maps, at_once.atlas().maps
    assert [shown.steps for shown in steps] == [1] * 3 + [5] * 6
    for one, other in zip(steps, whole_target, strict=True):
        assert (one.name, one.kind) == (other.name, other.kind)
        np.testing.assert_allclose(whole(one), whole(other), atol=1e-5)


def test_a_second_pass_is_a_second_call():
    model, (source, lengths, target) = translator(luong("general", "global")), sentences()
    with record(model) as recording:
        model(source, lengths, target)
        model(source, lengths, target)
    assert [(shown.call, shown.sequence, shown.queries) for shown in recording.atlas().maps] == [
        (call, sequence, 5) for call in (0, 1) for sequence in range(3)
    ]


def test_steps_of_a_second_pass_are_a_second_map():
    """The source is the same, and so are the keys of every step."""
    model = translator(
        BahdanauDecoder(EMBEDDING, 2 * ENCODER, HIDDEN, score=SCORES["additive"](), cell="gru", readout_dim=17)
    )
    source, lengths, target = sentences()
    with record(model) as recording:
        model(source, lengths, target)
        model(source, lengths, target)
    assert [(shown.call, shown.steps) for shown in recording.atlas().maps[::3]] == [(0, 5), (5, 5)]


def test_a_second_pass_with_a_cache_is_a_second_map():
    settings = {"dim": 12, "num_heads": 3, "hidden_dim": 17, "encoder_layers": 1, "decoder_layers": 2}
    model: Any = build_model(TransformerSettings.model_validate(settings), 19, 23).eval()
    source, lengths, target = sentences()
    with record(model) as recording:
        memory = model.encode(source, lengths)
        for _ in range(2):
            state = model.start(memory)
            for tokens in target.unbind(1):
                state = model.step(tokens, state, memory).state
    cross = [shown for shown in recording.atlas().maps if shown.kind == "cross" and shown.sequence == 0]
    assert [(shown.call, shown.steps) for shown in cross] == [(0, 5), (5, 5)] * 2


def test_pooling_twice_is_two_maps():
    class Pooling(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.attention = torch.randn(1, 1, 8), torch.nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x):
            return self.attention(self.query, x, x)[0]

    model, x = Pooling(), torch.randn(1, 5, 8)
    with torch.no_grad(), record(model) as recording:
        model(x)
        model(x)
    assert [(shown.call, shown.queries) for shown in recording.atlas().maps] == [(0, 1), (1, 1)]


def test_the_places_of_a_beam_are_sequences():
    settings = {"dim": 12, "num_heads": 3, "hidden_dim": 17, "encoder_layers": 1, "decoder_layers": 1}
    model: Any = build_model(TransformerSettings.model_validate(settings), 19, 23).eval()
    source, lengths, _ = sentences()
    search = SearchSettings(beam=2)

    def found():
        return beam_search(model, source[:1], lengths[:1], search)

    plain = found()
    with record(model) as recording:
        ([seen], [alone]) = found(), plain
    for one, other in zip(seen, alone, strict=True):  # computed by modules, and in one native call
        assert one.ids == other.ids
        torch.testing.assert_close(one.weights, other.weights, rtol=1e-5, atol=1e-6)
        assert one.score == pytest.approx(other.score, rel=1e-5)
    cross = [shown for shown in recording.atlas().maps if shown.kind == "cross"]
    assert {shown.keys for shown in cross} == {11}
    assert max(shown.sequence for shown in cross) == 1
    assert sum(shown.steps for shown in cross if shown.sequence == 0) >= 2
