"""Language models whose layers have reflections, vectors by distance or forget gates: steps, texts, files, errors."""

import pytest
import torch

from regard.errors import ConfigurationError
from regard.models import language_model as lm
from regard.nn import Attention, PathAttention, RelativeAttention
from regard.positions import Rotary

PATH, RELATIVE = lm.PathPositionsConfig(rank=3), lm.RelativePositionsConfig(before=5)
CASES = {
    "path": (lm.LayerConfig(positions=PATH), False, PathAttention),
    "path in a window": (lm.LayerConfig(positions=PATH, before=4, prefix=2), False, PathAttention),
    "path with forget gates": (lm.LayerConfig(positions=PATH), True, PathAttention),
    "relative": (lm.LayerConfig(positions=RELATIVE), False, RelativeAttention),
    "forget gates": (lm.LayerConfig(rotary=Rotary(8)), True, Attention),
}


def config_of(layer: lm.LayerConfig, forget_gate: bool = False, **options) -> lm.LanguageModelConfig:
    attention = lm.AttentionConfig(num_heads=4, num_kv_heads=2, forget_gate=forget_gate, **options)
    return lm.LanguageModelConfig(23, 32, (layer, layer), attention, lm.GatedFeedForwardConfig(40))


@pytest.fixture(params=CASES)
def model(request):
    layer, forget_gate, kind = CASES[request.param]
    torch.manual_seed(0)
    model = lm.LanguageModel(config_of(layer, forget_gate)).eval()
    assert {type(block.attention) for block in model.blocks} == {kind}
    return model


def test_steps_are_the_whole(model):
    tokens = torch.randint(23, (2, 41))
    with torch.no_grad():
        logits, cache = [], model.make_cache()
        for part in tokens.split([5, 1, 1, 4, *[1] * 30], dim=1):
            output, cache = model.step(part, cache)
            logits.append(output)
        torch.testing.assert_close(torch.cat(logits, 1), model(tokens), atol=2e-5, rtol=1e-4)
        rows = torch.tensor([1, 1, 0])
        ours, _ = model.step(tokens[rows, :1], cache.reorder(rows))
        torch.testing.assert_close(ours, model.step(tokens[:, :1], cache)[0][rows], atol=2e-5, rtol=1e-4)


def test_padded_prompts_continue_as_each_alone(model):
    tokens, lengths = torch.randint(23, (3, 9)), [9, 4, 1]
    together = torch.stack(list(model.generate(tokens, 6, lengths=lengths, chunk=5)), 1)
    for row, length in enumerate(lengths):
        alone = torch.stack(list(model.generate(tokens[row : row + 1, 9 - length :], 6)), 1)
        assert torch.equal(together[row], alone[0])


def test_a_saved_model_is_the_same(model, tmp_path):
    model.save(tmp_path)
    tokens = torch.randint(23, (1, 7))
    loaded = lm.LanguageModel.load(tmp_path).eval()
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens), model(tokens))


def test_all_parameters_learn(model):
    tokens = torch.randint(23, (2, 19))
    lm.next_token_loss(model(tokens), tokens).backward()
    assert [name for name, each in model.named_parameters() if each.grad is None or not each.grad.any()] == []


@pytest.mark.parametrize("case", CASES)
def test_many_sequences_at_once_are_refused(case):
    layer, forget_gate, _ = CASES[case]
    model = lm.LanguageModel(config_of(layer, forget_gate)).eval()
    with pytest.raises(ConfigurationError, match=r"layer 0 (is a \w+, whose state is not|has a forget gate)"):
        list(model.generate_many([torch.tensor([1, 2])], 2))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: lm.LayerConfig(positions=PATH, rotary=Rotary(8)), r"take the place of a rotary, and rotary=Rotary"),
        (lambda: lm.LayerConfig(positions=PATH, linear=lm.LinearAttentionConfig()), "and linear=LinearAttentionConfig"),
        (lambda: lm.LayerConfig(positions=PATH, keys_from=0), "and keys_from=0: leave one"),
        (lambda: of(lm.LayerConfig(positions=PATH), softcap=5.0, sinks=True), "sets softcap=5.0 and sinks=True: give"),
        (lambda: of(lm.LayerConfig(positions=RELATIVE), forget_gate=True), "sets forget_gate=True: give the layer"),
        (lambda: of(lm.LayerConfig(positions=PATH), lm.LayerConfig(keys_from=0)), "the keys of layer 0 have positions"),
        (lambda: of(lm.LayerConfig(), lm.LayerConfig(keys_from=0), forget_gate=True), "one of them has a forget_gate"),
    ],
)
def test_settings_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ConfigurationError, match=message):
        make()


def of(*layers: lm.LayerConfig, **options) -> lm.LanguageModel:
    attention = lm.AttentionConfig(num_heads=4, **options)
    return lm.LanguageModel(lm.LanguageModelConfig(23, 32, layers, attention, lm.GatedFeedForwardConfig(40)))


def test_latent_attention_has_no_positions_by_content():
    latent = lm.LatentAttentionConfig(2, latent_dim=4, rotary_dim=2)
    config = lm.LanguageModelConfig(9, 8, (lm.LayerConfig(positions=PATH),), latent, lm.GatedFeedForwardConfig(8))
    with pytest.raises(ConfigurationError, match="latent attention stores latents: give the layer an AttentionConfig"):
        lm.LanguageModel(config)
