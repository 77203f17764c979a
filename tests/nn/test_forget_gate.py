"""The forget gate of a layer: its formula, its steps with every kind of cache, and what it refuses."""

import pytest
import torch
from torch.nn.functional import logsigmoid

import regard
from regard import biases, masks
from regard.errors import ConfigurationError
from regard.nn import Attention, KVCache, Projections
from regard.positions import Rotary


def layer_of(dtype=torch.float64, mask=None, **options):
    torch.manual_seed(0)
    projections = Projections(16, num_heads=4, num_kv_heads=2)
    mask = masks.causal() if mask is None else mask
    return Attention(projections, mask=mask, rotary=Rotary(4), forget_gate=True, **options).to(dtype)


def tokens(length=53, dtype=torch.float64):
    return torch.randn(2, length, 16, generator=torch.Generator().manual_seed(1), dtype=dtype)


def test_the_bias_is_that_of_the_gates_and_joins_the_others():
    slopes = torch.nn.Parameter(torch.rand(4, dtype=torch.float64))
    layer, x = layer_of(bias=biases.alibi(slopes)), tokens()
    projections, rotary = layer.projections, Rotary(4)
    queries, (keys, values) = projections.queries(x), projections.keys_and_values(x)
    queries, keys = (rotary.rotate(each, torch.arange(53)) for each in (queries, keys))
    assert layer.forget_gate is not None
    bias = biases.forget_gates(logsigmoid(layer.forget_gate.projection(x)).mT) + biases.alibi(slopes)
    expected = projections.project_output(regard.attention(queries, keys, values, bias=bias, mask=masks.causal()))
    torch.testing.assert_close(layer(x), expected)
    layer(x).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any(), name


CACHES = {
    "growing": lambda layer: KVCache(),
    "static": lambda layer: KVCache.static(53),
    "of the layer": lambda layer: layer.make_cache(),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize(("dtype", "allowed"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 4e-2)])
def test_steps_equal_the_whole_sequence(cache, window, dtype, allowed):
    mask = masks.causal() if window is None else masks.causal() & masks.window(before=window)
    layer, x, outputs = layer_of(dtype, mask), tokens(dtype=dtype), []
    store = CACHES[cache](layer)
    with torch.no_grad():
        for chunk in x.split([1, 3, 17, 1, 1, 1, 29], 1):
            output, store = layer.step(chunk, store)
            outputs.append(output)
        error = (torch.cat(outputs, 1) - layer(x)).abs().max()
    assert error <= allowed


def test_a_reordered_cache_keeps_the_sums_of_its_rows():
    layer, x, rows = layer_of(), tokens(20), torch.tensor([1, 0, 1])
    with torch.no_grad():
        _, store = layer.step(x[:, :19], KVCache())
        output, _ = layer.step(x[rows, 19:], store.reorder(rows))
        torch.testing.assert_close(output, layer(x)[rows, 19:])


def test_sums_of_half_precision_in_a_cache_are_exact_far_down_a_sequence():
    gate = layer_of(torch.bfloat16).forget_gate
    assert gate is not None
    sums = -torch.linspace(0.0, 24000.0, 2 * 4 * 5, dtype=torch.float64).view(2, 4, 5)
    gate.sums = lambda tokens: sums
    keys = torch.zeros(2, 2, 5, 4, dtype=torch.bfloat16)
    split, found = gate.split(gate.with_sums(keys, tokens(5), KVCache()), 4)
    assert torch.equal(split, keys)
    assert (found - sums).abs().max() < 24000.0 * 2**-32


def test_observed_weights_and_steps():
    layer, x, weights = layer_of(), tokens(11), regard.lenses.Weights()
    whole = layer.observe(x, weights)
    torch.testing.assert_close(whole.output, layer(x))
    with torch.no_grad():
        _, store = layer.step(x[:, :10], layer.make_cache())
        seen, _ = layer.observe_step(x[:, 10:], store, weights)
    torch.testing.assert_close(seen[weights], whole[weights][:, :, 10:].detach())


def test_cross_attention_has_no_forget_gate():
    with pytest.raises(ConfigurationError, match="cross-attention, with memory_dim=8, has none"):
        Attention(Projections(16, num_heads=4, memory_dim=8), forget_gate=True)
    with pytest.raises(ConfigurationError, match="a memory is another sequence"):
        layer_of()(tokens(5), tokens(7))


def test_keys_that_layers_share_have_no_sums():
    layer = layer_of()
    with pytest.raises(ConfigurationError, match="keys that are given are those of another layer"):
        layer(tokens(5), keys=layer.project_memory(tokens(5)))
    with pytest.raises(ConfigurationError, match="layers that share its keys do not have the sums"):
        layer.extend(tokens(5), layer.make_cache())


def test_a_checkpoint_without_a_gate_does_not_fit():
    layer = layer_of()
    assert "forget_gate.projection.weight" in layer.state_dict()
    assert Attention(Projections(16, num_heads=4)).forget_gate is None
