"""The model itself: steps are the whole, what is passed along keeps its promises, what does not fit is refused."""

import pytest
import torch
from torch import nn

from regard import masks
from regard.errors import ConfigurationError, DeviceError, DtypeError, ShapeError
from regard.lenses import Weights
from regard.models.language_model import (
    AttentionConfig,
    ExpertsConfig,
    FeedForwardConfig,
    GatedExpertsConfig,
    GatedFeedForwardConfig,
    GatedMixtureOfExperts,
    LanguageModelCache,
    LanguageModelConfig,
    LatentAttentionConfig,
    LayerConfig,
    LayerNormConfig,
    MixtureOfExperts,
    RMSNormConfig,
    RouterConfig,
    SoftmaxRouter,
)
from regard.nn import FeedForward, GatedFeedForward, PreNorm, RMSNorm, SandwichNorm
from regard.positions import Rotary, YaRN

ROTARY = Rotary(8)
KINDS = {
    "as it is": {},
    "tied, scaled, capped": {"tied": True, "embedding_scale": 32**0.5, "logit_softcap": 3.0},
    "layer norms, plain": {"norm": LayerNormConfig(), "feed_forward": FeedForwardConfig(40, "gelu")},
    "sandwich, GeGLU": {"sandwich": True, "feed_forward": GatedFeedForwardConfig(40, "gelu_tanh", bias=True)},
    "experts": {"feed_forward": ExpertsConfig(24, 4, 2)},
    "shared expert": {"feed_forward": GatedExpertsConfig(24, 4, 2, normalized=False, shared_dim=20)},
    "latent": {
        "attention": LatentAttentionConfig(
            4, latent_dim=10, rotary_dim=8, head_dim=5, value_dim=7, query_latent_dim=9, bias=True, scale=0.4
        )
    },
    "latent, no latent of the query": {"attention": LatentAttentionConfig(4, latent_dim=10, rotary_dim=9)},
    "groups of experts": {
        "feed_forward": GatedExpertsConfig(
            24, 6, 2, shared_dim=9, shared_gate=False, router=RouterConfig("sigmoid", 3, 2, 1.5)
        )
    },
    "norms of heads": {"attention": AttentionConfig(4, 1, 8, bias=True, norm=RMSNormConfig(offset=1.0), scale=0.5)},
    "no rotary": {"layers": [LayerConfig(), LayerConfig(before=2)]},
    "first tokens stay": {"layers": [LayerConfig(before=3, prefix=2, rotary=ROTARY)] * 2},
    "two rotaries": {
        "layers": [LayerConfig(before=3, rotary=ROTARY), LayerConfig(rotary=Rotary(6, scaling=YaRN(2.0, 8)))]
    },
}
every = pytest.mark.parametrize("changes", KINDS.values(), ids=KINDS.keys())


def text(batch=3, length=19):
    return torch.randint(0, 61, (batch, length))


def close(actual, expected, tolerance=1e-5):
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


@every
@torch.no_grad()
def test_steps_are_the_whole(changes, make):
    model, tokens = make(**changes).double(), text()
    cache, outputs = model.make_cache(), []
    for part in tokens.split([7, 1, 1, 4, 1, 1, 1, 1, 1, 1], dim=1):
        logits, cache = model.step(part, cache)
        outputs.append(logits)
    close(torch.cat(outputs, 1), model(tokens), 1e-12)
    assert cache.next_position == 19


@every
def test_every_parameter_learns(changes, make):
    model = make(**changes)
    model(text(batch=8)).logsumexp(-1).sum().backward()
    without = [name for name, value in model.named_parameters() if value.grad is None or not value.grad.any()]
    assert without == []


@every
@torch.no_grad()
def test_no_token_sees_what_follows(changes, make):
    model, tokens = make(**changes), text()
    other = tokens.clone()
    other[:, 11:] = (other[:, 11:] + 1) % 61
    logits, changed = model(tokens), model(other)
    close(logits[:, :11], changed[:, :11])
    assert not torch.allclose(logits[:, 11:], changed[:, 11:], atol=1e-2)


