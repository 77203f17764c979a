"""Models of transformers: their output projections, and the roles lens on a whole model."""

import pytest
import torch

import regard
from regard import heads
from regard.errors import ConfigurationError

transformers = pytest.importorskip("transformers")
import regard.huggingface  # noqa: E402

COMMON = {"vocab_size": 61, "initializer_range": 0.3, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
MODELS = {
    "bert": ("BertModel", "BertConfig", COMMON | SIZES, "encoder.layer.{}.attention.self"),
    "llama": ("LlamaModel", "LlamaConfig", COMMON | SIZES | {"num_key_value_heads": 2}, "layers.{}.self_attn"),
    "gpt2": ("GPT2Model", "GPT2Config", COMMON | {"n_embd": 32, "n_layer": 2, "n_head": 4}, "h.{}.attn"),
    "distilbert": (
        "DistilBertModel",
        "DistilBertConfig",
        COMMON | {"dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4},
        "transformer.layer.{}.attention",
    ),
    "modernbert": ("ModernBertModel", "ModernBertConfig", COMMON | SIZES, "layers.{}.attn"),
    "t5": (
        "T5EncoderModel",
        "T5Config",
        {"vocab_size": 61, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0},
        "encoder.block.{}.layer.0.SelfAttention",
    ),
}


def small(name):
    model, config, settings, _ = MODELS[name]
    torch.manual_seed(1)
    made = getattr(transformers, model)._from_config(getattr(transformers, config)(**settings))
    return made.eval()


@pytest.mark.parametrize("name", MODELS)
def test_the_projection_of_each_model_is_known(name):
    model, pattern = small(name), MODELS[name][3]
    found = heads.head_projections(model)
    assert list(found) == [pattern.format(layer) for layer in (0, 1)]
    assert {(projection.heads, projection.width) for projection in found.values()} == {(4, 8)}


@pytest.mark.parametrize("name", MODELS)
def test_a_head_that_is_taken_away_adds_nothing(name):
    model, tokens = small(name), torch.randint(3, 61, (2, 9))
    module = MODELS[name][3].format(0)
    weight = heads.head_projections(model)[module].module.get_parameter("weight")
    with torch.no_grad():
        plain = model(input_ids=tokens).last_hidden_state
        with heads.ablating(model, {module: [2]}):
            ablated = model(input_ids=tokens).last_hidden_state
        columns = weight[16:24] if name == "gpt2" else weight[:, 16:24]
        columns.zero_()
        torch.testing.assert_close(ablated, model(input_ids=tokens).last_hidden_state)
    assert not torch.allclose(ablated, plain, atol=1e-3)


def test_roles_and_metrics_of_a_whole_model_are_those_of_its_weights():
    model, tokens = small("llama"), torch.randint(3, 61, (2, 40))
    regard.huggingface.swap(model)
    roles, numbers, whole = heads.Roles(tokens), heads.Metrics(), regard.lenses.Weights()
    with torch.no_grad(), regard.huggingface.observing(model, roles, numbers, whole) as views:
        model(input_ids=tokens)
    for name in ("layers.0.self_attn", "layers.1.self_attn"):
        shown = views[name][0]
        expected = heads.gather_role_evidence(shown[whole], tokens, mask=regard.masks.causal())
        torch.testing.assert_close(shown[roles].scores, expected.scores, rtol=1e-4, atol=1e-4)
        assert shown[roles].rows.equal(expected.rows)
        torch.testing.assert_close(shown[roles].chances, expected.chances)
        for ours, theirs in zip(shown[numbers], heads.head_metrics(shown[whole]), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_padding_is_no_row():
    model = small("bert")
    regard.huggingface.swap(model)
    lists = [["[CLS]", "a", "b", "a", ",", "[SEP]"], ["[CLS]", "b", "[SEP]", "[PAD]", "[PAD]", "[PAD]"]]
    ids = torch.tensor([[5, 7, 8, 7, 9, 6], [5, 8, 6, 0, 0, 0]])
    together = heads.Roles(lists)
    with torch.no_grad(), regard.huggingface.observing(model, together) as views:
        model(input_ids=ids, attention_mask=(ids > 0).long())
    apart = []
    for row, names in zip(ids, lists, strict=True):
        lens, length = heads.Roles([name for name in names if name != "[PAD]"]), int((row > 0).sum())
        with torch.no_grad(), regard.huggingface.observing(model, lens) as one:
            model(input_ids=row[None, :length])
        apart.append(one["encoder.layer.1.attention.self"][0][lens])
    shown, expected = views["encoder.layer.1.attention.self"][0][together], heads.RoleEvidence.total(apart)
    torch.testing.assert_close(shown.scores, expected.scores, rtol=1e-4, atol=1e-4)
    assert shown.rows.equal(expected.rows)
    assert shown.queries == expected.queries == 9
    torch.testing.assert_close(shown.chances, expected.chances)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_gradient_times_attention_of_a_whole_model_is_eagers(name):
    tokens = torch.randint(3, 61, (2, 7))
    eager, ours = small(name), small(name)
    eager.set_attn_implementation("eager")
    seen = eager(input_ids=tokens, output_attentions=True)
    for weights in seen.attentions:
        weights.retain_grad()
    seen.last_hidden_state.tanh().sum().backward()
    regard.huggingface.swap(ours)
    whole, values = regard.lenses.Weights(), heads.Values()
    with regard.huggingface.observing(ours, whole, values) as views, heads.capturing_gradients(ours) as gradients:
        result = ours(input_ids=tokens).last_hidden_state.tanh().sum()
    result.backward()
    for layer, weights in enumerate(seen.attentions):
        module = MODELS[name][3].format(layer)
        shown = views[module][0]
        product = heads.gradient_times_weights(shown[whole], shown[values], gradients[module][0])
        torch.testing.assert_close(product, (weights * weights.grad).detach(), rtol=1e-3, atol=1e-4)


def test_a_model_without_attention_has_no_gradients_to_catch():
    with (
        pytest.raises(ConfigurationError, match="Linear has no attention module whose heads can be told apart"),
        heads.capturing_gradients(torch.nn.Linear(2, 2)),
    ):
        pass
