"""What goes from block to block: inputs of layers, alternating updates, the residual connection beside attention."""

from typing import Any

import pytest
import torch
from torch.nn import functional

from regard.errors import ConfigurationError
from regard.models import language_model as lm
from regard.models.language_model.sparse_activation import SparseActivation
from regard.positions import Rotary

VOCABULARY, DIM, LAYERS = 23, 16, 3
INPUTS = lm.LayerInputsConfig(5, vocabulary_size=20, activation="silu")
STREAMS = {
    "inputs": lm.GatedInputStreamConfig(INPUTS),
    "scales": lm.GatedInputStreamConfig(),
    "updates": lm.AlternatingUpdatesConfig(INPUTS, copies=3, active=1, limit=0.01),
}


def model_of(stream, **changes) -> Any:
    settings = {"sandwich": True, "laurel_rank": 3, "stream": STREAMS.get(stream, stream)} | changes
    layers = (lm.LayerConfig(rotary=Rotary(4)),) * LAYERS
    feed_forward = lm.GatedFeedForwardConfig(20, sparsity=0.6)
    config = lm.LanguageModelConfig(VOCABULARY, DIM, layers, lm.AttentionConfig(2), feed_forward, **settings)
    torch.manual_seed(0)
    model = lm.LanguageModel(config)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.ndim == 1:
                tensor.add_(0.3 * torch.randn_like(tensor))
    return model.eval()


def close(ours, theirs, tolerance=1e-5):
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("stream", STREAMS)
@torch.no_grad()
def test_steps_are_the_whole(stream):
    model, tokens = model_of(stream), torch.randint(VOCABULARY, (2, 11))
    logits, cache = [], model.make_cache()
    for part in tokens.split([5, 1, 1, 4], dim=1):
        output, cache = model.step(part, cache)
        logits.append(output)
    close(torch.cat(logits, 1), model(tokens))


@pytest.mark.parametrize("stream", STREAMS)
def test_saved_and_loaded(stream, tmp_path):
    model, tokens = model_of(stream), torch.randint(VOCABULARY, (2, 7))
    model.save(tmp_path)
    loaded = lm.LanguageModel.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


@pytest.mark.parametrize("stream", STREAMS)
def test_every_parameter_learns(stream):
    model, tokens = model_of(stream).double(), torch.randint(VOCABULARY, (2, 7))
    model(tokens).square().sum().backward()
    parameters = dict(model.named_parameters())
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in parameters.values())
    name = "stream.inputs.table.weight" if "stream.inputs.table.weight" in parameters else "embedding.weight"
    weight, token = parameters[name], int(tokens[0, 2])
    found, step = weight.grad[token if token < len(weight) else 0, 1].item(), 1e-6
    values = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[token if token < len(weight) else 0, 1] += sign * step
            values.append(model(tokens).square().sum())
            weight[token if token < len(weight) else 0, 1] -= sign * step
    close(torch.tensor(found), ((values[0] - values[1]) / (2 * step)).float(), 1e-4)


def test_experts_beside_a_feed_forward_network(tmp_path):
    experts = lm.DenseAndExpertsConfig(lm.GatedFeedForwardConfig(20), 8, num_experts=3, chosen=2)
    layers = (lm.LayerConfig(), lm.LayerConfig(feed_forward=experts))
    feed_forward = lm.GatedFeedForwardConfig(20)
    config = lm.LanguageModelConfig(VOCABULARY, DIM, layers, lm.AttentionConfig(2), feed_forward, sandwich=True)
    model, tokens = lm.LanguageModel(config), torch.randint(VOCABULARY, (2, 9))
    model(tokens).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.save(tmp_path)
    assert torch.equal(lm.LanguageModel.load(tmp_path)(tokens), model.eval()(tokens))
    with pytest.raises(ConfigurationError, match="DenseAndExpertsConfig has the norms of its input itself: set sandwi"):
        lm.LanguageModel(lm.LanguageModelConfig(VOCABULARY, DIM, layers, lm.AttentionConfig(2), feed_forward))
    with pytest.raises(ConfigurationError, match="chosen is 4 of num_experts=3: it needs that many or fewer"):
        lm.DenseAndExpertsConfig(feed_forward, 8, num_experts=3, chosen=4).make(DIM, 0.0)


@torch.no_grad()
def test_inputs_of_layers_are_those_of_the_formula():
    model = model_of("inputs").double()
    inputs, tokens = model.stream.inputs, torch.tensor([[3, 19, 20, 22]])  # the last two are beyond the table
    embedded = torch.randn(1, 4, DIM, dtype=torch.float64)
    rows = inputs.table.weight[[3, 19, 0, 0]].view(4, LAYERS, 5) * 5**0.5
    projected = functional.linear(embedded[0], inputs.projection.weight).view(4, LAYERS, 5) / DIM**0.5
    normed = projected / (projected.square().mean(-1, keepdim=True) + 1e-6).sqrt() * inputs.norm.weight
    close(inputs(tokens, embedded)[0], (normed + rows) / 2**0.5, 1e-12)


def test_coefficients_are_limited_in_training_alone():
    model = model_of("updates")
    update = model.stream.updates[0]
    x = torch.randn(3, 2, 4, DIM)
    plain = update.predict(x, 1)
    with torch.no_grad():
        small = update.predictions.weight.clamp(-0.01, 0.01)
    update.train()
    limited = update.predict(x, 1)
    update.predictions.weight.data.copy_(small)
    close(limited, update.eval().predict(x, 1))
    assert not torch.allclose(limited, plain)


def test_a_sparse_activation_is_that_of_the_formula():
    x = torch.randn(3, 41, dtype=torch.float64)
    threshold = x.mean(-1, keepdim=True) + 0.2533471031357997 * x.std(-1, keepdim=True, unbiased=False)
    close(SparseActivation(torch.tanh, 0.6)(x), torch.tanh((x - threshold).clamp(min=0)), 1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: SparseActivation(torch.tanh, 1.5), "sparsity is 1.5; it needs a share between 0 and 1, or None"),
        (lambda: model_of("inputs", sandwich=False), "laurel_rank is 3, of a map beside the norms of sandwich=True"),
        (
            lambda: model_of(lm.AlternatingUpdatesConfig(INPUTS, copies=4, active=4)),
            r"active is 4 of copies=4; it needs a number in 0\.\.3",
        ),
        (
            lambda: model_of(lm.GatedInputStreamConfig(lm.LayerInputsConfig(4, activation="silly"))),
            r"there is no activation 'silly'; did you mean 'silu'\?",
        ),
    ],
    ids=["sparsity", "laurel", "active", "activation"],
)
def test_bad_settings_are_named(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()
