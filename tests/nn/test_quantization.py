"""Dynamic quantisation by torch of models with regard's linear layers: done, or a warning says what to pass."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.ao.nn.quantized.dynamic import Linear as Quantized
from torch.ao.quantization import quantize_dynamic

from regard import masks
from regard.models import LanguageModel
from regard.models.language_model import AttentionConfig, FeedForwardConfig, LanguageModelConfig, LayerConfig
from regard.nn import Attention, LatentAttention, LatentProjections, Linear, Projections, swap_linear
from regard.positions import Rotary

BOTH = {nn.Linear, Linear}

pytestmark = [
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.(quantize|per|q).*:UserWarning"),
]


def kinds(model: nn.Module) -> set[type]:
    return {type(module) for module in model.modules() if isinstance(module, nn.Linear | Quantized)}


@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_a_model_after_swap_linear(dtype):
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8, bias=False)), torch.randn(4, 16)
    expected = quantize_dynamic(plain, {nn.Linear}, dtype=dtype)(x)
    swapped = swap_linear(copy.deepcopy(plain)).model
    quantized = quantize_dynamic(swapped, BOTH, dtype=dtype)
    assert kinds(quantized) == {Quantized}
    assert quantized(x).equal(expected), "torch's own quantised layers"
    assert kinds(swapped) == {Linear}, "the model that was given is unchanged"


@pytest.mark.parametrize("spec", [None, {nn.Linear}], ids=["default", "torch's"])
def test_a_warning_where_the_type_is_not_named(spec):
    model = swap_linear(nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 8))).model
    with pytest.warns(UserWarning, match=r"left a regard\.nn\.Linear as it is.*\.nn\.Linear, regard\.nn\.Linear\}"):
        quantized = quantize_dynamic(model, spec)
    assert kinds(quantized) == {Linear}
    assert quantized(torch.ones(1, 16)).equal(model(torch.ones(1, 16)))


def test_a_language_model_generates():
    torch.manual_seed(0)
    config = LanguageModelConfig(11, 16, (LayerConfig(),) * 2, AttentionConfig(num_heads=2), FeedForwardConfig(24))
    model, tokens = LanguageModel(config).eval(), torch.tensor([[1, 2, 3]])
    quantized = quantize_dynamic(model, BOTH)
    assert kinds(quantized) == {Quantized}
    assert torch.stack(list(quantized.generate(tokens, 5)), 1).shape == (1, 5)
    torch.testing.assert_close(quantized(tokens), model(tokens), atol=0.1, rtol=0.1)


def test_steps_equal_the_whole_of_quantised_attention():
    x = torch.randn(2, 5, 8)
    plain = Attention(Projections(8, 2), mask=masks.causal())
    latent = LatentAttention(LatentProjections(8, 2, latent_dim=6, rotary_dim=2), Rotary(2), mask=masks.causal())
    for layer in (plain, latent):
        quantized = quantize_dynamic(layer.eval(), BOTH)
        output, _ = quantized.step(x, quantized.make_cache())
        torch.testing.assert_close(output, layer(x), atol=0.1, rtol=0.1)
        torch.testing.assert_close(output, quantized(x), atol=0.05, rtol=0.05)


def test_qconfig_of_a_layer_that_no_quantisation_has_seen():
    layer = Linear(2, 2)
    assert not hasattr(layer, "qconfig")
    layer.qconfig = "any"
    assert copy.deepcopy(layer).qconfig == "any"
    del layer.qconfig
    assert not hasattr(layer, "qconfig")
