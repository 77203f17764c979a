"""Caches of fewer bits as methods: errors on tensors and in models, and the bits that each head needs."""

import math

import pytest
import torch
from torch import nn

import regard
from regard import masks
from regard.approximations import CosineSimilarity, Divergence, Perplexity, Stored, choose_cache
from regard.errors import ConfigurationError, ShapeError
from regard.models import LanguageModel
from regard.models import language_model as lm
from regard.nn import CacheFormat, KVCache, Packing

INT8 = CacheFormat()
INT4 = CacheFormat(Packing("int4"), Packing("int4"))
BY_CHANNEL = CacheFormat(Packing("int4", by_channel=True), Packing("int4"))
WHOLE = CacheFormat(None, None)


def biased(head, size):
    """A language model of two layers, whose second layer has keys with a few large dims in one head."""
    torch.manual_seed(0)
    layer = lm.LayerConfig()
    attention = lm.AttentionConfig(num_heads=4, num_kv_heads=2, bias=True)
    model = LanguageModel(lm.LanguageModelConfig(50, 32, (layer, layer), attention, lm.FeedForwardConfig(64))).eval()
    bias = model.get_parameter("blocks.1.attention.projections.key.bias")
    with torch.no_grad():
        bias.view(2, 8)[head, :2] = size
    return model


