"""The recurrent translators are what their papers say, and a step at a time is the same as all steps at once."""

import dataclasses

import pytest
import torch
from torch.nn import functional

from regard.errors import ConfigurationError, ShapeError
from regard.models.recurrent import (
    BahdanauDecoder,
    BidirectionalEncoder,
    GlobalWindow,
    LuongDecoder,
    MonotonicWindow,
    PredictiveWindow,
    RecurrentTranslator,
)
from regard.models.recurrent.decoders import LinearReadout, TanhReadout
from regard.models.recurrent.encoder import make_cell
from regard.models.recurrent.source_attention import SourceAttention
from regard.scores import Additive, Concat, Dot, General, Location, ScaledDot

# Primes, so that no two axes can be taken for each other; the encoder gives 2 · 7, and dot scores need H = 14.
BATCH, SOURCE, TARGET, EMBEDDING, ENCODER, HIDDEN, READOUT = 3, 11, 5, 13, 7, 14, 17
SOURCE_SIZE, TARGET_SIZE = 19, 23
LENGTHS = torch.tensor([11, 4, 1])

SCORES = {
    "dot": lambda: Dot(),
    "scaled_dot": lambda: ScaledDot(),
    "general": lambda: General(HIDDEN, 2 * ENCODER),
    "additive": lambda: Additive(HIDDEN, 2 * ENCODER, 5),
    "concat": lambda: Concat(HIDDEN, 2 * ENCODER, 5),
    "location": lambda: Location(HIDDEN, 29),
}
WINDOWS = {
    "global": lambda: GlobalWindow(),
    "local-m": lambda: MonotonicWindow(2),
    "local-p": lambda: PredictiveWindow(HIDDEN, 2),
}
READOUTS = {"tanh": TanhReadout, "linear": LinearReadout}


def bahdanau(score="additive", cell="gru"):
    return BahdanauDecoder(EMBEDDING, 2 * ENCODER, HIDDEN, score=SCORES[score](), cell=cell, readout_dim=READOUT)


def luong(score="general", cell="gru", window="global", readout="tanh", feeding=False, layers=1):
    return LuongDecoder(
        EMBEDDING,
        2 * ENCODER,
        HIDDEN,
        attend=SourceAttention(SCORES[score](), WINDOWS[window]()),
        readout=READOUTS[readout](2 * ENCODER, HIDDEN),
        cell=cell,
        layers=layers,
        input_feeding=feeding,
    )


def translator(decoder, cell="gru", layers=1):
    encoder = BidirectionalEncoder(EMBEDDING, ENCODER, cell=cell, layers=layers)
    return RecurrentTranslator(SOURCE_SIZE, TARGET_SIZE, embedding_dim=EMBEDDING, encoder=encoder, decoder=decoder)


def batch():
    source = torch.randint(1, SOURCE_SIZE, (BATCH, SOURCE))
    source[torch.arange(SOURCE) >= LENGTHS[:, None]] = 0
    return source, LENGTHS, torch.randint(1, TARGET_SIZE, (BATCH, TARGET))


def step_by_step(model, source, lengths, target):
    memory = model.encode(source, lengths)
    state, logits, weights = model.start(memory), [], []
    for tokens in target.unbind(1):
        step = model.observe_step(tokens, state, memory)
        torch.testing.assert_close(model.step(tokens, state, memory).logits, step.logits)
        state = step.state
        logits.append(step.logits)
        weights.append(step.weights)
    return torch.stack(logits, 1), torch.stack(weights, 1)


DECODERS = {
    **{f"bahdanau-{score}": lambda score=score: bahdanau(score) for score in SCORES},
    "bahdanau-lstm": lambda: bahdanau(cell="lstm"),
    **{f"luong-{score}": lambda score=score: luong(score) for score in SCORES},
    **{f"luong-{score}-feeding": lambda score=score: luong(score, feeding=True) for score in SCORES},
    **{f"luong-{window}": lambda window=window: luong(window=window) for window in WINDOWS},
    **{f"luong-{window}-feeding": lambda window=window: luong(window=window, feeding=True) for window in WINDOWS},
    "luong-linear": lambda: luong(readout="linear"),
    "luong-linear-feeding": lambda: luong(readout="linear", feeding=True),
    "luong-lstm-2": lambda: luong(cell="lstm", layers=2),
    "luong-lstm-2-feeding": lambda: luong(cell="lstm", layers=2, feeding=True),
}


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_a_step_at_a_time_is_all_steps_at_once(decoder):
    model, example = translator(decoder()).eval(), batch()
    logits, weights = step_by_step(model, *example)
    torch.testing.assert_close(logits, model(*example))
    torch.testing.assert_close(weights, model.attention_weights(*example))


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_every_parameter_learns(decoder):
    model = translator(decoder())
    model(*batch()).logsumexp(-1).sum().backward()
    without = [
        name for name, parameter in model.named_parameters() if parameter.grad is None or not parameter.grad.any()
    ]
    assert not without


