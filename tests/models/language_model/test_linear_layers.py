"""Language models that mix softmax and linear attention: steps, generation, saving, training, documents."""

import pytest
import torch

from regard import lenses, masks
from regard.errors import ConfigurationError
from regard.linear import DecoupledDeltaRule, DeltaRule, SoftplusFeatureDecay, StateSpaceRule, SumRule
from regard.models import language_model as lm
from regard.nn import Attention, KVCache, LinearAttention, LinearCache, Projections
from regard.positions import Rotary

LINEAR = [
    lm.LinearAttentionConfig(),
    lm.LinearAttentionConfig("identity", decay="feature", normalize=False),
    lm.LinearAttentionConfig(decay="head", delta_rule=True),
    lm.LinearAttentionConfig(
        "identity",
        decay=SoftplusFeatureDecay(rank=4),
        rule=DecoupledDeltaRule(largest=1.5),
        heads=lm.LinearHeadsConfig(4, num_key_heads=2, head_dim=6, value_dim=5, unit_eps=1e-6),
        convolution=lm.ShortConvolutionConfig(3, bias=True),
        shift=lm.TokenShiftConfig(),
        gate=lm.OutputGateConfig("sigmoid", norm_eps=1e-5, rank=7),
    ),
    lm.LinearAttentionConfig(
        "identity",
        decay="softplus",
        rule=StateSpaceRule(),
        heads=lm.LinearHeadsConfig(4, num_key_heads=1, head_dim=6, value_dim=5),
        convolution=lm.ShortConvolutionConfig(activation=None),
        gate=lm.OutputGateConfig(norm_eps=1e-5, groups=2),
    ),
]


def model_of(linear, first_linear=True):
    soft, line = lm.LayerConfig(rotary=Rotary(8)), lm.LayerConfig(linear=linear)
    layers = (line, soft, line) if first_linear else (soft, line)
    attention = lm.AttentionConfig(num_heads=4, num_kv_heads=2)
    return lm.LanguageModel(lm.LanguageModelConfig(23, 32, layers, attention, lm.GatedFeedForwardConfig(40))).eval()


@pytest.fixture(
    params=LINEAR, ids=lambda linear: "delta" if linear.delta_rule else f"{linear.feature_map}, {linear.rule}"
)
def model(request):
    return model_of(request.param)


def test_layers_are_what_the_configuration_says(model):
    kinds = [type(block.attention) for block in model.blocks]
    assert kinds == [LinearAttention, Attention, LinearAttention]
    assert [type(layer.attention) for layer in model.make_cache().layers] == [LinearCache, KVCache, LinearCache]