@torch.no_grad()
def test_a_window_is_all_that_layers_see(make):
    """Two layers that look 2 tokens back: what is 5 tokens back is out of sight, what is 4 back is not."""
    model, tokens = make([LayerConfig(before=2, rotary=ROTARY)] * 2).double(), text(batch=1)
    logits = model(tokens)[:, -1]
    for back, seen in ((5, False), (4, True)):
        other = tokens.clone()
        other[:, -1 - back] = (other[:, -1 - back] + 1) % 61
        assert torch.equal(model(other)[:, -1], logits) != seen


@torch.no_grad()
def test_packed_documents_are_read_as_if_alone(make):
    model, tokens = make(), text(batch=2)
    ids = torch.tensor([[0] * 7 + [1] * 12, [5] * 3 + [6] * 16])
    logits = model(tokens, mask=masks.documents(ids))
    close(logits[:1, :7], model(tokens[:1, :7]))
    close(logits[:1, 7:], model(tokens[:1, 7:]))
    close(logits[1:, :3], model(tokens[1:, :3]))
    close(logits[1:, 3:], model(tokens[1:, 3:]))


@torch.no_grad()
def test_a_bool_mask_is_one_too(make):
    model, tokens = make(), text(batch=2)
    lengths = torch.tensor([19, 6])
    exists = torch.arange(19) < lengths[:, None]
    expected = model(tokens, mask=masks.padding(lengths=lengths))
    close(model(tokens, mask=exists[:, None, None, :]), expected)


@torch.no_grad()
def test_positions_count_for_masks_and_rotaries(make):
    model, tokens = make(), text()
    close(model(tokens, positions=torch.arange(19) + 100), model(tokens))
    spread = torch.arange(19) * 7  # no token is within another one's window
    assert not torch.allclose(model(tokens, positions=spread), model(tokens), atol=1e-2)


@torch.no_grad()
def test_lenses_see_every_layer(make):
    model, tokens, weights = make(), text(), Weights()
    seen = model.observe(tokens, weights)
    close(seen.logits, model(tokens))
    assert [tuple(layer.shape) for layer in seen[weights]] == [(3, 4, 19, 19)] * 2
    near, far = seen[weights]
    assert not near[..., 10, :6].any()
    assert far[..., 10, :11].all()
    assert (near.sum(-1) < 1).all()  # the sinks take their share


@torch.no_grad()
def test_lenses_see_every_layer_of_a_step(make):
    model, tokens, weights = make(), text(), Weights()
    _, cache = model.step(tokens[:, :18], model.make_cache())
    seen, after = model.observe_step(tokens[:, 18:], cache, weights)
    close(seen.logits, model.step(tokens[:, 18:], cache)[0])
    assert after.next_position == 19
    whole = model.observe(tokens, weights)[weights]
    for step, layer in zip(seen[weights], whole, strict=True):
        close(step[..., 0, :], layer[..., -1, -step.shape[-1] :])


@torch.no_grad()
def test_a_rolling_cache_stays_small(make):
    """Windows of 5 and 12 tokens, at any length: the most that is held in 300 tokens is what 900 take."""
    model = make([LayerConfig(before=4, prefix=2, rotary=ROTARY), LayerConfig(before=11)])
    cache, sizes = model.make_cache(), []
    for part in torch.randint(0, 61, (1, 900)).split(5, dim=1):
        _, cache = model.next_features(part, cache)
        sizes.append(cache.nbytes)
    assert max(sizes) == max(sizes[:60])  # of 5 tokens each
    assert max(len(layer.attention) for layer in cache.layers) <= 12 * 1.5 + 32 + 5
    assert cache.layers[0].attention.positions[:2].tolist() == [0, 1]


@torch.no_grad()
def test_a_cache_is_a_value(make):
    model, tokens = make(), text()
    _, cache = model.step(tokens[:, :9], model.make_cache())
    ahead = [model.step(tokens[:, 9:12], cache)[0] for _ in range(2)]
    assert torch.equal(*ahead)
    rows = torch.tensor([2, 0, 2])
    chosen, _ = model.step(tokens[rows, 9:12], cache.reorder(rows))
    close(chosen, ahead[0][rows])


@torch.no_grad()
def test_equal_rotaries_are_computed_once(make, monkeypatch):
    model, calls = make([LayerConfig(rotary=Rotary(8)), LayerConfig(before=3, rotary=Rotary(8)), LayerConfig()]), []
    real = Rotary.rotation
    monkeypatch.setattr(Rotary, "rotation", lambda *args, **named: calls.append(1) or real(*args, **named))
    model(text())
    _, cache = model.step(text(), model.make_cache())
    model.observe(text())
    model.observe_step(text(), cache)
    assert len(calls) == 4


