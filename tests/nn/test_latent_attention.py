"""Latent attention: as the formula of the paper, absorbed and not, and with caches of every kind."""

import copy
import math
import re
from unittest.mock import patch

import pytest
import torch
from torch import nn

from regard import biases, masks
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.lenses import Weights
from regard.nn import GatedFeedForward, KVCache, LatentAttention, LatentProjections, PreNorm, TransformerBlock
from regard.nn.caches import kv_cache
from regard.positions import Rotary

DIM, BATCH, LENGTH = 12, 3, 9


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(actual, expected, atol=tolerance, rtol=tolerance)


def latent(query_latent_dim: int | None = 7, **options) -> LatentAttention:
    projections = LatentProjections(
        DIM, 4, latent_dim=5, rotary_dim=2, head_dim=3, value_dim=11, query_latent_dim=query_latent_dim
    )
    layer = LatentAttention(projections, Rotary(2), **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.4)
    return layer.double()


def by_hand(layer: LatentAttention, x: torch.Tensor) -> torch.Tensor:
    """Equations 9 to 19 of DeepSeek-V2, token by token and head by head, under a causal mask."""
    made, at = layer.projections, torch.arange(x.shape[1])
    source = x if made.query_down is None else made.query_norm(x @ made.query_down.weight.T)
    c = made.norm(x @ made.down.weight[:5].T)
    assert layer.rotary is not None
    shared = layer.rotary.rotate(x @ made.down.weight[5:].T, at)
    outputs = torch.zeros(*x.shape[:2], 44, dtype=x.dtype)
    for head in range(4):
        weight = made.query.weight[5 * head : 5 * head + 5]
        plain, turned = source @ weight[:3].T, layer.rotary.rotate(source @ weight[3:].T, at)
        key, value = c @ made.key.weight[3 * head : 3 * head + 3].T, c @ made.value.weight[11 * head :][:11].T
        for t in range(x.shape[1]):
            scored = torch.einsum("bd,bsd->bs", plain[:, t], key[:, : t + 1])
            scored = scored + torch.einsum("bd,bsd->bs", turned[:, t], shared[:, : t + 1])
            weights = (scored / math.sqrt(3 + 2)).softmax(-1)
            outputs[:, t, 11 * head : 11 * head + 11] = torch.einsum("bs,bsd->bd", weights, value[:, : t + 1])
    return outputs @ made.output.weight.T


@pytest.mark.parametrize("query_latent_dim", [None, 7])
def test_the_formula_absorbed_and_not(query_latent_dim):
    layer, x = latent(query_latent_dim, mask=masks.causal()), torch.randn(BATCH, LENGTH, DIM).double()
    expected = by_hand(layer, x)
    close(layer(x), expected)
    output, cache = layer.step(x, layer.make_cache())
    close(output, expected)
    assert cache.keys.shape == (BATCH, 1, LENGTH, 5 + 2)
    assert cache.values.numel() == 0


@pytest.mark.parametrize(
    ("kind", "chunks"),
    [("growing", [1] * 40), ("static", [17, 3, 20]), ("rolling", [20, *[1] * 20]), ("rolling", [40])],
)
def test_steps_equal_the_whole(kind, chunks):
    mask = masks.causal() & (masks.window(before=4) | masks.prefix(1))
    layer, x = latent(mask=mask, bias=biases.alibi(4)), torch.randn(BATCH, 40, DIM).double()
    cache = {"growing": KVCache(), "static": KVCache.static(40), "rolling": layer.make_cache()}[kind]
    outputs = []
    with torch.no_grad(), patch.object(kv_cache, "SPARE", 1):
        for chunk in x.split(chunks, dim=1):
            output, cache = layer.step(chunk, cache)
            outputs.append(output)
        close(torch.cat(outputs, 1), layer(x))
    assert (len(cache) < 40) == (kind == "rolling")


def test_the_cache_has_no_more_than_the_latent_and_the_rotary_key():
    layer = latent()
    with torch.no_grad():
        _, cache = layer.step(torch.randn(1, 1000, DIM).double(), KVCache.static(1000))
    assert cache.nbytes == 1000 * (5 + 2) * 8


def test_masks_biases_and_positions_of_a_call():
    layer, x = latent(), torch.randn(BATCH, LENGTH, DIM).double()
    mask, bias = masks.padding(lengths=[9, 4, 1]) & masks.causal(), torch.randn(4, LENGTH, LENGTH).double()
    at = torch.arange(LENGTH) + 100
    whole = layer(x, mask=masks.causal(), bias=bias, positions=at)
    close(layer.step(x, layer.make_cache(), mask=masks.causal(), bias=bias, positions=at)[0], whole)
    close(whole, layer(x, mask=masks.causal(), bias=bias), 1e-9)
    close(layer.step(x, layer.make_cache(), mask=mask)[0], layer(x, mask=mask))


