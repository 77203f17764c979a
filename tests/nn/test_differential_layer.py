"""Layers of differential attention: as transformers' DiffLlama, as version 2 by hand, and with caches."""

import math

import pytest
import torch
from torch import Tensor, nn

from regard import lenses, masks
from regard.errors import ConfigurationError
from regard.nn import DifferentialAttention, DifferentialAttentionV2, PreNorm, Projections, TransformerBlock
from regard.nn.differential_layer import DifferentialLayer
from regard.nn.feedforward import FeedForward
from regard.positions import Rotary

DIM, BATCH, LENGTH = 24, 3, 11


def first_version(key_heads: int = 4, **options) -> DifferentialAttention:
    projections = Projections(DIM, num_heads=8, num_kv_heads=key_heads, head_dim=4)
    return randomized(DifferentialAttention(projections, depth=3, rotary=Rotary(4), **options))


def second_version(**options) -> DifferentialAttentionV2:
    projections = Projections(DIM, num_heads=8, num_kv_heads=2, head_dim=4)
    return randomized(DifferentialAttentionV2(projections, rotary=Rotary(4), **options))


def randomized(layer):
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double()


both = pytest.mark.parametrize("make", [first_version, second_version])


@pytest.mark.parametrize("key_heads", [8, 4, 2])
def test_it_is_the_eager_class_of_transformers(key_heads):
    from transformers import DiffLlamaConfig
    from transformers.models.diffllama.modeling_diffllama import DiffLlamaAttention, DiffLlamaRotaryEmbedding

    config = DiffLlamaConfig(
        hidden_size=DIM,
        num_attention_heads=8,
        num_key_value_heads=key_heads,
        head_dim=4,
        attention_bias=True,
    )
    config._attn_implementation = "eager"
    theirs = randomized(DiffLlamaAttention(config, layer_idx=3))
    layer = DifferentialAttention(
        Projections(DIM, num_heads=8, num_kv_heads=key_heads, head_dim=4),
        depth=3,
        rotary=Rotary(4),
        mask=masks.causal(),
        norm=lambda dim: nn.RMSNorm(dim, config.rms_norm_eps, elementwise_affine=False),
    ).double()
    names = {"q_proj": "query", "k_proj": "key", "v_proj": "value", "o_proj": "output"}
    state = {}
    for name, tensor in theirs.state_dict().items():
        first, _, rest = name.partition(".")
        state[f"projections.{names[first]}.{rest}" if first in names else name] = tensor
    layer.load_state_dict(state)
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64, requires_grad=True)
    positions = torch.arange(LENGTH).expand(BATCH, -1)
    rotation = tuple(each.double() for each in DiffLlamaRotaryEmbedding(config)(x, positions))
    hidden = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)[None, None]
    expected = theirs(x, rotation, hidden)[0]
    found = layer(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    above = torch.randn_like(found)
    gradients = (torch.autograd.grad(output, x, above)[0] for output in (found, expected))
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-5)


def test_version_2_head_by_head():
    layer = second_version(mask=masks.causal())
    layer.rotary = None
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    queries, (keys, values) = layer.projections.queries(x), layer.projections.keys_and_values(x)
    hidden = torch.full((LENGTH, LENGTH), -math.inf, dtype=torch.float64).triu(1)
    heads: list[Tensor] = []
    for head in range(4):
        own = head // 2  # the group of both heads of a pair
        first, second = (((queries[:, 2 * head + at] @ keys[:, own].mT) / 2.0 + hidden).softmax(-1) for at in (0, 1))
        share = torch.sigmoid(x @ layer.share.weight[head])
        heads.append((first - share.unsqueeze(-1) * second) @ values[:, own])
    expected = torch.cat(heads, -1) @ layer.projections.output.weight.T + layer.projections.output.bias
    torch.testing.assert_close(layer(x), expected)


@both
@pytest.mark.parametrize("window", [None, 4])
def test_steps_are_the_whole_sequence(make, window):
    mask = masks.causal() if window is None else masks.causal() & masks.window(before=window)
    layer: DifferentialLayer = make(mask=mask)
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    with torch.no_grad():
        cache, outputs = layer.make_cache(), []
        for part in x.split([4, 1, 1, 3, 2], dim=1):
            output, cache = layer.step(part, cache)
            outputs.append(output)
        torch.testing.assert_close(torch.cat(outputs, 1), layer(x))


@both
def test_padded_on_the_left(make):
    layer: DifferentialLayer = make(mask=masks.causal() & ~masks.prefix(0))
    x = torch.randn(1, LENGTH, DIM, dtype=torch.float64)
    padded = torch.cat([torch.full((1, 3, DIM), 7.0, dtype=torch.float64), x], 1)
    found = layer(padded, positions=torch.arange(-3, LENGTH))
    torch.testing.assert_close(found[:, 3:], layer(x))


@both
def test_the_weights(make):
    layer: DifferentialLayer = make(mask=masks.causal())
    x, weights = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64), lenses.Weights()
    seen = layer.observe(x, weights)
    first, second = seen.first[weights], seen.second[weights]
    torch.testing.assert_close(first.sum(-1), torch.ones_like(first.sum(-1)))
    share = seen.share.unsqueeze(-1) if isinstance(seen.share, Tensor) and seen.share.ndim else seen.share
    torch.testing.assert_close(seen[weights], first - share * second)


@both
def test_in_a_block(make):
    block = TransformerBlock(make(mask=masks.causal()), FeedForward(DIM, 8), lambda: PreNorm(nn.RMSNorm(DIM))).double()
    x = torch.randn(BATCH, LENGTH, DIM, dtype=torch.float64)
    first, cache = block.step(x[:, :6], block.make_cache())
    last, _ = block.step(x[:, 6:], cache)
    torch.testing.assert_close(torch.cat([first, last], 1), block(x))


def test_the_share_starts_by_depth():
    assert DifferentialAttention(Projections(DIM, num_heads=4), 0).initial_share == pytest.approx(0.2)
    assert DifferentialAttention(Projections(DIM, num_heads=4), 8).initial_share == pytest.approx(
        0.8 - 0.6 * math.exp(-2.4)
    )


def test_what_does_not_fit_is_named():
    with pytest.raises(ConfigurationError, match=r"projections have 3 heads and .*needs an even number of heads"):
        DifferentialAttention(Projections(DIM, num_heads=3), 0)
    with pytest.raises(ConfigurationError, match=r"1 key heads, .* version 1 needs an even number of key heads"):
        DifferentialAttention(Projections(DIM, num_heads=4, num_kv_heads=1), 0)
    with pytest.raises(
        ConfigurationError, match=r"6 heads and 6 key heads; version 2 needs an even number of heads for"
    ):
        DifferentialAttentionV2(Projections(DIM, num_heads=6))