def test_modules_are_those_of_the_configuration(make):
    model = make()
    block = model.blocks[0]
    assert isinstance(block.feed_forward, GatedFeedForward)
    assert isinstance(block.attention_residual, PreNorm)
    assert isinstance(model.norm, RMSNorm)
    assert repr(block.attention.mask) == "causal() & window(before=4)"
    other = make(
        sandwich=True,
        norm=LayerNormConfig(bias=False),
        feed_forward=FeedForwardConfig(7, "relu", bias=False),
        tied=True,
    )
    assert isinstance(other.blocks[0].feed_forward, FeedForward)
    assert isinstance(other.blocks[0].feed_forward_residual, SandwichNorm)
    assert isinstance(other.norm, nn.LayerNorm)
    assert other.norm.bias is None
    assert other.output is None


def test_experts_are_their_formula():
    """Each token by itself, expert by expert, as the model card has it."""
    layer = MixtureOfExperts(6, 10, 5, 2, alpha=1.3, limit=0.4)
    nn.init.normal_(layer.gate_up_bias)
    nn.init.normal_(layer.down_bias)
    inputs = torch.randn(2, 7, 6)
    expected = torch.zeros_like(inputs)
    for sentence, place in torch.cartesian_prod(torch.arange(2), torch.arange(7)).tolist():
        x = inputs[sentence, place]
        logits = layer.router(x)
        best = logits.argsort(descending=True)[:2].tolist()
        total = sum(logits[expert].exp() for expert in best)
        for expert in best:
            hidden = x @ layer.gate_up[expert] + layer.gate_up_bias[expert]
            gate, up = hidden[0::2].clamp(max=0.4), hidden[1::2].clamp(-0.4, 0.4)
            said = ((up + 1) * gate * torch.sigmoid(1.3 * gate)) @ layer.down[expert] + layer.down_bias[expert]
            expected[sentence, place] += logits[expert].exp() / total * said
    close(layer(inputs), expected)


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize("shared_dim", [None, 7])
def test_gated_experts_are_their_formula(normalized, shared_dim):
    """Each token by itself, expert by expert."""
    router = SoftmaxRouter(6, 5, 2, normalized=normalized)
    layer = GatedMixtureOfExperts(router, 10, shared=None if shared_dim is None else GatedFeedForward(6, shared_dim))
    inputs = torch.randn(2, 3, 6)
    expected = torch.zeros(2, 3, 6)
    for sentence, place in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        x = inputs[sentence, place]
        logits = layer.router.weight @ x
        best = logits.argsort(descending=True)[:2].tolist()
        total = sum(logit.exp() for logit in (logits[best] if normalized else logits))
        for expert in best:
            gate, up = (x @ layer.gate_up[expert]).split(10)
            said = (gate * gate.sigmoid() * up) @ layer.down[expert]
            expected[sentence, place] += logits[expert].exp() / total * said
        if layer.shared is not None and layer.shared_gate is not None:
            expected[sentence, place] += (
                torch.sigmoid(layer.shared_gate.weight[0] @ x) * layer.shared(inputs)[sentence, place]
            )
    close(layer(inputs), expected)


SHARED = GatedMixtureOfExperts(SoftmaxRouter(6, 5, 2), 10, shared=GatedFeedForward(6, 4))


@pytest.mark.parametrize("layer", [MixtureOfExperts(6, 10, 5, 2), SHARED])
def test_no_tokens_at_all_go_through_experts(layer):
    assert layer(torch.zeros(2, 0, 6)).shape == (2, 0, 6)


def test_a_layer_can_have_a_feed_forward_network_of_its_own(make):
    layers = LayerConfig(), LayerConfig(feed_forward=GatedFeedForwardConfig(9)), LayerConfig()
    model = make(layers=layers, feed_forward=GatedExpertsConfig(24, 4, 2))
    kinds = [type(block.feed_forward).__name__ for block in model.blocks]
    assert kinds == ["GatedMixtureOfExperts", "GatedFeedForward", "GatedMixtureOfExperts"]
    assert model.blocks[1].feed_forward.hidden_dim == 9


