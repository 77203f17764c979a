"""Transformers with other scores, head dims, positions and encoder attention than the paper's."""

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from regard.errors import ConfigurationError
from regard.lenses import Weights
from regard.nn import Attention, LinearAttention, LinformerAttention, PerformerAttention, RelativeAttention
from regard.translation.build_model import build_model
from regard.translation.settings import TransformerSettings

SMALL = {
    "dim": 16, "hidden_dim": 8, "num_heads": 2, "encoder_layers": 2, "decoder_layers": 1, "dropout": 0.0
}  # fmt: skip


def build(**settings) -> Any:
    torch.manual_seed(1)
    return build_model(TransformerSettings.model_validate({**SMALL, **settings}), 10, 11).eval()


def batch():
    torch.manual_seed(2)
    return torch.randint(4, 10, (2, 6)), torch.tensor([6, 4]), torch.randint(4, 11, (2, 5))


OTHERS = [
    {"score": "dot"},
    {"head_dim": 6, "positions": "rotary"},
    {"positions": "alibi"},
    {"positions": "none"},
    {"positions": "relative"},
    {"positions": {"kind": "relative", "distance": 2, "values": False}},
    {"encoder_attention": "linear"},
    {"encoder_attention": "performer", "positions": "rotary"},
    {"encoder_attention": {"kind": "linformer", "rank": 3}, "max_source_length": 9},
    {"decoder_attention": "ssru"},
    {"decoder_attention": "ssru", "positions": "rotary", "normalizer": "sparsemax"},
    {"normalizer": "sparsemax"},
    {"normalizer": {"kind": "entmax", "number": 1.25}},
]


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_steps_equal_the_whole(settings):
    model = build(**settings)
    source, lengths, target = batch()
    with torch.no_grad():
        whole = model(source, lengths, target)
        memory = model.encode(source, lengths)
        state, outputs = model.start(memory), []
        for token in target.T:
            step = model.step(token, state, memory)
            state = step.state
            outputs.append(step.logits)
    torch.testing.assert_close(torch.stack(outputs, 1), whole, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_padding_changes_nothing(settings):
    model = build(**settings)
    source, lengths, target = batch()
    other = source.clone()
    other[1, 4:] = 9
    with torch.no_grad():
        torch.testing.assert_close(model(other, lengths, target), model(source, lengths, target))


def test_the_dot_score_is_the_scaled_one_without_its_scale():
    # W_q times √d makes q·k/√d of what was q·k.
    dot, scaled = build(score="dot"), build()
    scaled.load_state_dict(dot.state_dict())
    for block in [*scaled.encoder.blocks, *scaled.decoder.blocks]:
        for attention in (block.attention, block.cross_attention):
            if attention is not None:
                query = attention.projections.query
                query.weight.data *= 8**0.5
                query.bias.data *= 8**0.5
    with torch.no_grad():
        torch.testing.assert_close(dot(*batch()), scaled(*batch()))


def test_without_positions_the_order_of_the_source_makes_no_difference():
    source, lengths, target = batch()
    lengths = torch.tensor([6, 6])
    with torch.no_grad():
        for settings, differs in (({"positions": "none"}, False), ({"positions": "alibi"}, True), ({}, True)):
            model = build(**settings)
            difference = model(source.roll(1, 1), lengths, target) - model(source, lengths, target)
            assert bool(difference.abs().max() > 1e-4) == differs


def test_each_kind_of_encoder_attention_is_that_layer():
    kinds = {"linear": LinearAttention, "performer": PerformerAttention, "linformer": LinformerAttention}
    for name, kind in kinds.items():
        blocks = build(encoder_attention=name, max_source_length=9).encoder.blocks
        assert all(type(block.attention) is kind for block in blocks)
    shared = {id(block.attention.key_length) for block in blocks}
    assert len(shared) == 1  # Linformer's blocks share one projection along the length


def test_a_normalizer_takes_the_place_of_softmax_in_all_attention():
    model = build(normalizer={"kind": "sigmoid", "number": -2.0})
    normalizers = [module.normalizer for module in model.modules() if isinstance(module, Attention)]
    made = [repr(normalizer()) for normalizer in normalizers if normalizer is not None]
    assert made == ["Sigmoid(bias=-2.0)"] * 4  # of two blocks, and of one with attention to the source


def test_relative_positions_count_in_both_directions_in_the_encoder_alone():
    model = build(positions={"kind": "relative", "distance": 3})
    layers = [module for module in model.modules() if isinstance(module, RelativeAttention)]
    assert [(layer.before, layer.after) for layer in layers] == [(3, 3)] * (len(layers) - 1) + [(3, 0)]
    assert len(model.encoder.blocks) + len(model.decoder.blocks) == len(layers)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder_attention": "linformer"}, "needs to know how many: set model.max_source_length"),
        ({"encoder_attention": "linear", "positions": "alibi"}, "'linear' has no scores of pairs of tokens, which"),
        ({"encoder_attention": "linear", "positions": "relative"}, "'linear' has no scores of pairs of tokens, which"),
        ({"positions": "relative", "score": "dot"}, "model.score is 'dot' and model.normalizer 'softmax': leave these"),
        ({"positions": "relative", "normalizer": "sparsemax"}, "model.normalizer 'sparsemax': leave these out, or"),
        ({"encoder_attention": "linear", "score": "dot"}, "'linear' has a score of its own; leave model.score"),
        ({"encoder_attention": "performer", "attention_dropout": 0.1}, "attention_dropout 0.1 drops weights of"),
        ({"encoder_attention": "linear", "normalizer": "softpick"}, "'softpick' takes the place of softmax in all"),
        ({"normalizer": "top_scores"}, "'top_scores' needs a number: how many keys have weight, such as 16"),
        ({"num_heads": 3}, "each head takes dim / num_heads features; write model.head_dim"),
        ({"head_dim": 3, "positions": "rotary"}, "model.head_dim is 3 and needs to be even"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(settings, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        TransformerSettings.model_validate({**SMALL, **settings})


def test_alibi_tells_distances_and_not_directions_in_an_encoder():
    source, _, target = batch()
    lengths = torch.tensor([6, 6])
    model = build(positions="alibi")
    with torch.no_grad():
        torch.testing.assert_close(
            model(source.flip(1), lengths, target), model(source, lengths, target), atol=1e-5, rtol=1e-5
        )


@pytest.mark.parametrize("settings", OTHERS, ids=str)
def test_weights_of_a_known_target_sum_to_one(settings):
    source, lengths, target = batch()
    with torch.no_grad():
        weights = build(**settings).attention_weights(source, lengths, target)
    assert weights.shape == (2, 5, 1, 2, 6)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 5, 1, 2))


def test_linformer_says_why_it_cannot_be_observed():
    model = build(encoder_attention="linformer", max_source_length=9)
    with pytest.raises(ConfigurationError, match="no weights of tokens to observe: each of its keys is a mixture"):
        model.observe(*batch(), Weights())
