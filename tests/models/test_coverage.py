"""Coverage: what earlier weights have left, their sum or a GRU's vectors, enters the additive score, step by step."""

import dataclasses
from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError
from regard.kernels.hooks import attention_hook
from regard.models.recurrent import (
    BahdanauDecoder,
    BidirectionalEncoder,
    Covered,
    Fertility,
    GlobalWindow,
    LuongDecoder,
    MonotonicWindow,
    PredictiveWindow,
    RecurrentCoverage,
    RecurrentTranslator,
)
from regard.models.recurrent.decoders import TanhReadout
from regard.models.recurrent.source_attention import SourceAttention
from regard.scores import Additive, Concat, Dot

BATCH, SOURCE, TARGET, EMBEDDING, ENCODER, HIDDEN, WIDTH = 3, 11, 5, 13, 7, 14, 5
LENGTHS = torch.tensor([11, 4, 1])
SCORES = {"additive": Additive, "concat": Concat}
WINDOWS = {
    "global": GlobalWindow,
    "local-m": lambda: MonotonicWindow(2),
    "local-p": lambda: PredictiveWindow(HIDDEN, 2),
}


KEPT = 4
COVERAGES = {
    "sum": Covered,
    "fertility": lambda score: Covered(score, Fertility(2 * ENCODER, 3.0)),
    "gru": lambda score: RecurrentCoverage(score, HIDDEN, 2 * ENCODER, KEPT),
}


def bahdanau(score="additive", cell="gru", coverage="sum"):
    made: Any = SCORES[score](HIDDEN, 2 * ENCODER, WIDTH)
    kept = COVERAGES[coverage](made)
    return BahdanauDecoder(EMBEDDING, 2 * ENCODER, HIDDEN, score=made, cell=cell, readout_dim=17, coverage=kept)


def luong(score="additive", feeding=False, window="global", coverage="sum", **options):
    made: Any = SCORES[score](HIDDEN, 2 * ENCODER, WIDTH)
    return LuongDecoder(
        EMBEDDING,
        2 * ENCODER,
        HIDDEN,
        attend=SourceAttention(made, WINDOWS[window](), coverage=COVERAGES[coverage](made)),
        readout=TanhReadout(2 * ENCODER, HIDDEN),
        input_feeding=feeding,
        **options,
    )


def translator(decoder) -> Any:
    encoder = BidirectionalEncoder(EMBEDDING, ENCODER)
    model: Any = RecurrentTranslator(19, 23, embedding_dim=EMBEDDING, encoder=encoder, decoder=decoder).eval()
    coverage = model.decoder.attend.coverage
    weight = coverage.weight if isinstance(coverage, Covered) else coverage.project.weight
    torch.nn.init.normal_(weight, std=3.0)  # so that it matters
    return model


def batch():
    source = torch.randint(1, 19, (BATCH, SOURCE)).masked_fill(torch.arange(SOURCE) >= LENGTHS[:, None], 0)
    return source, LENGTHS, torch.randint(1, 23, (BATCH, TARGET))


DECODERS = {
    **{f"bahdanau-{score}": lambda score=score: bahdanau(score) for score in SCORES},
    "bahdanau-lstm": lambda: bahdanau(cell="lstm"),
    **{f"luong-{score}": lambda score=score: luong(score) for score in SCORES},
    "luong-feeding": lambda: luong(feeding=True),
    "luong-fertility": lambda: luong(coverage="fertility"),
    "bahdanau-gru": lambda: bahdanau(coverage="gru"),
    "luong-gru": lambda: luong(coverage="gru"),
    "luong-gru-feeding": lambda: luong("concat", feeding=True, coverage="gru"),
    "luong-lstm-2-feeding": lambda: luong(feeding=True, cell="lstm", layers=2),
    **{f"luong-{window}": lambda window=window: luong(window=window) for window in WINDOWS},
    **{f"luong-{window}-feeding": lambda window=window: luong(window=window, feeding=True) for window in WINDOWS},
}


