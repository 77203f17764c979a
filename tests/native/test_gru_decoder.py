"""The native steps of a GRU decoder against the formula in float64, in each variant."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.gru_decoder import DecoderWeights, GruDecoder, PackedWeights
from regard.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("built")

SIZES = [  # rows, steps, source, input, hidden, value; the key dim is the hidden one, or KEY_DIM where it is projected
    (1, 1, 1, 1, 1, 1),
    (3, 5, 11, 13, 17, 7),
    (131, 3, 5, 7, 37, 67),
    (17, 2, 29, 41, 128, 32),
]
KEY_DIM = 43
SCORES = ["additive", "dot", "general"]


def decoder_of(sizes: tuple[int, ...], score: str, attends_after: bool = False) -> tuple[GruDecoder, Tensor, Tensor]:
    """A decoder, inputs and a first state; sources of any length from 0 on, NaN behind their ends."""
    rows, steps, source, input_dim, hidden, value = sizes
    key_dim = hidden if score == "dot" else KEY_DIM
    cell_input = input_dim + (0 if attends_after else value)
    weights = DecoderWeights(
        torch.randn(3 * hidden, cell_input) / cell_input**0.5,
        torch.randn(3 * hidden, hidden) / hidden**0.5,
        torch.randn(3 * hidden),
        torch.randn(3 * hidden),
        None if score == "dot" else torch.randn(key_dim, hidden) / hidden**0.5,
        torch.randn(key_dim) if score == "additive" else None,
    )
    lengths = torch.randint(0, source + 1, (rows,))
    lengths[0] = source
    keys, values = torch.randn(source, rows, key_dim).transpose(0, 1), torch.randn(rows, source, value)
    behind = torch.arange(source) >= lengths[:, None]
    keys, values = (tensor.masked_fill(behind[..., None], math.nan) for tensor in (keys, values))
    scale = 1.0 if score == "additive" else 0.3
    decoder = GruDecoder(weights, keys, values, lengths, scale, attends_after)
    return decoder, torch.randn(rows, steps, input_dim), torch.randn(rows, hidden)


def attend(decoder: GruDecoder, weights: DecoderWeights, keys: Tensor, values: Tensor, hidden: Tensor) -> Tensor:
    """The contexts, a sentence at a time."""
    queries = hidden if weights.query is None else hidden @ weights.query.T
    contexts = []
    for row, length in enumerate(decoder.lengths.tolist()):
        own = keys[row, :length]
        if weights.score is None:
            scores = decoder.scale * (own @ queries[row])
        else:
            scores = torch.tanh(own + queries[row]) @ weights.score
        contexts.append(scores.softmax(0) @ values[row, :length])
    return torch.stack(contexts)


def by_formula(decoder: GruDecoder, inputs: Tensor, hidden: Tensor, dtype: torch.dtype, above: list[Tensor]):
    """States and contexts, and the gradients of all tensors by `above`."""
    tensors = inputs, hidden, decoder.keys, decoder.values, *decoder.weights
    held: list[Any] = [None if tensor is None else tensor.to(dtype).requires_grad_() for tensor in tensors]
    words, state, keys, values, *rest = held
    weights = DecoderWeights(*rest)
    states, contexts = [], []
    for word in words.unbind(1):
        context = attend(decoder, weights, keys, values, state)
        cell_input = word if decoder.attends_after else torch.cat([word, context], 1)
        state = torch.gru_cell(cell_input, state, weights.input, weights.state, weights.input_bias, weights.state_bias)
        states.append(state)
        contexts.append(attend(decoder, weights, keys, values, state) if decoder.attends_after else context)
    results = [torch.stack(states, 1), torch.stack(contexts, 1)]
    asked = [tensor for tensor in held if tensor is not None]
    gradients = torch.autograd.grad(results, asked, [each.to(dtype) for each in above])
    return [each.detach() for each in (*results, *gradients)]


def hold_to_budget(has: list[Tensor], true: list[Tensor], plain: list[Tensor]) -> None:
    """Errors are at most some times those of the formula in float32, and some roundings."""
    for own, one, other in zip(has, true, plain, strict=True):
        assert own.shape == one.shape
        budget = 5 * (other - one).abs().max() + 8 * torch.finfo(torch.float32).eps * one.abs().max().clamp(min=1.0)
        assert (own - one).abs().max() <= budget


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_forward_and_gradients(sizes, score, variant):
    decoder, inputs, hidden = decoder_of(sizes, score)
    done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden, keep=True)
    above = [torch.randn_like(done.states), torch.randn_like(done.contexts)]
    found = decoder.gradients(PackedWeights.backward(decoder.weights), done, *above)
    has = [done.states, done.contexts, found.inputs, found.hidden, found.keys, found.values, *found.weights]
    true, plain = (by_formula(decoder, inputs, hidden, dtype, above) for dtype in (torch.float64, torch.float32))
    hold_to_budget([tensor for tensor in has if tensor is not None], true, plain)


@pytest.mark.parametrize("score", SCORES)
def test_attention_after_the_step(score, variant):
    decoder, inputs, hidden = decoder_of(SIZES[1], score, attends_after=True)
    done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden)
    assert done.kept is None
    above = [torch.zeros_like(done.states), torch.zeros_like(done.contexts)]
    true, plain = (by_formula(decoder, inputs, hidden, dtype, above)[:2] for dtype in (torch.float64, torch.float32))
    hold_to_budget([done.states, done.contexts], true, plain)


def test_steps_that_attend_after_the_cell_have_no_native_gradients(variant):
    decoder, inputs, hidden = decoder_of(SIZES[1], "additive", attends_after=True)
    done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden, keep=True)
    packed = PackedWeights.backward(decoder.weights)
    with pytest.raises(ConfigurationError, match=r"no gradients of steps that attend after the cell .*the formula"):
        decoder.gradients(packed, done, done.states, done.contexts)


def test_an_empty_source_has_context_0_and_no_gradient(variant):
    decoder, inputs, hidden = decoder_of(SIZES[1], "additive")
    decoder.lengths.zero_()
    done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden, keep=True)
    found = decoder.gradients(PackedWeights.backward(decoder.weights), done, done.states, done.contexts + 1)
    assert not done.contexts.any()
    assert done.states.isfinite().all()
    for gradient in (found.keys, found.values, found.weights.score):
        assert gradient is not None
        assert not gradient.any()


@pytest.mark.parametrize("where", ["keys", "values", "hidden", "infinite key"])
def test_nan_stays_in_its_row(where, variant):
    decoder, inputs, hidden = decoder_of(SIZES[1], "additive")
    decoder.lengths.fill_(2)
    keys, values = decoder.keys.nan_to_num(0.5), decoder.values.nan_to_num(0.5)
    decoder = GruDecoder(decoder.weights, keys, values, decoder.lengths)
    poisoned, poison = {"keys": keys, "values": values, "hidden": hidden}.get(where, keys), math.nan
    poisoned[1].view(-1)[0] = math.inf if where == "infinite key" else poison
    done = decoder.run(PackedWeights.forward(decoder.weights), inputs, hidden)
    bad = done.states.isnan().flatten(1).any(1)
    assert bad.tolist() == [False, True, False]


def test_lengths_beyond_the_source_are_those_of_the_source(variant):
    decoder, inputs, hidden = decoder_of(SIZES[1], "dot")
    decoder.lengths.fill_(11)
    keys, values = decoder.keys.nan_to_num(0.5), decoder.values.nan_to_num(0.5)
    packed = PackedWeights.forward(decoder.weights)
    expected = GruDecoder(decoder.weights, keys, values, decoder.lengths, 0.3).run(packed, inputs, hidden)
    longer = GruDecoder(decoder.weights, keys, values, decoder.lengths + 5, 0.3).run(packed, inputs, hidden)
    assert torch.equal(longer.contexts, expected.contexts)


def test_a_row_does_not_depend_on_its_batch(variant):
    decoder, inputs, hidden = decoder_of(SIZES[2], "additive")
    packed = PackedWeights.forward(decoder.weights)
    together = decoder.run(packed, inputs, hidden)
    part = slice(100, 109)
    few = GruDecoder(decoder.weights, decoder.keys[part], decoder.values[part], decoder.lengths[part])
    alone = few.run(packed, inputs[part], hidden[part])
    assert torch.equal(alone.states, together.states[part])
    assert torch.equal(alone.contexts, together.contexts[part])
