"""DeBERTa-v2 and v3 by "regard" against transformers' eager attention: outputs, weights, gradients, padding, lenses."""

import copy

import pytest
import torch

import regard.huggingface
from regard import lenses

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "relative_attention": True,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "pad_token_id": 0,
}
V3 = SMALL | {
    "pos_att_type": ["p2c", "c2p"],
    "position_buckets": 8,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
KINDS = {
    "v3": V3 | {"position_biased_input": False, "type_vocab_size": 0},
    "v2 with a convolution": V3 | {"conv_kernel_size": 3},
    "maps of positions of their own": SMALL | {"pos_att_type": ["p2c", "c2p"], "max_relative_positions": 16},
    "content to position": SMALL | {"pos_att_type": ["c2p"], "position_buckets": 8, "max_relative_positions": 32},
    "position to content": SMALL | {"pos_att_type": ["p2c"], "position_buckets": 8},
    "no positions": SMALL | {"relative_attention": False, "pos_att_type": []},
}


def pair(kind):
    """The same model by eager attention, and by ours."""
    torch.manual_seed(0)
    eager = transformers.DebertaV2Model(transformers.DebertaV2Config(**KINDS[kind])).eval()
    ours = copy.deepcopy(eager)
    report = regard.huggingface.swap(ours)
    assert len(report.replaced) == 3
    assert not report.skipped
    return eager, ours


def tokens(length=53):
    return torch.randint(1, 61, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padded", [False, True])
def test_outputs_weights_and_gradients_are_those_of_eager_attention(kind, padded):
    eager, ours = pair(kind)
    text, mask = tokens(), torch.ones(2, 53, dtype=torch.int64)
    if padded:
        mask[1, 37:] = 0
    found, expected = (model(text, attention_mask=mask, output_attentions=True) for model in (ours, eager))
    real = mask.bool()
    torch.testing.assert_close(found.last_hidden_state[real], expected.last_hidden_state[real], rtol=1e-5, atol=1e-5)
    for mine, theirs in zip(found.attentions, expected.attentions, strict=True):
        at = real[:, None, :, None]
        torch.testing.assert_close(mine * at, theirs * at, rtol=1e-5, atol=1e-5)
    upstream = torch.randn(found.last_hidden_state[real].shape, generator=torch.Generator().manual_seed(2))
    for output in (found, expected):
        (output.last_hidden_state[real] * upstream).sum().backward()
    theirs = dict(eager.named_parameters())
    for name, parameter in ours.named_parameters():
        if theirs[name].grad is None:
            assert parameter.grad is None, name
        else:
            terms = theirs[name.replace("proj.bias", "proj.weight")]  # a bias sums what cancels, of keys to 0
            scale = terms.grad.abs().max().clamp(min=1.0)
            assert (parameter.grad - theirs[name].grad).abs().max() <= 2e-5 * scale, name


def test_long_texts_go_through_tables_of_all_buckets():
    eager, ours = pair("v3")
    text = tokens(300)
    with torch.no_grad():
        torch.testing.assert_close(ours(text).last_hidden_state, eager(text).last_hidden_state, rtol=1e-5, atol=2e-5)


def test_lenses_observe_its_weights():
    eager, ours = pair("v3")
    first = lenses.Weights()
    with torch.no_grad(), regard.huggingface.observing(ours, first) as views:
        ours(tokens())
        expected = eager(tokens(), output_attentions=True).attentions
    assert len(views) == 3
    for calls, theirs in zip(views.values(), expected, strict=True):
        torch.testing.assert_close(calls[0][first], theirs, rtol=1e-5, atol=1e-5)


def test_a_swapped_model_is_copied_and_saved_as_the_one_before(tmp_path):
    eager, ours = pair("v3")
    again = copy.deepcopy(ours)
    ours.save_pretrained(tmp_path)
    loaded = transformers.DebertaV2Model.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = eager(tokens()).last_hidden_state
        for model in (again, loaded):
            torch.testing.assert_close(model(tokens()).last_hidden_state, expected, rtol=1e-5, atol=1e-5)


def test_dropout_in_training_is_drawn():
    torch.manual_seed(0)
    config = transformers.DebertaV2Config(**(KINDS["v3"] | {"attention_probs_dropout_prob": 0.5}))
    model = transformers.DebertaV2Model(config).train()
    regard.huggingface.swap(model)
    assert not torch.equal(model(tokens()).last_hidden_state, model(tokens()).last_hidden_state)


def test_positions_of_ones_own_are_computed_by_eager_attention():
    eager, ours = pair("v3")
    attention, theirs = ours.encoder.layer[0].attention.self, eager.encoder.layer[0].attention.self
    states, embeddings = torch.randn(2, 11, 32), eager.encoder.get_rel_embedding()
    positions = torch.randint(-7, 8, (1, 11, 11))
    mask = torch.ones(2, 1, 11, 11)
    found, expected = (
        each(states, mask, relative_pos=positions, rel_embeddings=embeddings)[0] for each in (attention, theirs)
    )
    torch.testing.assert_close(found, expected)


def test_the_first_deberta_stays_with_transformers():
    config = transformers.DebertaConfig(**(SMALL | {"pos_att_type": ["c2p"]}))
    report = regard.huggingface.swap(transformers.DebertaModel(config))
    assert not report.replaced
    assert "DisentangledSelfAttention computes attention by itself" in str(report)