@pytest.mark.parametrize("decoder", [bahdanau, luong, lambda: luong(feeding=True, window="local-p")])
def test_a_sentence_does_not_see_its_batch(decoder):
    model, (source, lengths, target) = translator(decoder(), layers=2).eval(), batch()
    together, weights = model(source, lengths, target), model.attention_weights(source, lengths, target)
    for row, length in enumerate(lengths.tolist()):
        alone = source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1]
        torch.testing.assert_close(model(*alone)[0], together[row])
        torch.testing.assert_close(model.attention_weights(*alone)[0], weights[row, :, :length])
        assert weights[row, :, length:].eq(0).all()


@pytest.mark.parametrize("decoder", [bahdanau, lambda: luong(feeding=True, cell="lstm")])
def test_memory_and_state_can_be_reordered(decoder):
    model, (source, lengths, target) = translator(decoder()).eval(), batch()
    rows = torch.tensor([2, 0, 0])
    memory = model.encode(source, lengths)
    first = model.step(target[:, 0], model.start(memory), memory)
    moved = model.step(target[rows, 1], first.state.reorder(rows), memory.reorder(rows))
    plain = model.step(target[:, 1], first.state, memory)
    by_hand = model(source[rows], lengths[rows], torch.stack([target[rows, 0], target[rows, 1]], 1))[:, 1]
    torch.testing.assert_close(moved.logits, by_hand)
    assert not torch.equal(moved.logits, plain.logits)


@pytest.mark.parametrize("part", ["memory", "state"])
def test_rows_that_are_not_there_are_refused(part):
    model, (source, lengths, _) = translator(bahdanau()).eval(), batch()
    memory = model.encode(source, lengths)
    held = memory if part == "memory" else model.start(memory)
    with pytest.raises(ShapeError, match="rows are in 0..3, but the batch has the size 3: they need to be in 0..2"):
        held.reorder(torch.tensor([0, 3]))
    with pytest.raises(ShapeError, match=r"rows are in -1\.\.0"):
        held.reorder(torch.tensor([0, -1]))


def test_bahdanau_asks_with_the_state_before_the_word_and_luong_with_the_one_after():
    source, lengths, target = batch()
    other = target.clone()
    other[:, 2] = (target[:, 2] % (TARGET_SIZE - 1)) + 1
    for decoder, first_changed in ((bahdanau(), 3), (luong(), 2)):
        model = translator(decoder).eval()
        with torch.no_grad():
            changed = model.attention_weights(source, lengths, target) != model.attention_weights(
                source, lengths, other
            )
        # Row 2 has one source word, and so one weight of 1 whatever asks.
        assert changed[:2].any(-1).any(0).tolist() == [step >= first_changed for step in range(TARGET)]


def test_bahdanau_is_its_equations():
    model, (source, lengths, target) = translator(bahdanau()).eval(), batch()
    decoder, learned = model.decoder, dict(model.decoder.named_parameters())
    annotations = model.encode(source[:1], lengths[:1]).values[0]  # no padding in this row
    backward = model.encode(source[:1], lengths[:1]).encoded.last[0, ENCODER:]
    torch.testing.assert_close(backward, annotations[0, ENCODER:])  # the backward state stands at the first word
    state = torch.tanh(decoder.bridge.project(backward))
    logits = []
    for word in model.target_embedding(target[0]):
        compared = annotations @ learned["attend.score.key_weight"].T + learned["attend.score.query_weight"] @ state
        energy = torch.tanh(compared) @ learned["attend.score.weight"]
        context = energy.softmax(0) @ annotations
        state = torch.gru_cell(
            torch.cat([word, context])[None],
            state[None],
            learned["cell.weight_ih_l0"],
            learned["cell.weight_hh_l0"],
            learned["cell.bias_ih_l0"],
            learned["cell.bias_hh_l0"],
        )[0]
        pairs = decoder.readout(torch.cat([state, word, context])).view(READOUT, 2)
        logits.append(model.output(pairs.max(1).values))
    torch.testing.assert_close(torch.stack(logits), model(source, lengths, target)[0])


@pytest.mark.parametrize("feeding", [False, True])
def test_luong_is_its_equations(feeding):
    model, (source, lengths, target) = translator(luong(feeding=feeding)).eval(), batch()
    decoder, learned = model.decoder, dict(model.decoder.named_parameters())
    memory = model.encode(source[:1], lengths[:1])
    annotations = memory.values[0]
    state = torch.tanh(decoder.bridge.project(memory.encoded.last[0]))
    vector, logits = torch.zeros(HIDDEN), []
    for word in model.target_embedding(target[0]):
        state = torch.gru_cell(
            torch.cat([word, vector] if feeding else [word])[None],
            state[None],
            learned["cell.weight_ih_l0"],
            learned["cell.weight_hh_l0"],
            learned["cell.bias_ih_l0"],
            learned["cell.bias_hh_l0"],
        )[0]
        context = (state @ learned["attend.score.weight"] @ annotations.T).softmax(0) @ annotations
        vector = torch.tanh(learned["readout.project.weight"] @ torch.cat([context, state]))
        logits.append(model.output(vector))
    torch.testing.assert_close(torch.stack(logits), model(source, lengths, target)[0])


