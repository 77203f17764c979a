"""Text that goes on: the likeliest tokens, or what is drawn; in chunks, in batches, until it stops."""

from dataclasses import replace

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.models.language_model import (
    AttentionConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    NormalizerConfig,
    Sampling,
)
from regard.models.language_model.next_tokens import CapturedStep, NextTokens
from regard.nn.caches import InPlaceCache
from regard.positions import NTK, DynamicNTK, LongRoPE, Rotary


def joined(stream):
    return torch.stack(list(stream), 1)


def naive(model, tokens, count):
    """Without a cache: the whole text again for every token."""
    for _ in range(count):
        tokens = torch.cat([tokens, model(tokens)[:, -1:].argmax(-1)], 1)
    return tokens[:, -count:]


def prompt(batch=3, length=9):
    return torch.randint(0, 61, (batch, length))


@pytest.mark.parametrize("chunk", [None, 1, 4, 9, 100])
@torch.no_grad()
def test_greedy_is_the_likeliest_token_of_the_whole(chunk, make):
    model, tokens = make(), prompt()
    assert torch.equal(joined(model.generate(tokens, 20, chunk=chunk)), naive(model, tokens, 20))


NORMALIZERS = [("entmax", None), ("relu", 2), ("sigmoid", -2.0), ("softmax1", None), ("softpick", None)]
NORMALIZERS += [("sparsemax", None), ("stick_breaking", None), ("top_scores", 3)]


@pytest.mark.parametrize(("kind", "number"), NORMALIZERS)
@torch.no_grad()
def test_any_normalizer_writes_what_the_whole_gives(kind, number, make):
    model, tokens = make(attention=AttentionConfig(4, normalizer=NormalizerConfig(kind, number))), prompt()
    assert torch.equal(joined(model.generate(tokens, 20, chunk=4)), naive(model, tokens, 20))


@pytest.mark.parametrize("chunk", [None, 2, 5])
@torch.no_grad()
def test_a_padded_sentence_goes_on_as_if_alone(chunk, make):
    model, tokens, lengths = make(), prompt(), torch.tensor([9, 4, 1])
    together = joined(model.generate(tokens, 20, lengths=lengths, chunk=chunk))
    for row, length in enumerate(lengths.tolist()):
        assert torch.equal(together[row : row + 1], naive(model, tokens[row : row + 1, 9 - length :], 20))


@torch.no_grad()
def test_lengths_are_a_list_or_a_tensor(make):
    model, tokens = make(), prompt()
    expected = joined(model.generate(tokens, 5, lengths=torch.tensor([9, 4, 1])))
    assert torch.equal(joined(model.generate(tokens, 5, lengths=[9, 4, 1])), expected)
    assert joined(model.generate(tokens[:1], 2, lengths=[2])).shape == (1, 2)
    for wrong in ([1.5, 2, 3], 4, ["9", 4, 1]):
        with pytest.raises(ShapeError, match="a whole number for each of the 3 sequences, as a tensor or a list"):
            model.generate(tokens, 5, lengths=wrong)


def test_padding_on_the_right_is_warned_of(make, recwarn):
    model, tokens = make(), prompt().clamp(min=2)
    tokens[:, :5] = torch.arange(2, 7)
    columns, lengths = torch.arange(9), torch.tensor([9, 6, 4])
    model.generate(tokens.masked_fill(columns < 9 - lengths[:, None], 0), 1, lengths=lengths)
    model.generate(tokens[:, :1].expand(3, 9), 1, lengths=lengths)
    assert not recwarn
    with pytest.warns(UserWarning, match="look padded on the right, but the lengths of generate count from the end"):
        model.generate(tokens.masked_fill(columns >= lengths[:, None], 0), 1, lengths=lengths)


@torch.no_grad()
def test_tokens_come_as_soon_as_they_are_known(make, monkeypatch):
    model, calls = make(), []
    real = model.next_features
    monkeypatch.setattr(model, "next_features", lambda *args, **named: calls.append(1) or real(*args, **named))
    stream = model.generate(prompt(), 1000)
    assert calls == []
    next(stream)
    next(stream)
    assert len(calls) == 2


@torch.no_grad()
def test_a_long_beginning_is_read_in_parts(make, monkeypatch):
    model, parts, tokens = make(), [], prompt(1, 2500)
    real = model.next_features
    monkeypatch.setattr(
        model, "next_features", lambda part, *args, **named: parts.append(part.shape[1]) or real(part, *args, **named)
    )
    in_parts = joined(model.generate(tokens, 3))
    assert parts == [1024, 1024, 452, 1, 1]
    parts.clear()
    assert torch.equal(joined(model.generate(tokens, 3, chunk=2500)), in_parts)
    assert parts == [2500, 1, 1]


