"""Models whose layers attend to keys that an indexer chooses, their own or that of an earlier layer."""

from dataclasses import replace

import pytest
import torch
from torch.utils.checkpoint import checkpoint as recomputed

from regard.errors import ConfigurationError
from regard.lenses import Weights
from regard.models import LanguageModel
from regard.models.language_model import (
    AttentionConfig,
    IndexerConfig,
    LatentAttentionConfig,
    LayerConfig,
    LinearAttentionConfig,
)
from regard.models.language_model.huggingface.architectures import configuration
from regard.nn import TOVA
from regard.positions import Rotary

COUNT, LENGTH = 4, 19
FULL = LayerConfig(rotary=Rotary(8, layout="interleaved"))
LATENT = LatentAttentionConfig(
    4, latent_dim=10, rotary_dim=8, head_dim=5, query_latent_dim=9, indexer=IndexerConfig(24, 9, COUNT)
)  # of few heads many scores are 0, all equal, and any of them may be chosen
SOURCES = (None, 0, 0, None, 3)
KINDS = {
    "own": {"layers": (FULL,) * 3},
    "shared": {"layers": tuple(replace(FULL, chosen_by=source) for source in SOURCES)},
    "windows": {"layers": (replace(FULL, before=7), replace(FULL, before=7, chosen_by=0), FULL)},
}
every = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def text(batch=3, length=LENGTH):
    return torch.randint(0, 61, (batch, length))


def close(actual, expected, tolerance=1e-12):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def of(make, changes) -> LanguageModel:
    return make(**{"attention": LATENT} | changes).double()


@every
@torch.no_grad()
def test_steps_are_the_whole(changes, make):
    model, tokens = of(make, changes), text()
    cache, outputs = model.make_cache(), []
    for part in tokens.split([7, 1, 1, 4, 1, 1, 1, 1, 1, 1], dim=1):
        logits, cache = model.step(part, cache)
        outputs.append(logits)
    close(torch.cat(outputs, 1), model(tokens))


@every
@torch.no_grad()
def test_text_is_generated_as_without_a_cache(changes, make):
    model, tokens = of(make, changes), text(length=6)
    whole = tokens
    for _ in range(12):
        whole = torch.cat([whole, model(whole)[:, -1:].argmax(-1)], 1)
    for captured in (False, True):
        found = torch.stack(list(model.generate(tokens, 12, captured=captured, chunk=4)), 1)
        assert torch.equal(found, whole[:, 6:])


@torch.no_grad()
def test_layers_attend_to_the_keys_that_were_chosen_for_them(make):
    model, tokens = of(make, KINDS["shared"]), text()
    seen = model.observe(tokens, weights := Weights())
    keys = [layer[:, 0] > 0 for layer in seen[weights]]
    assert all((each.sum(-1) == (torch.arange(LENGTH) + 1).clamp(max=COUNT)).all() for each in keys)
    assert torch.equal(keys[0], keys[1])
    assert torch.equal(keys[0], keys[2])
    assert torch.equal(keys[3], keys[4])
    assert not torch.equal(keys[0], keys[3])
    cache = model.make_cache()
    _, cache = model.step(tokens[:, :-1], cache)
    stepped, cache = model.observe_step(tokens[:, -1:], cache, weights)
    for whole, last in zip(seen[weights], stepped[weights], strict=True):
        close(last, whole[..., -1:, :])
    assert [layer.attention.values.shape[-1] for layer in cache.layers] == [9, 0, 0, 9, 0]  # type: ignore[attr-defined]


def test_layers_that_are_computed_again_choose_the_same_keys(make):
    model, tokens = of(make, KINDS["shared"]), text()

    def gradients(call_block=None):
        features = model.features(tokens, call_block=call_block)
        wanted = [value for name, value in model.named_parameters() if "indexer" not in name and "output.w" not in name]
        return torch.autograd.grad(features.square().sum(), wanted, allow_unused=True)

    def again(block, x, **call):
        return recomputed(block, x, use_reentrant=False, **call)

    found, expected = gradients(again), gradients()
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            close(one, other)


def test_the_indexer_takes_no_gradient(make):
    model = of(make, KINDS["shared"])
    model(text()).sum().backward()
    without = [name for name, value in model.named_parameters() if value.grad is None]
    assert without
    assert all(".indexer." in name for name in without)
    assert {name.split(".")[1] for name in without} == {"0", "3"}


@torch.no_grad()
def test_what_was_saved_comes_back(make, tmp_path):
    model, tokens = of(make, KINDS["shared"]), text()
    model.save(tmp_path)
    again = LanguageModel.load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(tokens), model(tokens))


