"""The pointer-generator mixes what the decoder says with what it copies from the source."""

from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError
from regard.models.recurrent import (
    BahdanauDecoder,
    BidirectionalEncoder,
    Covered,
    LuongDecoder,
    PointerGenerator,
    RecurrentTranslator,
)
from regard.models.recurrent.decoders import LinearReadout
from regard.models.recurrent.source_attention import SourceAttention
from regard.scores import Additive

BATCH, SOURCE, TARGET, EMBEDDING, ENCODER, HIDDEN, WORDS = 3, 11, 5, 13, 7, 14, 23
LENGTHS = torch.tensor([11, 4, 1])


def bahdanau(covered=False, cell="gru"):
    score = Additive(HIDDEN, 2 * ENCODER, 5)
    return BahdanauDecoder(
        EMBEDDING,
        2 * ENCODER,
        HIDDEN,
        score=score,
        cell=cell,
        readout_dim=17,
        coverage=Covered(score) if covered else None,
    )


def luong(covered=False, feeding=False):
    score = Additive(HIDDEN, 2 * ENCODER, 5)
    return LuongDecoder(
        EMBEDDING,
        2 * ENCODER,
        HIDDEN,
        attend=SourceAttention(score, coverage=Covered(score) if covered else None),
        readout=LinearReadout(2 * ENCODER, HIDDEN),
        input_feeding=feeding,
    )


DECODERS = {
    "bahdanau": bahdanau,
    "bahdanau-lstm": lambda: bahdanau(cell="lstm"),
    "bahdanau-covered": lambda: bahdanau(covered=True),
    "luong": luong,
    "luong-feeding-covered": lambda: luong(covered=True, feeding=True),
}


def translator(decoder) -> Any:
    return RecurrentTranslator(
        WORDS,
        WORDS,
        embedding_dim=EMBEDDING,
        encoder=BidirectionalEncoder(EMBEDDING, ENCODER),
        decoder=decoder,
        pointer=PointerGenerator(2 * ENCODER, HIDDEN, EMBEDDING),
    ).eval()


def batch():
    source = torch.randint(4, WORDS, (BATCH, SOURCE))
    source[0, 3] = source[0, 7]  # a word that is there twice
    source = source.masked_fill(torch.arange(SOURCE) >= LENGTHS[:, None], 0)
    return source, LENGTHS, torch.randint(4, WORDS, (BATCH, TARGET))


def formula(logits, gate, weights, source):
    """P(w), one word at a time."""
    generated = gate.sigmoid() * logits.softmax(-1)
    for row in range(BATCH):
        for step in range(TARGET):
            for place in range(SOURCE):
                generated[row, step, source[row, place]] += (1 - gate[row, step, 0].sigmoid()) * weights[
                    row, step, place
                ]
    return generated


def test_the_mixture_is_the_formula_in_float64():
    source, _, _ = batch()
    logits = torch.randn(BATCH, TARGET, WORDS, dtype=torch.float64)
    gate = torch.randn(BATCH, TARGET, 1, dtype=torch.float64)
    weights = torch.randn(BATCH, TARGET, SOURCE, dtype=torch.float64).softmax(-1)
    weights[0, 0] = torch.eye(SOURCE, dtype=torch.float64)[2]  # all the weight on one word
    leaves = (logits.requires_grad_(), gate.requires_grad_(), weights.requires_grad_())
    found, expected = PointerGenerator.mix(*leaves, source), formula(*leaves, source)
    torch.testing.assert_close(found.exp(), expected, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(BATCH, TARGET, dtype=torch.float64))
    upstream = torch.randn_like(found)
    ours = torch.autograd.grad(found, leaves, upstream)
    torch.testing.assert_close(ours, torch.autograd.grad(expected.log(), leaves, upstream), rtol=1e-9, atol=1e-12)


def lacking_batch():
    """The batch with words that the vocabulary lacks: of row 0 two, one of them twice, of row 1 one, of row 2 none."""
    source, lengths, target = batch()
    source[0, 3] = source[0, 7] = WORDS
    source[0, 5], source[1, 2] = WORDS + 1, WORDS
    target[0, 1], target[0, 3], target[1, 0] = WORDS + 1, WORDS, WORDS
    return source, lengths, target