@pytest.mark.parametrize(
    "scaling",
    [DynamicNTK(2.0, 256), LongRoPE([1.0] * 4, [2.0, 3.0, 4.0, 5.0], 1100, 4.0), NTK(2.0)],
    ids=["dynamic", "longrope", "constant"],
)
@torch.no_grad()
def test_a_long_beginning_is_read_as_the_whole_is(make, scaling):
    model, tokens = make((LayerConfig(rotary=Rotary(8, scaling=scaling)),) * 2), prompt(8, 1500)
    assert torch.equal(joined(model.generate(tokens, 1)), naive(model, tokens, 1))


@torch.no_grad()
def test_it_stops_where_all_have_stopped(make):
    model, tokens = make(), prompt()
    endless = naive(model, tokens, 30)
    stops = {int(endless[0, 2]), int(endless[1, 5]), int(endless[2, 1])}
    first = [next(at for at, token in enumerate(row.tolist()) if token in stops) for row in endless]
    found = joined(model.generate(tokens, 30, stop=stops))
    assert found.shape[1] == max(first) + 1
    for row, at in enumerate(first):
        assert torch.equal(found[row, : at + 1], endless[row, : at + 1])
        assert (found[row, at:] == endless[row, at]).all()  # the last token again, until all have stopped


@torch.no_grad()
def test_one_stop_token(make):
    model, tokens = make(), prompt(batch=1)
    stop = int(naive(model, tokens, 1))
    for said in (stop, [stop], torch.tensor([stop])):
        assert joined(model.generate(tokens, 30, stop=said)).tolist() == [[stop]]


def test_no_gradient_is_kept_and_none_is_switched_off(make):
    model = make()
    stream = model.generate(prompt(), 2)
    assert not next(stream).requires_grad
    assert torch.is_grad_enabled()
    assert next(iter(model.parameters())).requires_grad


def test_a_seed_draws_the_same_again(make):
    model, tokens = make(), prompt()

    def drawn(seed):
        generator = torch.Generator().manual_seed(seed)
        return joined(model.generate(tokens, 20, sampling=Sampling(1.5), generator=generator))

    assert torch.equal(drawn(3), drawn(3))
    assert not torch.equal(drawn(3), drawn(4))


@torch.no_grad()
def test_what_is_drawn_is_as_frequent_as_the_model_expects(make):
    model, tokens = make(), prompt(batch=1)
    sampling = Sampling(temperature=0.7, top_k=5)
    drawn = joined(model.generate(tokens.expand(5_000, -1), 1, sampling=sampling)).flatten()
    found = drawn.bincount(minlength=61) / len(drawn)
    logits = model(tokens)[0, -1] / 0.7
    expected = logits.masked_fill(logits < logits.topk(5).values[-1], -torch.inf).softmax(-1)
    assert int((expected > 0).sum()) == 5
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [None, 1, 7, 100])
@pytest.mark.parametrize("top_p", [None, 0.05, 0.5, 0.9, 1.0])
def test_what_is_left_is_what_transformers_leaves(temperature, top_k, top_p):
    process = pytest.importorskip("transformers.generation.logits_process")
    logits = torch.randn(5, 61) * 2
    expected = process.TemperatureLogitsWarper(temperature)(None, logits)
    if top_k is not None:
        expected = process.TopKLogitsWarper(top_k)(None, expected)
    if top_p is not None:
        expected = process.TopPLogitsWarper(top_p)(None, expected)
    found = Sampling(temperature, top_k, top_p).probabilities(logits)
    torch.testing.assert_close(found, expected.softmax(-1), atol=1e-6, rtol=0)


def test_no_tokens_are_none(make):
    assert list(make().generate(prompt(), 0)) == []