@pytest.mark.parametrize("coverage", ["sum", "fertility"])
@pytest.mark.parametrize("score", SCORES)
def test_the_weights_are_those_of_the_formula_in_float64(score, coverage):
    model, (source, lengths, target) = translator(luong(score, coverage=coverage)).double(), batch()
    attend = model.decoder.attend
    memory = model.encode(source, lengths)
    queries = model.decoder.unroll(model.target_embedding(target), memory).queries
    contexts, weights = attend.with_weights(queries, memory)
    covered, there = torch.zeros(BATCH, SOURCE, dtype=torch.float64), torch.arange(SOURCE) < LENGTHS[:, None]
    phi = torch.ones(())
    if coverage == "fertility":
        phi = 3.0 * torch.sigmoid(memory.values @ attend.coverage.fertility.project.weight[0])
    for step in range(TARGET):
        hidden = attend.score.project_query(queries[:, step, None]) + memory.keys
        scores = torch.tanh(hidden + (covered / phi)[..., None] * attend.coverage.weight) @ attend.score.weight
        expected = scores.masked_fill(~there, -torch.inf).softmax(-1)
        torch.testing.assert_close(weights[:, step], expected, rtol=1e-12, atol=1e-14)
        torch.testing.assert_close(contexts[:, step], (expected[:, None] @ memory.values)[:, 0], rtol=1e-12, atol=1e-14)
        covered = covered + expected