def tokens():
    return torch.randint(50, (2, 140), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("format_", [INT8, INT4, BY_CHANNEL, WHOLE], ids=str)
def test_the_output_is_that_of_attention_to_a_cache(format_):
    q, k, v = torch.randn(1, 4, 140, 16), *torch.randn(2, 1, 2, 140, 16)
    with torch.no_grad():
        cache = KVCache().packed(format_).append(k, v)
        wide = regard.attention(q, cache.keys.clone(), cache.values.clone(), mask=masks.causal())
    found = regard.approximation(q, k, v, format_, causal=True, lengths=())
    exact = regard.attention(q.double(), k.double(), v.double(), mask=masks.causal())
    error = ((wide - exact).square().sum((2, 3)) / exact.square().sum((2, 3))).sqrt()
    assert torch.allclose(found.heads, error, rtol=1e-3, atol=1e-6)
    assert found.weights is not None


def test_formats_by_head_and_tensors_without_heads():
    q, k, v = torch.randn(1, 4, 140, 16), *torch.randn(2, 1, 2, 140, 16)
    found = regard.approximation(q, k, v, Stored((WHOLE, INT4)), causal=True, lengths=())
    alone = regard.approximation(q, k, v, INT4, causal=True, lengths=())
    assert (found.heads[:, :2] < 1e-6).all()
    assert torch.allclose(found.heads[:, 2:], alone.heads[:, 2:])
    assert 0 < regard.approximation(q[0, 0], k[0, 0], v[0, 0], INT8, lengths=()).error < 0.02


def test_the_divergence_by_hand():
    exact, other = torch.randn(2, 3, 7), torch.randn(2, 3, 7)
    p, q = exact.double().softmax(-1), other.double().softmax(-1)
    expected = (p * (p / q).log()).sum(-1).flatten()
    assert torch.allclose(Divergence().values(other, exact, None).double(), expected, rtol=1e-5)
    assert (Divergence().values(exact, exact, None) == 0).all()
    padded = {"input_ids": None, "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]])}
    assert torch.allclose(Divergence().values(other, exact, padded).double(), expected[[0, 1, 3]], rtol=1e-5)
    with pytest.raises(ShapeError, match="the divergence of next tokens needs logits"):
        Divergence().values(torch.zeros(2, 3), torch.zeros(2, 3), None)


def test_each_head_gets_the_bits_that_it_needs():
    model = biased(head=1, size=60.0)
    chosen = choose_cache(model, tokens(), [INT8, INT4, BY_CHANNEL], Divergence(), error=0.2)
    first, second = chosen.formats.values()
    assert all(format_.bits == 4 for format_ in (*first, second[0]))
    assert second[1] in (BY_CHANNEL, INT8)  # in codes by token its other dims are lost
    plain = chosen.found.cells[chosen.found.layers[1], 0].heads
    assert plain is not None
    assert plain[2:].max() > 0.2 >= plain[:2].max()
    assert 0 < chosen.together < 1
    assert f"{chosen.bits:.3g} bits on average; divergence" in str(chosen)


def test_a_head_that_nothing_is_good_enough_for_stays_as_it_is():
    chosen = choose_cache(biased(0, 60.0), tokens(), [INT4], Divergence(), error=1e-6)
    assert all(format_ == WHOLE for formats in chosen.formats.values() for format_ in formats)
    assert chosen.bits == 16
    assert chosen.together == pytest.approx(0, abs=1e-9)


def test_the_chosen_formats_are_those_of_a_cache_of_the_model():
    model = biased(head=1, size=60.0)
    chosen = choose_cache(model, tokens(), [INT8, INT4, BY_CHANNEL], Perplexity(), error=0.2)
    cache = model.make_cache().packed([*chosen.formats.values()])
    with torch.no_grad():
        exact, logits = model(tokens()), []
        for part in tokens().split([128, *[1] * 12], 1):
            each, cache = model.step(part, cache)
            logits.append(each)
    joined = torch.cat(logits, 1)
    assert joined.shape == exact.shape
    difference = (joined.log_softmax(-1) - exact.log_softmax(-1)).abs().max()
    assert 0 < difference < 0.5
    assert len(list(model.generate(tokens()[:, :70], 5, cache=model.make_cache().packed(INT8)))) == 5


def test_a_table_of_a_model_names_the_formats():
    found = regard.model_approximation(biased(0, 1.0), tokens(), [INT8, BY_CHANNEL], Divergence())
    assert "a cache of keys int8, values int8" in str(found)
    assert "a cache of keys int4 by channel, values int4" in str(found)
    assert math.isfinite(found.cells[found.layers[0], 0].measure or math.nan)


class TestBadInput:
    def test_no_candidates(self):
        with pytest.raises(ConfigurationError, match="candidates are \\[\\]; they need formats"):
            choose_cache(nn.Identity(), tokens(), [], Divergence())

    def test_an_error_of_zero(self):
        with pytest.raises(ConfigurationError, match="error is 0; it needs a number above 0"):
            choose_cache(nn.Identity(), tokens(), [INT8], Divergence(), error=0)

    def test_formats_for_other_heads(self):
        q = torch.randn(1, 2, 5, 8)
        with pytest.raises(ConfigurationError, match="it has 2 key heads, and there are 3 formats"):
            regard.approximation(q, q, q, Stored((INT8,) * 3))

    def test_no_formats(self):
        with pytest.raises(ConfigurationError, match="they need one CacheFormat"):
            Stored(())

    def test_heads_that_do_not_fill_words(self):
        q = torch.randn(1, 2, 5, 12)
        with pytest.raises(ConfigurationError, match="int4 codes stand in groups of 8"):
            regard.approximation(q, q, q, INT4)

    def test_an_additive_score(self):
        layer = regard.nn.Attention(
            regard.nn.Projections(16, num_heads=2), score=regard.scores.Additive(8, 8, 8), mask=masks.causal()
        )
        found = regard.model_approximation(nn.Sequential(layer), torch.randn(1, 9, 16), INT8, CosineSimilarity())
        assert "codes are read by dot products alone" in str(found)

    def test_formats_for_other_layers(self):
        with pytest.raises(ConfigurationError, match="formats for 3 layers, and the cache has 2"):
            biased(0, 1.0).make_cache().packed([[INT8]] * 3)

    def test_latent_attention(self):
        attention = lm.LatentAttentionConfig(num_heads=4, latent_dim=24, rotary_dim=8, head_dim=16)
        layer = lm.LayerConfig(rotary=regard.positions.Rotary(8, layout="interleaved"))
        model = LanguageModel(lm.LanguageModelConfig(50, 64, (layer,), attention, lm.GatedFeedForwardConfig(64))).eval()
        with torch.no_grad(), pytest.raises(ShapeError, match="such a cache stores numbers as they are"):
            model.step(torch.zeros(1, 5, dtype=torch.int64), model.make_cache().packed(INT8))