def test_steps_are_the_whole(model):
    tokens = torch.randint(23, (2, 11))
    logits, cache = [], model.make_cache()
    for part in tokens.split([5, 1, 1, 4], dim=1):
        output, cache = model.step(part, cache)
        logits.append(output)
    torch.testing.assert_close(torch.cat(logits, 1), model(tokens), atol=1e-5, rtol=1e-4)
    rows = torch.tensor([1, 1, 0])
    ours, _ = model.step(tokens[rows, :1], cache.reorder(rows))
    torch.testing.assert_close(ours, model.step(tokens[:, :1], cache)[0][rows], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("first_linear", [True, False])
def test_padded_prompts_continue_as_each_alone(first_linear):
    model = model_of(LINEAR[2], first_linear)
    tokens, lengths = torch.randint(23, (3, 9)), [9, 4, 1]
    together = torch.stack(list(model.generate(tokens, 6, lengths=lengths, chunk=5)), 1)
    for row, length in enumerate(lengths):
        alone = torch.stack(list(model.generate(tokens[row : row + 1, 9 - length :], 6)), 1)
        assert torch.equal(together[row], alone[0])


def test_packed_documents_are_read_as_if_alone(model):
    tokens, ids = torch.randint(23, (1, 9)), torch.tensor([0, 0, 0, 0, 1, 1, 2, 2, 2])
    positions = torch.tensor([0, 1, 2, 3, 4, 5, 6, 7, 8])
    packed = model(tokens, mask=masks.documents(ids), positions=positions)
    alone = [model(tokens[:, ids == document]) for document in range(3)]
    torch.testing.assert_close(packed, torch.cat(alone, 1), atol=1e-5, rtol=1e-4)


def test_saved_and_loaded(model, tmp_path):
    tokens = torch.randint(23, (2, 11))
    model.save(tmp_path)
    loaded = lm.LanguageModel.load(tmp_path)
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_it_learns_to_repeat_a_token(model):
    tokens = torch.randint(23, (8, 12))
    tokens[:, 1::2] = tokens[:, ::2]
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    counted = torch.zeros_like(tokens, dtype=torch.bool)
    counted[:, 1::2] = True
    losses = []
    for _ in range(40):
        loss = lm.next_token_loss(model(tokens), tokens, counted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_bad_configurations():
    with pytest.raises(ConfigurationError, match="attends to all tokens before each, but has before=3 and prefix=0"):
        lm.LayerConfig(before=3, linear=LINEAR[0])
    with pytest.raises(ConfigurationError, match=r"there is no feature map 'eluu'; did you mean 'elu'\?"):
        model_of(lm.LinearAttentionConfig("eluu"))
    with pytest.raises(ConfigurationError, match=r"there is no decay 'heads'; did you mean 'head'\?"):
        model_of(lm.LinearAttentionConfig(decay="heads"))
    with pytest.raises(ConfigurationError, match="the weights of the delta rule have no sum to divide by"):
        model_of(lm.LinearAttentionConfig(delta_rule=True, normalize=True))
    with pytest.raises(ConfigurationError, match=r"rule=SumRule\(normalize=False\) takes the place of delta_rule=True"):
        lm.LinearAttentionConfig(delta_rule=True, rule=SumRule(normalize=False))
    with pytest.raises(ConfigurationError, match="there is no gate activation 'sigmoidal'; did you mean 'sigmoid'"):
        model_of(lm.LinearAttentionConfig(gate=lm.OutputGateConfig("sigmoidal")))
    with pytest.raises(
        ConfigurationError, match="groups=2 are of a norm after the gate, .* norm_eps=None and rank=None"
    ):
        model_of(lm.LinearAttentionConfig(gate=lm.OutputGateConfig(groups=2)))
    with pytest.raises(ConfigurationError, match=r"rule=StateSpaceRule\(\) reads the step of a decay: make the layer"):
        model_of(lm.LinearAttentionConfig("identity", rule=StateSpaceRule()))
    with pytest.raises(ConfigurationError, match="whole_norm=True is of a norm, and there is none: give the attention"):
        lm.AttentionConfig(num_heads=2, whole_norm=True).make(8, lm.LayerConfig())
    with pytest.raises(
        ConfigurationError, match="num_heads is 4 and num_key_heads 3: each query and key serves as many"
    ):
        model_of(lm.LinearAttentionConfig(heads=lm.LinearHeadsConfig(4, 3)))


def test_settings_of_linear_layers_make_their_decay_and_rule():
    made = [linear.make(Projections(32, 4), None) for linear in LINEAR[:3]]
    assert [layer.rule for layer in made] == [SumRule(), SumRule(normalize=False), DeltaRule()]
    for layer, decay in zip(made, ("None", "FeatureDecay", "HeadDecay"), strict=True):
        assert f"decay={decay}" in repr(layer)
    assert lm.LinearAttentionConfig(delta_rule=True, normalize=False).make(Projections(32, 4), None).rule == DeltaRule()


def test_lenses_see_softmax_and_linear_layers():
    model, tokens = model_of(LINEAR[0]), torch.randint(23, (2, 11))
    weights = lenses.Weights()
    seen = model.observe(tokens, weights)
    assert torch.allclose(seen.logits, model(tokens), atol=1e-5)
    for layer in seen.layers:
        assert torch.allclose(layer[weights].sum(-1), torch.ones(()), atol=1e-5)
        assert (layer[weights].triu(1) == 0).all()
    with pytest.raises(ConfigurationError, match="a decoding step of linear attention has the sums of earlier keys"):
        model.observe_step(tokens, model.make_cache(), weights)


def test_steps_of_linear_attention_are_not_captured():
    stream = model_of(LINEAR[0]).generate(torch.tensor([[3, 1, 4]]), 3, captured=True)
    with pytest.raises(ConfigurationError, match="a layer has a LinearCache, and captured steps need a KVCache"):
        list(stream)