@pytest.mark.parametrize("shape", [(0, 5), (2, 0)])
@torch.no_grad()
def test_nothing_gives_nothing(shape, make):
    model = make()
    tokens = torch.zeros(shape, dtype=torch.int64)
    assert model(tokens).shape == (*shape, 61)
    assert model.step(tokens, model.make_cache())[0].shape == (*shape, 61)


@pytest.mark.parametrize(
    ("error", "message", "tokens"),
    [
        (DtypeError, "whole numbers, torch.int64 for instance; this is torch.float32", torch.zeros(1, 2)),
        (DtypeError, "this is a list", [1, 2]),
        (ShapeError, r"shape \(3,\); they need \(batch, length\): give tokens.unsqueeze\(0\)", torch.arange(3)),
        (ShapeError, r"shape \(1, 1, 3\); they need \(batch, length\)$", torch.arange(3)[None, None]),
        (
            ShapeError,
            r"tokens are in 0..61, but the vocabulary has 61: they need to be in 0..60",
            torch.arange(62)[None],
        ),
        (ShapeError, r"tokens are in -100..2", torch.tensor([[-100, 2]])),
        (
            DeviceError,
            "tokens are on meta, but the model is on cpu",
            torch.zeros(1, 2, dtype=torch.int64, device="meta"),
        ),
    ],
)
def test_tokens_that_do_not_fit(error, message, tokens, make):
    with pytest.raises(error, match=message):
        make()(tokens)


def test_positions_that_do_not_fit(make):
    with pytest.raises(ShapeError, match=r"positions has the shape \(4,\)"):
        make()(text(), positions=torch.arange(4))


def test_caches_that_do_not_fit(make):
    model, tokens = make(), text()
    with pytest.raises(ConfigurationError, match="LanguageModelCache of 2 layers.*it was given a tuple"):
        model.step(tokens, ())
    for step in (model.step, model.next_features, model.observe_step):
        with pytest.raises(ConfigurationError, match="LanguageModelCache of 2 layers.*it was given a NoneType"):
            step(tokens, None)
    with pytest.raises(ConfigurationError, match="given a LanguageModelCache of 1 layers"):
        model.step(tokens, LanguageModelCache(model.make_cache().layers[:1]))
    _, cache = model.step(tokens, model.make_cache())
    with pytest.raises(ShapeError, match="the cache has the batch size 3, and the new keys have 2"):
        model.step(tokens[:2], cache)
    with pytest.raises(ShapeError, match=r"rows are in 3\.\.3, but the batch has the size 3"):
        cache.reorder(torch.tensor([3]))
    with pytest.raises(ConfigurationError, match="the cache evicts keys by"):
        make([LayerConfig(before=9)] * 2).step(tokens, cache)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("vocabulary_size is 0", {"vocabulary_size": 0}),
        ("dim needs a whole number", {"dim": 1.5}),
        ("dropout is 1.5", {"dropout": 1.5}),
        ("num_kv_heads has to divide num_heads", {"attention": AttentionConfig(4, 3)}),
        ("bias names 'keys'", {"attention": AttentionConfig(4, bias=("keys",))}),
        ("there is no activation 'swiglu'; .*Known: 'gelu'", {"feed_forward": GatedFeedForwardConfig(8, "swiglu")}),
        ("there is no activation 'rely'; did you mean 'relu'", {"feed_forward": FeedForwardConfig(8, "rely")}),
        ("chosen is 3 of num_experts=2", {"feed_forward": ExpertsConfig(8, 2, 3)}),
        ("limit is 0", {"feed_forward": ExpertsConfig(8, 2, 1, limit=0.0)}),
        ("rotary turns 16 features, but heads have head_dim=8", {"layers": [LayerConfig(rotary=Rotary(16))]}),
        ("layers holds 3", {"layers": [3]}),
    ],
)
def test_settings_that_are_wrong(message, changes, make):
    with pytest.raises(ConfigurationError, match=message):
        make(**changes)


def test_a_model_has_layers():
    with pytest.raises(ConfigurationError, match="layers is empty; it needs a LayerConfig for each layer"):
        LanguageModelConfig(9, 8, (), AttentionConfig(2), FeedForwardConfig(8))
