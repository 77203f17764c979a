"""Heads ablated by hooks, against an output projection with their weights set to 0."""

import copy

import pytest
import torch
from torch import nn

import regard
from regard import heads, masks
from regard.errors import ConfigurationError, ShapeError
from regard.models import transformer
from regard.nn import (
    Attention,
    LatentAttention,
    LatentProjections,
    MultiheadAttention,
    PostNorm,
    Projections,
    TransformerBlock,
)


def attention():
    return Attention(Projections(12, num_heads=4, num_kv_heads=2), mask=masks.causal())


def multihead():
    return MultiheadAttention(12, 4, batch_first=True)


class Called(nn.Module):
    """An attention that is called with one tensor."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return (
            self.layer(x, x, x, need_weights=False)[0] if isinstance(self.layer, MultiheadAttention) else self.layer(x)
        )


def output_projection(layer):
    return layer.out_proj if isinstance(layer, MultiheadAttention) else layer.projections.output


@pytest.mark.parametrize("make", [attention, multihead])
def test_a_head_of_zero_is_a_projection_without_it(make):
    model, x = Called(make()).eval(), torch.randn(2, 5, 12)
    expected = copy.deepcopy(model)
    with torch.no_grad():
        output_projection(expected.layer).weight[:, 3:6] = 0
        output_projection(expected.layer).weight[:, 9:] = 0
        plain = model(x)
        with heads.ablating(model, {"layer": [1, 3]}):
            torch.testing.assert_close(model(x), expected(x))
        assert model(x).equal(plain)


def test_a_head_of_latent_attention():
    projections = LatentProjections(12, num_heads=3, latent_dim=6, rotary_dim=2, head_dim=4, value_dim=5)
    layer = LatentAttention(projections, regard.positions.Rotary(2))
    model, x = Called(layer).eval(), torch.randn(1, 4, 12)
    expected = copy.deepcopy(model)
    with torch.no_grad(), heads.ablating(model, {"layer": [2]}):
        expected.layer.projections.output.weight[:, 10:] = 0
        torch.testing.assert_close(model(x), expected(x))


def test_a_mean_keeps_what_a_head_always_adds():
    model, x = Called(attention()), torch.randn(2, 5, 12)
    with torch.no_grad(), heads.ablating(model, {"layer": range(4)}, replace="mean"):
        ablated = model(x)
    with torch.no_grad():
        torch.testing.assert_close(ablated, model(x).mean((0, 1)).expand(2, 5, 12))


@pytest.mark.parametrize("make", [attention, multihead])
def test_means_of_other_text_are_a_projection_with_a_constant(make):
    model, x = Called(make()).eval(), torch.randn(2, 5, 12)
    texts = torch.randn(3, 7, 12), torch.randn(1, 2, 12)
    seen = []
    with output_projection(model.layer).register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        means = heads.mean_outputs(model, lambda: [model(text) for text in texts])
    mean = torch.cat([each.double().flatten(0, -2) for each in seen]).mean(0).unflatten(-1, (4, 3))
    torch.testing.assert_close(means["layer"].double(), mean, rtol=1e-6, atol=1e-7)
    expected, chosen = copy.deepcopy(model), [1, 3]
    with torch.no_grad():
        linear = output_projection(expected.layer)
        parts = linear.weight.unflatten(1, (4, 3))
        linear.bias.add_(torch.einsum("ohw,hw->o", parts[:, chosen], mean[chosen].float()))
        parts[:, chosen] = 0
        with heads.ablating(model, {"layer": chosen}, replace=means):
            torch.testing.assert_close(model(x), expected(x))
            torch.testing.assert_close(model(x[:, :1]), expected(x[:, :1]))


@pytest.mark.parametrize("batch", [1, 3])
def test_decoding_with_means_is_the_whole_sequence_with_them(batch):
    layer, x = attention().eval(), torch.randn(batch, 6, 12)
    model, cache, steps = nn.Sequential(layer), layer.make_cache(), []
    means = heads.mean_outputs(model, lambda: model(torch.randn(4, 11, 12)))
    with torch.no_grad(), heads.ablating(model, {"0": [0, 2]}, replace=means):
        for token in x.split(1, dim=1):
            output, cache = layer.step(token, cache)
            steps.append(output)
        torch.testing.assert_close(torch.cat(steps, 1), layer(x))
    with torch.no_grad():
        assert not torch.allclose(torch.cat(steps, 1), layer(x), atol=1e-3)


@pytest.mark.parametrize("batch", [1, 3])
def test_a_call_of_one_position_has_no_mean(batch):
    model, x = Called(attention()), torch.randn(batch, 1, 12)
    message = r"'layer' was called with one, as a step of decoding is: give .*replace=regard.heads.mean_outputs\(model"
    with heads.ablating(model, {"layer": [1]}, replace="mean"), pytest.raises(ConfigurationError, match=message):
        model(x)
    with pytest.raises(ConfigurationError, match=message):
        heads.head_effects(model, lambda: model(x).sum(), replace="mean")


def test_a_batch_of_one_sequence_with_the_length_first_has_a_mean():
    layer, x = MultiheadAttention(12, 4).eval(), torch.randn(5, 1, 12)
    with torch.no_grad(), heads.ablating(layer, {"": range(4)}, replace="mean"):
        ablated = layer(x, x, x, need_weights=False)[0]
    torch.testing.assert_close(ablated, ablated.mean((0, 1)).expand(5, 1, 12))


def test_means_of_half_precision_are_summed_in_float32():
    model, x = Called(attention()).bfloat16(), torch.randn(1, 4001, 12).bfloat16()
    means, seen = heads.mean_outputs(model, lambda: model(x))["layer"], []
    with model.layer.projections.output.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])):
        model(x)
    assert means.dtype == torch.float32
    torch.testing.assert_close(means.double().flatten(), seen[0].double().mean((0, 1)), rtol=1e-4, atol=1e-6)
    with heads.ablating(model, {"layer": [0]}, replace={"layer": means}):
        assert model(x).dtype == torch.bfloat16


def test_hooks_are_gone_also_after_an_error():
    model = Called(attention())
    projection = model.layer.projections.output
    with heads.ablating(model, {"layer": [0]}):
        assert len(projection._forward_pre_hooks) == 1
        with pytest.raises(ShapeError), heads.ablating(model, {"layer": [1]}):
            model(torch.ones(2, 3, 5))
        assert len(projection._forward_pre_hooks) == 1
    with pytest.raises(ConfigurationError), heads.ablating(model, {"layer": [0], "other": [0]}):
        pass
    assert not model.layer.projections.output._forward_pre_hooks


def blocks():
    return nn.Sequential(Called(attention()), Called(attention())).eval()


def test_effects_are_differences_of_the_measure():
    model, x = blocks(), torch.randn(1, 6, 12)

    def measure():
        return model(x).square().mean()

    effects = heads.head_effects(model, measure)
    assert {name: list(changes) for name, changes in effects.items()} == {
        "0.layer": [0, 1, 2, 3],
        "1.layer": [0, 1, 2, 3],
    }
    with torch.no_grad():
        with heads.ablating(model, {"0.layer": [2]}):
            without = measure()
        assert effects["0.layer"][2] == pytest.approx(float(without - measure()))
    some = heads.head_effects(model, measure, {"1.layer": [3]}, replace="mean")
    assert list(some) == ["1.layer"]
    assert list(some["1.layer"]) == [3]


def test_gradients_are_what_a_linear_measure_loses():
    model, x = Called(attention()), torch.randn(2, 6, 12)

    def measure():
        return (model(x) * torch.arange(12.0)).sum()

    gradients = heads.head_gradients(model, measure)["layer"]
    effects = heads.head_effects(model, measure)["layer"]
    torch.testing.assert_close(gradients, -torch.tensor([effects[head] for head in range(4)]), rtol=1e-3, atol=1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_gradients_are_those_of_weights_summed():
    layer = Attention(Projections(12, num_heads=4, num_kv_heads=2))
    x, whole = torch.randn(1, 6, 12), regard.lenses.Weights()
    gradients = heads.head_gradients(layer, lambda: layer(x).tanh().sum())[""]
    weights = layer.observe(x, whole)[whole]
    value = layer.projections.keys_and_values(x)[1].detach()
    context = (weights @ value.repeat_interleave(2, 1)).detach().requires_grad_()
    (grad_output,) = torch.autograd.grad(layer.projections.project_output(context).tanh().sum(), context)
    shown = heads.gradient_times_weights(weights, value, grad_output)
    torch.testing.assert_close(gradients, shown.sum((0, 2, 3)), rtol=1e-4, atol=1e-5)


def test_gradients_need_a_model_that_is_run():
    model = Called(attention())
    with pytest.raises(ConfigurationError, match="found 1 attention modules, of which 0 were called"):
        heads.head_gradients(model, lambda: torch.ones((), requires_grad=True))
    with pytest.raises(ConfigurationError, match="found 0 attention modules"):
        heads.head_gradients(nn.Linear(2, 2), lambda: torch.ones((), requires_grad=True))


def test_means_need_a_model_that_is_run():
    model = Called(attention())
    with pytest.raises(ConfigurationError, match="mean_outputs found 1 attention modules, of which none was called"):
        heads.mean_outputs(model, lambda: None)


class Strange(nn.Module):
    """An attention module whose output projection has an unknown name."""

    def __init__(self, width=8):
        super().__init__()
        self.num_heads, self.mix = 2, nn.Linear(width, 8)

    def forward(self, x):
        return self.mix(x)


def test_a_projection_can_be_told():
    strange, x = Strange(), torch.randn(1, 3, 8)
    model = nn.Sequential(strange)
    for output in ("0.mix", strange.mix):
        with torch.no_grad(), heads.ablating(model, {"0": [0, 1]}, outputs={"0": output}):
            torch.testing.assert_close(model(x), strange.mix.bias.expand(1, 3, 8))
    assert heads.head_effects(model, lambda: model(x).sum(), outputs={"0": "0.mix"}).keys() == {"0"}


@pytest.mark.parametrize(
    ("chosen", "options", "message"),
    [
        ({"layers": [0]}, {}, "there is no module 'layers'; did you mean 'layer'"),
        ({"layer": [4]}, {}, "'layer' has the heads 0 to 3; it was asked for 4"),
        ({"layer": [-1]}, {}, "it was asked for -1"),
        ({"layer": [True]}, {}, "it was asked for True"),
        ({"layer": [0]}, {"replace": "noise"}, "replace needs 'zero', 'mean', or means by module; it is 'noise'"),
        ({"layer": [0]}, {"replace": {"Layer": torch.ones(4, 3)}}, "replace has no means of 'layer'; did you mean"),
        ({"layer": [0]}, {"replace": {"layer": torch.ones(12)}}, r"the means of 'layer' have the shape \(12,\); they "
         r"need \(4, 3\), \(heads, width\)"),
        ({"layer": [0]}, {"outputs": {"layer": "layer.out"}}, "the projection 'layer.out', which is not there"),
        ({"layer.projections": [0]}, {}, "does not say which is its output projection: name one of layer"),
        ({"layer": [0]}, {"outputs": {"layer": nn.Linear(7, 3)}}, "has 4 heads, and its output projection, a Linear, "
         "takes 7 features: heads need to divide them"),
        ({"layer": 0}, {}, r"heads of 'layer' need to be a list of numbers, such as \[0\]; they are 0"),
        (["layer"], {}, r"heads needs the numbers of heads by the name of their module, .*; it is \['layer'\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_ablated(chosen, options, message):
    model = Called(attention())
    with pytest.raises((ConfigurationError, ShapeError), match=message), heads.ablating(model, chosen, **options):
        pass
    with pytest.raises((ConfigurationError, ShapeError), match=message):
        heads.head_effects(model, lambda: 0.0, chosen, **options)


def test_torchs_own_layer_never_calls_its_projection():
    model = nn.Sequential(nn.MultiheadAttention(8, 2))
    assert heads.head_projections(model) == {}
    with pytest.raises(
        ConfigurationError, match="no hook sees its heads: put regard's in its place with regard.nn.swap"
    ):
        heads.ablating(model, {"0": [0]}).__enter__()


def test_outputs_name_modules_that_are_there():
    with pytest.raises(ConfigurationError, match="outputs names the attention module 'lair'"):
        heads.head_projections(Called(attention()), {"lair": nn.Linear(2, 2)})


def test_gradients_are_caught_call_by_call_and_only_inside():
    model, x = Called(attention()), torch.randn(1, 4, 12)
    with heads.capturing_gradients(model) as gradients:
        once = model(x).square().sum()
        (once + 3 * model(x).square().sum()).backward()
        with torch.no_grad():
            model(x)
    model(x).sum().backward()
    first, second = gradients["layer"]
    assert first.shape == (1, 4, 4, 3)
    assert first.any()
    torch.testing.assert_close(second, 3 * first)


def test_gradients_of_several_passes_add_up():
    model, x = Called(attention()), torch.randn(1, 4, 12)
    with heads.capturing_gradients(model) as gradients:
        result = model(x).square().sum()
    result.backward(retain_graph=True)
    once = gradients["layer"][0].clone()
    result.backward()
    assert once.any()
    torch.testing.assert_close(gradients["layer"][0], 2 * once)


def test_torchs_encoder_after_the_swap():
    layer = nn.TransformerEncoderLayer(12, 4, 24, dropout=0.0, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), torch.randn(2, 5, 12)
    regard.nn.swap(model)
    with torch.no_grad():
        plain = model(x)
        effects = heads.head_effects(model, lambda: (model(x) - plain).norm())
    assert list(effects) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert all(change > 1e-3 for module in effects.values() for change in module.values())


def test_every_attention_of_our_own_models():
    def block(**parts):
        feed_forward = regard.nn.FeedForward(12, 24)
        return TransformerBlock(attention(), feed_forward, lambda: PostNorm(nn.LayerNorm(12)), **parts)

    tokens = transformer.Embedding(nn.Embedding(20, 12), regard.positions.Sinusoidal(12))
    model = transformer.Transformer(
        tokens,
        tokens,
        encoder=transformer.Encoder([block(), block()]),
        decoder=transformer.Decoder([block(cross_attention=Attention(Projections(12, num_heads=2)))]),
        output=transformer.TiedOutput(tokens.tokens),
    ).eval()
    found = heads.head_projections(model)
    attentions = {name for name, module in model.named_modules() if isinstance(module, Attention)}
    assert set(found) == attentions
    assert sorted(projection.heads for projection in found.values()) == [2, 4, 4, 4]
    source, lengths, target = torch.ones(2, 5).long(), torch.tensor([5, 3]), torch.ones(2, 4).long()
    effects = heads.head_effects(model, lambda: model(source, lengths, target).square().mean())
    assert all(change != 0.0 for module in effects.values() for change in module.values())