def test_the_linear_readout_is_an_output_layer_over_context_and_state():
    model, (source, lengths, target) = translator(luong(readout="linear")).eval(), batch()
    memory = model.encode(source, lengths)
    unrolled = model.decoder.unroll(model.target_embedding(target), memory)
    context = model.decoder.attend(unrolled.queries, memory)
    expected = functional.linear(torch.cat([context, unrolled.queries], -1), model.output.weight, model.output.bias)
    torch.testing.assert_close(model(source, lengths, target), expected)


def test_local_m_looks_around_the_step_and_at_nothing_past_the_end():
    model, (source, lengths, _) = translator(luong(window="local-m")).eval(), batch()
    target = torch.ones(BATCH, 9, dtype=torch.long)
    weights = model.attention_weights(source, lengths, target)
    steps, positions = torch.arange(9)[:, None], torch.arange(SOURCE)
    visible = (positions - steps).abs() <= 2
    seen = visible & (positions < lengths[:, None, None])
    assert torch.equal(weights > 0, seen)
    torch.testing.assert_close(weights.sum(-1), seen.any(-1).float())  # a sentence of one word, and steps beyond it


def test_local_p_is_a_bell_around_its_predicted_centre():
    decoder = luong(window="local-p", score="dot")
    model, (source, lengths, target) = translator(decoder).eval(), batch()
    memory = model.encode(source, lengths)
    queries = decoder.unroll(model.target_embedding(target), memory).queries
    window = decoder.attend.window
    assert isinstance(window, PredictiveWindow)
    centre = lengths[:, None] * torch.sigmoid(window.centre(torch.tanh(window.hidden(queries)))).squeeze(-1)
    distance = torch.arange(SOURCE) - centre[..., None]
    scores = queries @ memory.values.mT - distance**2 / (2 * 1.0**2)  # radius 2, so sigma is 1
    keep = (distance.abs() <= 2) & (torch.arange(SOURCE) < lengths[:, None, None])
    expected = scores.masked_fill(~keep, -torch.inf).softmax(-1).nan_to_num()
    torch.testing.assert_close(model.attention_weights(source, lengths, target), expected)


def test_a_step_that_is_not_observed_computes_no_weights(monkeypatch):
    def refused(*_, **__):
        raise AssertionError("nothing looks at the weights")

    model, (source, lengths, target) = translator(bahdanau()).eval(), batch()
    memory = model.encode(source, lengths)
    monkeypatch.setattr(SourceAttention, "with_weights", refused)
    model.step(target[:, 0], model.start(memory), memory)
    with pytest.raises(AssertionError, match="nothing looks"):
        model.observe_step(target[:, 0], model.start(memory), memory)


def test_keys_are_projected_once_per_sentence(monkeypatch):
    calls = []
    project = Additive.project_key
    monkeypatch.setattr(Additive, "project_key", lambda self, key: calls.append(1) or project(self, key))
    model, example = translator(bahdanau()), batch()
    model(*example)
    assert len(calls) == 1
    step_by_step(model, *example)
    assert len(calls) == 2


def test_without_input_feeding_the_decoder_runs_all_steps_at_once(monkeypatch):
    model, example = translator(luong()), batch()
    calls = []
    model.decoder.cell.register_forward_hook(lambda *_: calls.append(1))
    model(*example)
    assert len(calls) == 1


def test_a_state_is_a_value():
    model, (source, lengths, target) = translator(bahdanau()).eval(), batch()
    memory = model.encode(source, lengths)
    state = model.start(memory)
    first, second = (model.step(target[:, 0], state, memory).logits for _ in range(2))
    assert torch.equal(first, second)
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.__setattr__("step", 3)


def test_an_unknown_cell_is_refused():
    with pytest.raises(ConfigurationError, match="cell is 'gruu'; did you mean 'gru'"):
        make_cell("gruu", 3, 5)


def test_a_source_beyond_the_location_score_is_refused():
    model = translator(luong("location"))
    with pytest.raises(ShapeError, match="key has 31 positions, but .*at most max_length=29"):
        model(torch.ones(1, 31).long(), torch.tensor([31]), torch.ones(1, 2).long())


def test_a_dot_product_of_other_widths_is_refused():
    decoder = BahdanauDecoder(EMBEDDING, 2 * ENCODER, 12, score=Dot(), cell="gru", readout_dim=READOUT)
    with pytest.raises(ShapeError, match="query has the dim 12 and key 14: Dot needs equal dims"):
        translator(decoder)(*batch())