def test_words_that_the_vocabulary_lacks_have_what_is_copied_of_them_in_float64():
    source, _, _ = lacking_batch()
    logits = torch.randn(BATCH, TARGET, WORDS, dtype=torch.float64)
    gate = torch.randn(BATCH, TARGET, 1, dtype=torch.float64)
    weights = torch.randn(BATCH, TARGET, SOURCE, dtype=torch.float64).softmax(-1)
    leaves = (logits.requires_grad_(), gate.requires_grad_(), weights.requires_grad_())
    found = PointerGenerator.mix(*leaves, source)
    assert found.shape == (BATCH, TARGET, WORDS + 2)
    present = found > -torch.inf
    assert present[:, 0, WORDS:].tolist() == [[True, True], [True, False], [False, False]]
    said = gate.sigmoid() * torch.nn.functional.pad(logits.softmax(-1), (0, 2))
    places = torch.nn.functional.one_hot(source, WORDS + 2).double()
    expected = said + (1 - gate.sigmoid()) * (weights @ places)
    torch.testing.assert_close(found.exp(), expected, rtol=1e-12, atol=1e-15)
    upstream = torch.randn_like(found).masked_fill(~present, 0.0)
    ours = torch.autograd.grad(found, leaves, upstream)
    theirs = torch.autograd.grad(expected[present].log(), leaves, upstream[present])
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("gate", [-1e4, 1e4])
def test_a_gate_that_is_shut_has_a_finite_loss_and_gradient(gate):
    logits, source = torch.randn(1, 1, 7, requires_grad=True), torch.tensor([[5, 4]])
    gate = torch.full((1, 1, 1), gate, requires_grad=True)
    weights = torch.tensor([[[1.0, 0.0]]], requires_grad=True)
    found = PointerGenerator.mix(logits, gate, weights, source)
    assert torch.isfinite(found).all()
    found.sum().backward()
    assert all(leaf.grad is not None and leaf.grad.isfinite().all() for leaf in (logits, gate, weights))


def test_half_precision_is_mixed_in_float32():
    found = PointerGenerator.mix(
        torch.randn(1, 1, 7).half(), torch.zeros(1, 1, 1).half(), torch.tensor([[[0.5, 0.5]]]), torch.tensor([[5, 4]])
    )
    assert found.dtype == torch.float32


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_the_model_gives_log_probabilities_of_the_mixture(decoder):
    model, (source, lengths, target) = translator(decoder()).double(), batch()
    decoded = model.decode_target(source, lengths, target)
    seen = model.decoder.unroll(model.target_embedding(target), model.encode(source, lengths))
    joined = torch.cat([seen.contexts, seen.outputs, model.target_embedding(target)], -1)
    gate = joined @ model.pointer.gate.weight.T + model.pointer.gate.bias
    expected = formula(model.output(decoded.features), gate, decoded.weights, source)
    torch.testing.assert_close(model(source, lengths, target).exp(), expected, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_words_that_the_vocabulary_lacks_are_read_as_unknown(decoder):
    model, (source, lengths, target) = translator(decoder()).double(), lacking_batch()
    known = source.masked_fill(source >= WORDS, 1), lengths, target.masked_fill(target >= WORDS, 1)
    lacking, plain = (model.decode_target(*inputs) for inputs in ((source, lengths, target), known))
    assert torch.equal(lacking.features, plain.features)
    assert torch.equal(lacking.weights, plain.weights)
    log_p = model(source, lengths, target)
    torch.testing.assert_close(log_p.exp().sum(-1), torch.ones(BATCH, TARGET, dtype=torch.float64))
    assert not torch.allclose(log_p[0, :, 1], model(*known)[0, :, 1])  # there they are copied as <unk>


@pytest.mark.parametrize("lacks", [False, True])
@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_a_step_at_a_time_is_all_steps_at_once(decoder, lacks):
    model, (source, lengths, target) = translator(decoder()), lacking_batch() if lacks else batch()
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


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS.keys())
def test_every_parameter_learns(decoder):
    model, (source, lengths, target) = translator(decoder()), batch()
    chosen = model(source, lengths, target).gather(-1, target.unsqueeze(-1))
    chosen.sum().backward()
    without = [name for name, one in model.named_parameters() if one.grad is None or not one.grad.any()]
    assert not without


def test_memory_can_be_reordered():
    model, (source, lengths, target) = translator(bahdanau()), batch()
    rows, memory = torch.tensor([2, 0, 0]), model.encode(source, lengths)
    moved = model.step(target[rows, 0], model.start(memory).reorder(rows), memory.reorder(rows))
    torch.testing.assert_close(moved.logits, model(source[rows], lengths[rows], target[rows, :1])[:, 0])


def test_vocabularies_of_two_sizes_are_refused():
    with pytest.raises(ConfigurationError, match="source_size is 19 and target_size 23: a pointer says source tokens"):
        RecurrentTranslator(
            19,
            23,
            embedding_dim=EMBEDDING,
            encoder=BidirectionalEncoder(EMBEDDING, ENCODER),
            decoder=bahdanau(),
            pointer=PointerGenerator(2 * ENCODER, HIDDEN, EMBEDDING),
        )


def test_how_many_words_a_source_has_is_read_from_a_device_once(monkeypatch):
    """Of a tensor whose numbers would have to be waited for, again after it is written to."""
    monkeypatch.setattr("regard.models.recurrent.pointer.waits", lambda tensor: True)
    logits, gate, weights = torch.zeros(1, 1, 4), torch.zeros(1, 1, 1), torch.tensor([[[0.75, 0.25]]])
    source, reads, read = torch.tensor([[4, 1]]), [], torch.Tensor.max
    monkeypatch.setattr(torch.Tensor, "max", lambda self, *args: (reads.append(self), read(self, *args))[1])
    first, second = (PointerGenerator.mix(logits, gate, weights, source) for _ in range(2))
    assert torch.equal(first, second)
    assert len(reads) == 1
    source[0, 0] = 5
    assert PointerGenerator.mix(logits, gate, weights, source).shape == (1, 1, 6)
    assert len(reads) == 2
