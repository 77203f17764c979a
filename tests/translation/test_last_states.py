"""Recurrent translators without attention: the decoder reads the last states of the encoder alone."""

import re
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from small_runs import experiment, write_text

from regard.errors import ConfigurationError
from regard.translation.build_model import build_model
from regard.translation.experiment import Experiment
from regard.translation.settings import RecurrentSettings
from regard.translation.training import train
from regard.translation.translator import Translator

SIZE = 11
DECODERS: list[Any] = [{"kind": "bahdanau"}, {"kind": "luong", "score": "dot"}]


def build(decoder: Any, **settings: Any) -> Any:
    torch.manual_seed(1)
    told = {"embedding_dim": 6, "hidden_dim": 8, "dropout": 0.0, "encoder_states": "last", "decoder": decoder}
    return build_model(RecurrentSettings.model_validate({**told, **settings}), SIZE, SIZE).eval()


def batch():
    torch.manual_seed(2)
    return torch.randint(4, 10, (2, 7)), torch.tensor([7, 4]), torch.randint(4, 10, (2, 5))


@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("decoder", DECODERS, ids=lambda one: one["kind"])
def test_every_step_has_the_last_states_as_its_context(decoder, learns):
    model, (source, lengths, target) = build(decoder), batch()
    with torch.set_grad_enabled(learns):
        memory = model.encode(source, lengths)
        seen = model.decoder.unroll(model.target_embedding(target), memory)
    cell = model.encoder.encoder.layers[0]
    for row, length in enumerate(lengths.tolist()):
        states, _ = cell(model.source_embedding(source[row : row + 1, :length]))
        last = torch.cat([states[0, -1, :4], states[0, 0, 4:]])  # forward at the last word, backward at the first
        torch.testing.assert_close(seen.contexts[row], last.expand(5, -1), rtol=1e-5, atol=1e-6)


def test_weights_are_equal_and_the_score_learns_nothing():
    model, (source, lengths, target) = build(DECODERS[0]), batch()
    weights = model.attention_weights(source, lengths, target)
    for row, length in enumerate(lengths.tolist()):
        expected = torch.zeros(5, 7)
        expected[:, :length] = 1 / length
        torch.testing.assert_close(weights[row], expected)
    model(source, lengths, target).log_softmax(-1)[..., 4].sum().backward()
    of_score = [parameter.grad for parameter in model.decoder.attend.parameters()]
    assert all(grad.abs().max() < 1e-6 for grad in of_score)
    assert model.encoder.encoder.layers[0].weight_ih_l0.grad.abs().max() > 1e-3


@pytest.mark.parametrize("decoder", DECODERS, ids=lambda one: one["kind"])
def test_steps_equal_the_whole_and_padding_changes_nothing(decoder):
    model, (source, lengths, target) = build(decoder), batch()
    other = source.clone()
    other[1, 4:] = 10
    with torch.no_grad():
        whole, memory = model(source, lengths, target), model.encode(other, lengths)
        state, logits = model.start(memory), []
        for token in target.T:
            step = model.step(token, state, memory)
            state = step.state
            logits.append(step.logits)
    torch.testing.assert_close(torch.stack(logits, 1), whole, atol=1e-5, rtol=1e-5)


def test_it_has_the_parameters_of_the_translator_with_attention():
    counts = [
        sum(one.numel() for one in build(DECODERS[0], encoder_states=states).parameters()) for states in ("all", "last")
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pointer": True}, "model.pointer reads at which source token attention is"),
        ({"decoder": {"kind": "luong", "score": "concat", "coverage": "sum"}}, "model.decoder.coverage reads at which"),
        ({"encoder_states": "first"}, "'first'"),
    ],
)
def test_what_has_no_meaning_is_refused(settings, message):
    with pytest.raises(ValidationError, match=re.escape(message)):
        RecurrentSettings.model_validate({"encoder_states": "last", **settings})


def test_a_run_is_trained_and_loaded_without_attention(tmp_path):
    write_text(tmp_path)
    told = experiment(tmp_path, max_updates=4).model_dump(mode="json")
    model = {"embedding_dim": 6, "hidden_dim": 8, "encoder_states": "last"}
    assert train(Experiment.from_mapping({**told, "model": model}), tmp_path / "run").updates == 4
    translator = Translator.load(tmp_path / "run", "last")
    [translation] = translator.translate(["abc"])
    weights = translation.candidates[0].weights
    assert weights.shape[-1] == len(translation.source_tokens)
    assert weights.std(-1).max() < 1e-6


@pytest.mark.parametrize("loss", [{"coverage_loss": 1.0}, {"guided_alignment": {"weight": 0.1}}])
def test_a_loss_of_attention_is_refused(tmp_path, loss):
    write_text(tmp_path)
    told = experiment(tmp_path, max_updates=4).model_dump(mode="json")
    [name] = loss
    told = {**told, "model": {"encoder_states": "last"}, "training": {**told["training"], **loss}}
    with pytest.raises(ConfigurationError, match=f"training.{name} is a loss of attention weights, and with"):
        Experiment.from_mapping(told)
