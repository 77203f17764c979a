"""Lenses over a whole model: what they show is what the weights themselves show."""

import pytest
import torch

from regard.errors import ConfigurationError
from regard.huggingface import observing
from regard.lenses import MaxLogit, Weights


def test_every_attention_is_looked_at(pair, ask, close):
    eager, ours = pair("bart")
    inputs = ask("bart")
    first, all_of_them = Weights(rows=slice(0, 2)), Weights()
    with torch.no_grad(), observing(ours, first, all_of_them) as views:
        output = ours(**inputs)
    with torch.no_grad():
        expected = eager(**inputs, output_attentions=True)
    close(output, expected)
    assert len(views) == 6
    for layer in (0, 1):
        for name, weights in (
            (f"model.encoder.layers.{layer}.self_attn", expected.encoder_attentions),
            (f"model.decoder.layers.{layer}.self_attn", expected.decoder_attentions),
            (f"model.decoder.layers.{layer}.encoder_attn", expected.cross_attentions),
        ):
            assert len(views[name]) == 1
            close(views[name][0][all_of_them], weights[layer])
            close(views[name][0][first], weights[layer][:, :, :2])


def test_half_of_the_query_weights_halve_the_largest_scores(pair, ask):
    """As QK-clip makes use of: rotation and scale are linear, and the first layer reads the same embeddings."""
    _, ours = pair("llama")
    inputs, largest, found = ask("llama"), MaxLogit(), []
    weight = ours.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        for factor in (0.5, 2.0):
            weight.mul_(factor)
            with observing(ours, largest) as views:
                ours(**inputs)
            found.append(views["model.layers.0.self_attn"][0][largest])
    assert (found[1] != 0).all()
    torch.testing.assert_close(2 * found[0], found[1], rtol=1e-5, atol=1e-6)


def test_one_entry_a_call(pair):
    _, ours = pair("llama")
    lens = Weights()
    with observing(ours, lens) as views:
        ours.generate(torch.randint(3, 60, (1, 5)), max_new_tokens=3, min_new_tokens=3, do_sample=False)
    shapes = [shown[lens].shape for shown in views["model.layers.1.self_attn"]]
    assert shapes == [(1, 4, 5, 5), (1, 4, 1, 6), (1, 4, 1, 7)]


def test_both_lenses_and_the_models_own_weights(pair, ask):
    _, ours = pair("llama")
    lens = Weights()
    with torch.no_grad(), observing(ours, lens) as views:
        attentions = ours(**ask("llama"), output_attentions=True).attentions
    torch.testing.assert_close(views["model.layers.0.self_attn"][0][lens], attentions[0])


def test_only_inside_and_only_this_model(pair, ask):
    _, ours = pair("llama")
    _, other = pair("llama")
    with torch.no_grad(), observing(ours, Weights()) as views:
        other(**ask("llama"))
        assert not views
    with torch.no_grad():
        ours(**ask("llama"))
    assert not views


@pytest.mark.parametrize("lenses", [(), (Weights,), ("weights",)])
def test_lenses_are_needed(lenses):
    with (
        pytest.raises(ConfigurationError, match="observing needs a model and at least one lens"),
        observing(torch.nn.Identity(), *lenses),
    ):
        pass


def test_a_model_that_does_not_use_regard_is_refused(pair):
    """Instead of views without a single module, as of one that was not swapped, or that swap leaves."""
    eager, ours = pair("bert")
    message = (
        r"no attention module of this Bert\w+ uses 'regard': the first of 2, '[\w.]+', has attn_implementation='eager'"
    )
    with pytest.raises(ConfigurationError, match=message), observing(eager, Weights()):
        pass
    message = "it has none that calls transformers' attention interface. Call regard.huggingface.swap"
    with pytest.raises(ConfigurationError, match=message), observing(torch.nn.Identity(), Weights()):
        pass
    with observing(torch.nn.ModuleList([eager, ours]), Weights()):
        pass
