"""A rotation that is made once and given to layers is the one that they would have made."""

import pytest
import torch
from torch import nn

from regard import masks
from regard.errors import ConfigurationError
from regard.nn import Attention, FeedForward, LatentAttention, LatentProjections, PreNorm, Projections, TransformerBlock
from regard.positions import Rotary

ROTARY = Rotary(4)


def attention():
    return Attention(Projections(16, 4), mask=masks.causal(), rotary=ROTARY)


def latent():
    return LatentAttention(LatentProjections(16, 4, latent_dim=6, rotary_dim=4), ROTARY, mask=masks.causal())


def block():
    return TransformerBlock(attention(), FeedForward(16, 20), lambda: PreNorm(nn.LayerNorm(16)))


LAYERS = {"attention": attention, "latent": latent, "block": block}
every = pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS.keys())


@every
@pytest.mark.parametrize("positions", [None, torch.arange(7) + 5])
@torch.no_grad()
def test_what_is_given_is_what_would_be_made(make, positions, monkeypatch):
    layer, x = make().eval(), torch.randn(2, 7, 16)
    rotation = ROTARY.rotation(torch.arange(7) if positions is None else positions)
    expected = layer(x, positions=positions)
    stepped, _ = layer.step(x, layer.make_cache(), positions=positions)
    monkeypatch.setattr(Rotary, "rotation", None)  # nothing is made any more
    assert torch.equal(layer(x, positions=positions, rotation=rotation), expected)
    torch.testing.assert_close(layer.observe(x, positions=positions, rotation=rotation).output, expected)
    given, _ = layer.step(x, layer.make_cache(), positions=positions, rotation=rotation)
    assert torch.equal(given, stepped)
    seen, _ = layer.observe_step(x, layer.make_cache(), positions=positions, rotation=rotation)
    torch.testing.assert_close(seen.output, stepped)


@every
@torch.no_grad()
def test_it_is_the_given_one_that_turns(make):
    layer, x = make().eval(), torch.randn(2, 7, 16)
    assert not torch.allclose(layer(x, rotation=Rotary(4, base=3.0).rotation(torch.arange(7))), layer(x), atol=1e-4)


def test_a_layer_that_turns_nothing_takes_none():
    layer, rotation = Attention(Projections(16, 4)), ROTARY.rotation(torch.arange(7))
    for call in (layer, lambda x, rotation: layer.step(x, layer.make_cache(), rotation=rotation)):
        with pytest.raises(
            ConfigurationError,
            match="but the layer has no rotary embedding: make it with rotary=",
        ):
            call(torch.randn(2, 7, 16), rotation=rotation)