def test_observe():
    layer, x, lens = latent(mask=masks.causal()), torch.randn(BATCH, LENGTH, DIM).double(), Weights()
    seen = layer.observe(x, lens)
    close(seen.output, layer(x))
    close(seen[lens].sum(-1), torch.ones(BATCH, 4, LENGTH).double())
    _, cache = layer.step(x[:, :5], layer.make_cache())
    stepped, _ = layer.observe_step(x[:, 5:], cache, lens)
    close(stepped.output, seen.output[:, 5:])
    close(stepped[lens], seen[lens][..., 5:, :])


def test_gradients():
    layer = latent(mask=masks.causal())
    assert torch.autograd.gradcheck(layer, torch.randn(1, 3, DIM).double().requires_grad_())
    x, above = torch.randn(BATCH, LENGTH, DIM).double(), torch.randn(BATCH, LENGTH, DIM).double()
    parameters = list(layer.parameters())
    unabsorbed = torch.autograd.grad(layer(x), parameters, above)
    absorbed = torch.autograd.grad(layer.step(x, layer.make_cache())[0], parameters, above)
    for one, other in zip(absorbed, unabsorbed, strict=True):
        close(one, other, 1e-10)


def test_dropout_in_training_alone():
    layer, x = latent(dropout=0.5), torch.randn(BATCH, LENGTH, DIM).double()
    assert not layer(x).equal(layer(x))
    assert layer.eval()(x).equal(layer(x))


def test_as_a_module():
    torch.compiler.reset()
    layer, other, x = latent(mask=masks.causal()), latent(mask=masks.causal()), torch.randn(2, 5, DIM).double()
    other.load_state_dict(layer.state_dict())
    assert other(x).equal(layer(x))
    assert copy.deepcopy(layer)(x).equal(layer(x))
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
    layer.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, (stepped, _) = layer(x.float()), layer.step(x.float(), layer.make_cache())
    close(output.float(), layer(x.float()), 0.1)
    close(stepped.float(), layer(x.float()), 0.1)


def test_weights_start_xavier_uniform():
    projections = LatentProjections(60, 3, latent_dim=40, rotary_dim=4, query_latent_dim=50)
    for linear in (module for module in projections.modules() if isinstance(module, nn.Linear)):
        bound = math.sqrt(6 / sum(linear.weight.shape))
        assert 0.95 * bound < linear.weight.abs().max() <= bound
        assert linear.bias is None


def test_in_a_block():
    block = TransformerBlock(latent(mask=masks.causal()), GatedFeedForward(DIM, 8), lambda: PreNorm(nn.RMSNorm(DIM)))
    block, x = block.double(), torch.randn(BATCH, LENGTH, DIM).double()
    first, cache = block.step(x[:, :4], block.make_cache())
    last, _ = block.step(x[:, 4:], cache)
    close(torch.cat([first, last], 1), block(x))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"latent_dim": 0, "rotary_dim": 2}, "latent_dim is 0; it needs at least 1"),
        ({"latent_dim": 5, "rotary_dim": None}, "rotary_dim needs a whole number; it is None"),
        ({"latent_dim": 5, "rotary_dim": 2, "value_dim": 0}, "value_dim is 0"),
        ({"latent_dim": 5, "rotary_dim": 2, "query_latent_dim": 0}, "query_latent_dim is 0"),
        ({"num_heads": 5, "latent_dim": 5, "rotary_dim": 2}, "dim is 12 and num_heads 5: without head_dim"),
    ],
)
def test_projections_that_cannot_be(options, text):
    with pytest.raises(ConfigurationError, match=re.escape(text)):
        LatentProjections(DIM, **{"num_heads": 4, **options})


def test_errors():
    layer, x = latent(), torch.randn(BATCH, LENGTH, DIM).double()
    with pytest.raises(ConfigurationError, match="rotary turns 4 features, but the projections have rotary_dim=2"):
        LatentAttention(layer.projections, Rotary(4))
    with pytest.raises(ShapeError, match=re.escape("query has the shape (3, 9, 11); it needs (batch, length, 12)")):
        layer(x[..., 1:])
    with pytest.raises(DtypeError, match="query is torch.float32"):
        layer(x.float())
    with pytest.raises(ShapeError, match=re.escape("positions has the shape (3,); it needs (9,) or (3, 9)")):
        layer(x, positions=torch.arange(3))
    with pytest.raises(ConfigurationError, match="step needs a KVCache"):
        layer.step(x, None)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the cache evicts keys by causal"):
        layer.step(x, KVCache.rolling(masks.causal()))
