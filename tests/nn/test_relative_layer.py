"""The layer of Shaw et al.: its formula, its steps with caches that evict, and what it refuses."""

import pytest
import torch
from torch import Tensor

from regard import biases, lenses, masks
from regard.errors import ConfigurationError
from regard.nn import H2O, KVCache, Projections, RelativeAttention, WeighedCache

DIM, HEADS, KEY_HEADS, LENGTH = 12, 4, 2, 53


def layer_of(dtype=torch.float64, **options) -> RelativeAttention:
    torch.manual_seed(0)
    projections = Projections(DIM, num_heads=HEADS, num_kv_heads=KEY_HEADS, head_dim=5, value_dim=7)
    return RelativeAttention(projections, **{"before": 3, "after": 2, **options}).to(dtype)


def tokens(length=LENGTH, dtype=torch.float64) -> Tensor:
    return torch.randn(2, length, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def formula(layer: RelativeAttention, x: Tensor, keep: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Output and weights with a vector for each pair."""
    queries, (keys, values) = layer.projections.queries(x), layer.projections.keys_and_values(x)
    keys, values = (each.repeat_interleave(HEADS // KEY_HEADS, 1)[:, :, None] for each in (keys, values))
    places = torch.arange(x.shape[1])
    rows = (places - places[:, None]).clamp(-layer.before, layer.after) + layer.before
    scores = (queries[..., None, :] * (keys + layer.key_vectors[:, rows])).sum(-1) / 5**0.5 + bias
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1)
    vectors = 0 if layer.value_vectors is None else layer.value_vectors[:, rows]
    context = (weights[..., None] * (values + vectors)).sum(-2)
    return layer.projections.project_output(context), weights


@pytest.mark.parametrize("options", [{}, {"shared": False}, {"values": False}, {"before": 0, "after": 0}], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_it_is_the_formula_with_all_gradients(options, causal):
    mask = masks.causal() if causal else None
    slopes = torch.rand(HEADS, dtype=torch.float64)
    layer, x, weights = layer_of(mask=mask, bias=biases.alibi(slopes), **options), tokens(), lenses.Weights()
    keep = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril() if causal else torch.ones(LENGTH, LENGTH).bool()
    places = torch.arange(LENGTH)
    bias = -slopes[:, None, None] * (places[:, None] - places).abs()
    output, expected = formula(layer, x, keep, bias)
    seen = layer.observe(x, weights)
    torch.testing.assert_close(seen[weights], expected)
    torch.testing.assert_close(seen.output, output)
    torch.testing.assert_close(layer(x), output)
    layer(x).square().sum().backward()
    found = {name: each.grad.clone() for name, each in layer.named_parameters() if each.grad is not None}
    layer.zero_grad()
    output.square().sum().backward()
    assert set(found) >= {"key_vectors"} | ({"value_vectors"} if layer.value_vectors is not None else set())
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, layer.get_parameter(name).grad, msg=name)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_steps_equal_the_whole_sequence(window, dtype, allowed):
    mask = masks.causal() if window is None else masks.causal() & masks.window(before=window)
    layer, x, outputs = layer_of(dtype, mask=mask), tokens(149, dtype), []
    cache = layer.make_cache()
    with torch.no_grad():
        for chunk in x.split([1, 3, 17, 1, 1, 29, *[1] * 97], 1):
            output, cache = layer.step(chunk, cache)
            outputs.append(output)
        assert (torch.cat(outputs, 1) - layer(x)).abs().max() <= allowed
    assert len(cache) == 149 if window is None else len(cache) < 60


def test_weights_of_a_step_and_dropout():
    layer, x, weights = layer_of(mask=masks.causal(), dropout=0.5).eval(), tokens(11), lenses.Weights()
    whole = layer.observe(x, weights)[weights]
    with torch.no_grad():
        _, cache = layer.step(x[:, :8], layer.make_cache())
        seen, _ = layer.observe_step(x[:, 8:], cache, weights)
    torch.testing.assert_close(seen[weights], whole[:, :, 8:].detach())
    assert not torch.allclose(layer.train()(x), layer.eval()(x))


def test_what_it_refuses():
    with pytest.raises(ConfigurationError, match="projections have memory_dim=8: leave it out, or take Attention"):
        RelativeAttention(Projections(DIM, num_heads=2, memory_dim=8), before=1, after=1)
    with pytest.raises(ConfigurationError, match="before"):
        layer_of(before=-1)
    with pytest.raises(ConfigurationError, match="a WeighedCache computes the attention of a step itself"):
        layer_of(mask=masks.causal()).step(tokens(3), WeighedCache(H2O(heavy=2, recent=2)))
    with pytest.raises(ConfigurationError, match="evicts keys by"):
        layer_of(mask=masks.causal()).step(tokens(3), KVCache.rolling(masks.window(before=1)))