@pytest.mark.parametrize(
    ("error", "message", "arguments"),
    [
        (ShapeError, "one token at least to go on from", {"tokens": torch.zeros(2, 0, dtype=torch.int64)}),
        (ShapeError, r"shape \(4,\)", {"tokens": torch.arange(4)}),
        (ConfigurationError, "max_new_tokens is -1; it needs at least 0", {"max_new_tokens": -1}),
        (ConfigurationError, "chunk is 0", {"chunk": 0}),
        (ConfigurationError, r"stop has the token 999, but the vocabulary has 61, 0\.\.60: it would", {"stop": 999}),
        (ConfigurationError, "stop has the token -1, but", {"stop": [3, -1]}),
        (ConfigurationError, r"stop is 'a'; it needs a token, or several: whole numbers in 0\.\.60", {"stop": "a"}),
        (ConfigurationError, r"stop is 2\.0; it needs", {"stop": 2.0}),
        (ConfigurationError, r"stop is None; it needs", {"stop": None}),
        (ShapeError, r"lengths is torch.int64 \(2,\); it needs a whole number for each of the 3", {"lengths": [1, 2]}),
        (ShapeError, r"lengths is torch.float32", {"lengths": [1.0, 2.0, 3.0]}),
        (ShapeError, r"lengths are \[0, 2, 3\]; they need to be in 1..9", {"lengths": [0, 2, 3]}),
        (ShapeError, r"lengths are \[10, 2, 3\]", {"lengths": [10, 2, 3]}),
    ],
)
def test_what_does_not_fit_is_said_before_the_first_token(error, message, arguments, make):
    if "lengths" in arguments:
        arguments = {"lengths": torch.tensor(arguments["lengths"])}
    with pytest.raises(error, match=message):
        make().generate(**{"tokens": prompt(), "max_new_tokens": 3} | arguments)


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("temperature is 0; it needs a finite number above 0. Without sampling= the likeliest", {"temperature": 0}),
        ("top_k is 0", {"top_k": 0}),
        (r"top_p is 0.0; it needs a probability in \(0, 1\]", {"top_p": 0.0}),
        ("top_p is 1.5", {"top_p": 1.5}),
    ],
)
def test_sampling_out_of_range(message, arguments):
    with pytest.raises(ConfigurationError, match=message):
        Sampling(**arguments)


@torch.no_grad()
def test_captured_steps_are_the_usual_ones(make):
    model, tokens = make(), prompt()
    assert torch.equal(joined(model.generate(tokens, 20, captured=True)), joined(model.generate(tokens, 20)))
    lengths = torch.tensor([9, 4, 1])
    padded = joined(model.generate(tokens, 20, lengths=lengths, captured=True))
    assert torch.equal(padded, joined(model.generate(tokens, 20, lengths=lengths)))
    for count in (0, 1, 2):
        assert len(list(model.generate(tokens, count, captured=True))) == count


LATENT = LatentAttentionConfig(4, latent_dim=10, rotary_dim=8, head_dim=5, query_latent_dim=9)
ATTENTION = {"latent": LATENT, "with an indexer": replace(LATENT, indexer=IndexerConfig(24, 8, 4))}


@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION.keys())
@torch.no_grad()
def test_captured_steps_of_latent_attention_are_the_usual_ones(attention, make):
    model, tokens = make(attention=attention), prompt()
    expected = joined(model.generate(tokens, 20))
    assert torch.equal(joined(model.generate(tokens, 20, captured=True)), expected)
    whole = torch.cat([tokens, expected], 1)
    assert torch.equal(model(whole)[:, 8:-1].argmax(-1), expected)
    lengths = torch.tensor([9, 4, 1])
    padded = joined(model.generate(tokens, 20, lengths=lengths, captured=True))
    assert torch.equal(padded, joined(model.generate(tokens, 20, lengths=lengths)))


@torch.no_grad()
def test_captured_steps_draw_and_stop_as_the_usual_ones(make):
    model, tokens, sampling = make(), prompt(), Sampling(temperature=2.0, top_k=20)

    def drawn(captured: bool, **options) -> torch.Tensor:
        generator = torch.Generator().manual_seed(3)
        return joined(model.generate(tokens, 30, sampling=sampling, generator=generator, captured=captured, **options))

    free = drawn(False)
    assert torch.equal(drawn(True), free)
    stop = free[0, 4].item()
    assert torch.equal(drawn(True, stop=stop), drawn(False, stop=stop))


@torch.no_grad()
def test_a_captured_step_allocates_no_keys(make):
    model, tokens = make(), prompt()
    features, cache = model.next_features(tokens, model.make_cache())
    chosen = model.logits(features[:, -1:])[:, 0].argmax(-1)
    state = NextTokens(
        model, cache, chosen, torch.tensor([], dtype=torch.int64), None, lambda logits: logits.argmax(-1)
    )
    step = CapturedStep(state, 4, None)
    caches = [layer.attention for layer in state.cache.layers if isinstance(layer.attention, InPlaceCache)]
    assert len(caches) == len(state.cache.layers)
    before = [cache.keys.data_ptr() for cache in caches]
    held = state.tokens.data_ptr(), state.done.data_ptr()
    for _ in range(4):
        step.step()
    assert all(layer.attention is cache for layer, cache in zip(state.cache.layers, caches, strict=True))
    assert [cache.keys.data_ptr() for cache in caches] == before
    assert (state.tokens.data_ptr(), state.done.data_ptr()) == held
    assert all(int(cache.filled) == 13 == cache.keys.shape[2] for cache in caches)


def test_what_cannot_be_captured_is_refused(make):
    layers = [LayerConfig(rotary=Rotary(4, scaling=DynamicNTK(2.0, 8)))] * 3
    with pytest.raises(ConfigurationError, match="depend on the length of the text.*leave captured out"):
        make(layers=tuple(layers)).generate(prompt(), 3, captured=True)