@pytest.mark.parametrize(
    ("message", "sources"),
    [
        (r"layer 0 has chosen_by=0; it needs the number of an earlier layer", (0,)),
        (r"layer 1 has chosen_by=2; it needs", (None, 2, None)),
        (r"layer 1 has chosen_by=-1; it needs", (None, -1)),
        (r"layer 1 has chosen_by=True; it needs", (None, True)),
        (r"layer 2 has chosen_by=1, but layer 1 has no indexer of its own", (None, 0, 1)),
    ],
)
def test_layers_that_can_choose_for_no_other(message, sources, make):
    with pytest.raises(ConfigurationError, match=message):
        of(make, {"layers": tuple(replace(FULL, chosen_by=source) for source in sources)})


def test_what_cannot_be(make):
    pair = FULL, replace(FULL, chosen_by=0)
    for attention in (AttentionConfig(4), replace(LATENT, indexer=None)):
        with pytest.raises(ConfigurationError, match=r"layer 0 has no indexer of its own: name one that has, of a mod"):
            make(pair, attention=attention)
    with pytest.raises(ConfigurationError, match=r"the keys that layer 0 chooses are of causal\(\) & window"):
        make((replace(FULL, before=3), pair[1]), attention=LATENT)
    with pytest.raises(
        ConfigurationError, match="an indexer reads the latent of queries, but query_latent_dim is None"
    ):
        replace(LATENT, query_latent_dim=None)
    with pytest.raises(ConfigurationError, match=r"give the layer LinearAttentionConfig\(heads=...\)"):
        make((FULL, LayerConfig(linear=LinearAttentionConfig())), attention=LATENT)


def test_latent_attention_shares_no_keys(make):
    layers = FULL, replace(FULL, keys_from=0)
    with pytest.raises(ConfigurationError, match="layer 1 is of latent attention, which has no keys that layers share"):
        make(layers, attention=replace(LATENT, indexer=None))
    heads = AttentionConfig(4, 1)
    with pytest.raises(ConfigurationError, match="layer 0 is of latent attention, which has no keys that layers share"):
        make((FULL, replace(layers[1], attention=heads)), attention=replace(LATENT, indexer=None))


@torch.no_grad()
def test_keys_that_are_evicted_by_weight(make):
    model, tokens = of(make, KINDS["own"]), text()
    cache, whole = model.make_cache(eviction=TOVA(2 * LENGTH)), model(tokens)
    outputs = []
    for part in tokens.split([7, 1, 11], 1):
        logits, cache = model.step(part, cache)
        outputs.append(logits)
    close(torch.cat(outputs, 1), whole)  # nothing had to go
    cache = model.make_cache(eviction=TOVA(9))
    for part in tokens.split([7, 1, 10, 1], 1):
        logits, cache = model.step(part, cache)
        assert logits.isfinite().all()
    assert all(len(layer.attention) <= 10 for layer in cache.layers)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="layer 1 attends to the keys that layer 0 has chosen by columns"):
        of(make, KINDS["shared"]).make_cache(eviction=TOVA(9))


GLM = {"model_type": "glm_moe_dsa", "vocab_size": 9, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 6}
GLM |= {"num_attention_heads": 64}


@pytest.mark.parametrize(
    ("settings", "sources"),
    [
        ({}, [None] * 6),
        ({"index_topk_freq": 1}, [None] * 6),
        ({"index_topk_freq": 3}, [None, None, 1, 1, None, 4]),
        ({"index_topk_freq": 2, "index_skip_topk_offset": 3}, [None, None, None, 2, None, 4]),
        ({"index_topk_pattern": "FSSFSF"}, [None, 0, 0, None, 3, None]),
        ({"index_topk_pattern": ["full", "shared"] * 3}, [None, 0, None, 2, None, 4]),
        ({"indexer_types": ["full"] + ["shared"] * 5, "index_topk_freq": 2}, [None, 0, 0, 0, 0, 0]),
    ],
)
def test_layers_of_glm_with_and_without_an_indexer(settings, sources):
    """As transformers' own configuration has them."""
    assert [layer.chosen_by for layer in configuration(GLM | settings).layers] == sources
    transformers = pytest.importorskip("transformers")
    theirs = transformers.GlmMoeDsaConfig(num_hidden_layers=6, **settings).indexer_types
    assert ["full" if source is None else "shared" for source in sources] == theirs


@every
@torch.no_grad()
def test_a_compiled_model_is_the_same(changes, make):
    torch.compiler.reset()
    model, tokens = of(make, changes), text()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    close(compiled(tokens), model(tokens))