@pytest.mark.parametrize("score", SCORES)
def test_a_gru_keeps_a_vector_of_each_source_word(score):
    """Tu et al. 2016, section 3.1.2, with the gates of a GRU written out, one source position after the other."""
    model, (source, lengths, target) = translator(luong(score, coverage="gru")).double(), batch()
    attend, memory = model.decoder.attend, model.encode(source, lengths)
    queries = model.decoder.unroll(model.target_embedding(target), memory).queries
    contexts, weights = attend.with_weights(queries, memory)
    cell = attend.coverage.cell
    for row, length in enumerate(LENGTHS.tolist()):
        kept = torch.zeros(length, KEPT, dtype=torch.float64)
        for step in range(TARGET):
            hidden = attend.score.project_query(queries[row, step]) + memory.keys[row, :length]
            scores = torch.tanh(hidden + kept @ attend.coverage.project.weight.T) @ attend.score.weight
            expected = scores.softmax(-1)
            torch.testing.assert_close(weights[row, step, :length], expected, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(contexts[row, step], expected @ memory.values[row, :length])
            for j in range(length):
                inputs = torch.cat([expected[j : j + 1], memory.values[row, j], queries[row, step]])
                of_inputs = (cell.weight_ih @ inputs + cell.bias_ih).chunk(3)
                of_kept = (cell.weight_hh @ kept[j] + cell.bias_hh).chunk(3)
                reset, update = ((a + b).sigmoid() for a, b in zip(of_inputs[:2], of_kept[:2], strict=True))
                kept[j] = (1 - update) * torch.tanh(of_inputs[2] + reset * of_kept[2]) + update * kept[j]


def test_the_bias_is_what_coverage_adds_to_the_score():
    model, (source, lengths, _) = translator(luong()).double(), batch()
    attend, memory = model.decoder.attend, model.encode(source, lengths)
    query, coverage = (torch.randn(BATCH, *of, dtype=torch.float64) for of in ((1, HIDDEN), (SOURCE,)))
    hidden = query @ attend.score.query_weight.T + memory.keys
    added = torch.tanh(hidden + coverage[..., None] * attend.coverage.weight) - torch.tanh(hidden)
    found = attend.coverage(attend.score, query, memory, coverage)
    torch.testing.assert_close(found[:, 0], added @ attend.score.weight)
    assert not attend.coverage(attend.score, query, memory, torch.zeros_like(coverage)).any()


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_a_step_at_a_time_is_all_steps_at_once(decoder):
    model, (source, lengths, target) = translator(decoder()), batch()
    memory = model.encode(source, lengths)
    state, logits, weights = model.start(memory), [], []
    for tokens in target.unbind(1):
        step = model.observe_step(tokens, state, memory)
        torch.testing.assert_close(model.step(tokens, state, memory).logits, step.logits)
        state = step.state
        logits.append(step.logits)
        weights.append(step.weights)
    torch.testing.assert_close(torch.stack(logits, 1), model(source, lengths, target))
    torch.testing.assert_close(torch.stack(weights, 1), model.attention_weights(source, lengths, target))
    if isinstance(model.decoder.attend.coverage, Covered):
        torch.testing.assert_close(state.coverage, torch.stack(weights).sum(0))


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_every_parameter_learns(decoder):
    model = translator(decoder())
    model(*batch()).logsumexp(-1).sum().backward()
    without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert not without


def test_gradients_pass_through_the_weights_of_earlier_steps():
    """Those of the bias's weight are the numerical ones, which change every step after the first."""
    model, (source, lengths, target) = translator(luong()).double(), batch()
    weight = model.decoder.attend.coverage.weight

    def last_row():
        return model.attention_weights(source, lengths, target)[0, -1, 0]

    (found,) = torch.autograd.grad(last_row(), weight)
    step = 1e-6
    for place in range(WIDTH):
        with torch.no_grad():
            weight[place] += step
            above = last_row()
            weight[place] -= 2 * step
            below = last_row()
            weight[place] += step
        assert float(found[place]) == pytest.approx(float(above - below) / (2 * step), rel=1e-5, abs=1e-9)


def test_the_first_step_is_that_without_coverage():
    model, (source, lengths, target) = translator(luong()), batch()
    weights = model.attention_weights(source, lengths, target)
    model.decoder.attend.coverage = None
    plain = model.attention_weights(source, lengths, target)
    torch.testing.assert_close(weights[:, 0], plain[:, 0])
    assert (weights[0, 1:] - plain[0, 1:]).abs().max() > 1e-3


@pytest.mark.parametrize("coverage", ["sum", "gru"])
def test_a_sentence_does_not_see_its_batch_and_state_can_be_reordered(coverage):
    model, (source, lengths, target) = translator(bahdanau(coverage=coverage)), batch()
    together = model(source, lengths, target)
    for row, length in enumerate(lengths.tolist()):
        alone = source[row : row + 1, :length], lengths[row : row + 1], target[row : row + 1]
        torch.testing.assert_close(model(*alone)[0], together[row])
    rows, memory = torch.tensor([2, 0, 0]), model.encode(source, lengths)
    first = model.step(target[:, 0], model.start(memory), memory)
    moved = model.step(target[rows, 1], first.state.reorder(rows), memory.reorder(rows))
    by_hand = model(source[rows], lengths[rows], torch.stack([target[rows, 0], target[rows, 1]], 1))
    torch.testing.assert_close(moved.logits, by_hand[:, 1])


def test_what_is_behind_the_end_of_a_source_reaches_nothing():
    for decoder in (bahdanau(), luong(), luong(coverage="fertility"), luong(coverage="gru")):
        model, (source, lengths, target) = translator(decoder), batch()
        memory, embedded = model.encode(source, lengths), model.target_embedding(target)
        behind = (torch.arange(SOURCE) >= lengths[:, None]).unsqueeze(-1)
        keys, values = (tensor.masked_fill(behind, torch.nan) for tensor in (memory.keys, memory.values))
        poisoned = type(memory)(type(memory.encoded)(values, lengths, memory.encoded.last), keys)
        parameters = [*model.decoder.attend.parameters(), *model.decoder.cell.parameters()]
        found, expected = (
            torch.autograd.grad(model.decoder.unroll(embedded, each).features.sum(), parameters, retain_graph=True)
            for each in (poisoned, memory)
        )
        torch.testing.assert_close(found, expected)


def test_native_steps_leave_it_to_the_modules():
    model, (source, lengths, _) = translator(bahdanau()), batch()
    with torch.no_grad():
        assert model.encode(source, lengths).packed is None
    seen = []
    with torch.no_grad(), attention_hook(lambda problem, lse: seen.append(problem.bias)):
        model(*batch())
    assert len(seen) == TARGET
    assert all(bias is not None for bias in seen)


def test_a_score_without_a_hidden_layer_is_refused():
    with pytest.raises(
        ConfigurationError, match="read by the hidden layer of a score, and Dot has none: take Additive"
    ):
        Covered(Dot())
    with pytest.raises(ConfigurationError, match="Dot has none"):
        RecurrentCoverage(Dot(), HIDDEN, 2 * ENCODER)
    with pytest.raises(ConfigurationError, match="dim is 0; it needs at least 1"):
        RecurrentCoverage(Additive(HIDDEN, 2 * ENCODER, WIDTH), HIDDEN, 2 * ENCODER, 0)


def test_a_fertility_of_nothing_is_refused():
    with pytest.raises(ConfigurationError, match="most is 0.0; a fertility needs a number above 0, such as 2.0"):
        Fertility(HIDDEN, 0.0)


def test_a_state_is_a_value():
    model, (source, lengths, _) = translator(bahdanau()), batch()
    state = model.start(model.encode(source, lengths))
    assert state.coverage is not None
    assert not state.coverage.any()
    with pytest.raises(dataclasses.FrozenInstanceError):
        state.__setattr__("coverage", None)
