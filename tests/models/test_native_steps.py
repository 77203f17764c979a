"""Native steps of the recurrent decoders are those of their modules, and step back where something watches these."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from regard import native
from regard.backends.cpu.gru_decoder import GruDecoder
from regard.kernels.hooks import attention_hook
from regard.masks import causal
from regard.models.recurrent import (
    BahdanauDecoder,
    BidirectionalEncoder,
    LuongDecoder,
    MonotonicWindow,
    RecurrentTranslator,
    decoders,
    native_steps,
)
from regard.models.recurrent.decoders import TanhReadout
from regard.models.recurrent.encoder import run
from regard.models.recurrent.native_steps import native_decoder, run_steps
from regard.models.recurrent.source_attention import SourceAttention
from regard.scores import Additive, Concat, Dot, General, Location, ScaledDot

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

BATCH, SOURCE, TARGET, EMBEDDING, ENCODER, HIDDEN = 5, 11, 3, 13, 7, 14
LENGTHS = torch.tensor([11, 4, 1, 7, 2])
PLAIN = {"dot": Dot, "scaled_dot": ScaledDot}
LEARNED = {"general": (General,), "additive": (Additive, 5), "concat": (Concat, 5)}
SCORES = [*PLAIN, *LEARNED]


def score_of(name):
    if name in PLAIN:
        return PLAIN[name]()
    kind, *hidden = LEARNED[name]
    return kind(HIDDEN, 2 * ENCODER, *hidden)


def bahdanau(score="additive", cell="gru"):
    return BahdanauDecoder(EMBEDDING, 2 * ENCODER, HIDDEN, score=score_of(score), cell=cell, readout_dim=17)


def luong(score="general", attend=None, feeding=False, **options):
    attend, readout = attend or SourceAttention(score_of(score)), TanhReadout(2 * ENCODER, HIDDEN)
    return LuongDecoder(
        EMBEDDING, 2 * ENCODER, HIDDEN, attend=attend, readout=readout, input_feeding=feeding, **options
    )


def translator(decoder) -> RecurrentTranslator:
    encoder = BidirectionalEncoder(EMBEDDING, ENCODER)
    return RecurrentTranslator(19, 23, embedding_dim=EMBEDDING, encoder=encoder, decoder=decoder)


def batch() -> tuple[Tensor, Tensor, Tensor]:
    source = torch.randint(1, 19, (BATCH, SOURCE)).masked_fill(torch.arange(SOURCE) >= LENGTHS[:, None], 0)
    return source, LENGTHS, torch.randint(1, 23, (BATCH, TARGET))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each native call."""
    made, run = [], decoders.run_steps
    monkeypatch.setattr(decoders, "run_steps", lambda *given: made.append(1) or run(*given))
    return made


def by_modules(monkeypatch: pytest.MonkeyPatch, run: Callable) -> object:
    with monkeypatch.context() as patched:
        patched.setattr(decoders, "native_decoder", lambda *_, **__: None)
        return run()


def decoded(model: RecurrentTranslator, example: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    memory = model.encode(*example[:2])
    state, logits = model.start(memory), []
    for tokens in example[2].unbind(1):
        step = model.step(tokens, state, memory)
        state = step.state
        logits.append(step.logits)
    return torch.stack(logits, 1)


def gradients(model: RecurrentTranslator, example: tuple[Tensor, Tensor, Tensor]) -> list[Tensor]:
    loss = model(*example).square().mean()
    return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("score", SCORES)
def test_training_is_that_of_the_modules(score, calls, monkeypatch):
    model, example = translator(bahdanau(score)), batch()
    found = gradients(model, example)
    assert len(calls) == 1
    expected = by_modules(monkeypatch, lambda: gradients(model, example))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    assert len(calls) == 1


@pytest.mark.parametrize("decoder", [bahdanau, luong, lambda **given: luong(feeding=True, **given)])
@pytest.mark.parametrize("score", SCORES)
def test_decoding_is_that_of_the_modules(decoder, score, calls, monkeypatch):
    model, example = translator(decoder(score=score)).eval(), batch()
    with torch.no_grad():
        found = decoded(model, example)
        assert len(calls) == TARGET
        torch.testing.assert_close(found, by_modules(monkeypatch, lambda: decoded(model, example)))


def test_queries_are_the_states_before_each_step(monkeypatch):
    model, example = translator(bahdanau()), batch()
    expected = by_modules(monkeypatch, lambda: model.attention_weights(*example))
    torch.testing.assert_close(model.attention_weights(*example), expected)


def test_padding_reaches_nothing(calls):
    model, (source, lengths, target) = translator(bahdanau()), batch()
    memory = model.encode(source, lengths)
    behind = (torch.arange(SOURCE) >= lengths[:, None]).unsqueeze(-1)
    keys, values = (tensor.masked_fill(behind, torch.nan) for tensor in (memory.keys, memory.values))
    poisoned = type(memory)(type(memory.encoded)(values, lengths, memory.encoded.last), keys)
    embedded, parameters = model.target_embedding(target), list(model.decoder.cell.parameters())
    found, expected = (
        torch.autograd.grad(model.decoder.unroll(embedded, each).features.sum(), parameters, retain_graph=True)
        for each in (poisoned, memory)
    )
    assert len(calls) == 2
    torch.testing.assert_close(found, expected, rtol=0.0, atol=0.0)


def test_second_derivatives(calls, monkeypatch):
    model, example = translator(bahdanau()), batch()
    parameters = list(model.decoder.parameters())

    def second() -> list[Tensor]:
        first = torch.autograd.grad(model(*example).square().mean(), parameters, create_graph=True)
        return list(torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), parameters))

    found = second()
    assert len(calls) == 1
    torch.testing.assert_close(found, by_modules(monkeypatch, second), rtol=1e-3, atol=1e-6)


def test_a_memory_that_is_reordered_keeps_its_packed_weights():
    model, (source, lengths, _) = translator(bahdanau()).eval(), batch()
    with torch.no_grad():
        memory = model.encode(source, lengths)
    assert memory.packed is not None
    assert memory.reorder(torch.tensor([1, 1])).packed is memory.packed
    assert model.encode(source, lengths).packed is None  # training packs the weights of each step


def hooked(module: nn.Module) -> nn.Module:
    module.register_forward_hook(lambda *_: None)
    return module


def with_hook_on(name: str) -> RecurrentTranslator:
    model = translator(bahdanau())
    hooked(model.get_submodule(name))
    return model


class Doubled(SourceAttention):
    """Twice the context."""

    def forward(self, query, memory, *, first=0):
        return 2 * super().forward(query, memory, first=first)


WATCHED = {
    "hook on the cell": lambda: (with_hook_on("decoder.cell"), nullcontext()),
    "hook on attention": lambda: (with_hook_on("decoder.attend"), nullcontext()),
    "hook on the score": lambda: (with_hook_on("decoder.attend.score"), nullcontext()),
    "attention hook": lambda: (translator(bahdanau()), attention_hook(lambda *_: None)),
    "autocast": lambda: (translator(bahdanau()), torch.autocast("cpu", torch.bfloat16)),
    "float64": lambda: (translator(bahdanau()).double(), nullcontext()),
    "lstm": lambda: (translator(bahdanau(cell="lstm")), nullcontext()),
    "two layers": lambda: (translator(luong(layers=2)), nullcontext()),
    "local": lambda: (translator(luong(attend=SourceAttention(Dot(), MonotonicWindow(2)))), nullcontext()),
    "another attention": lambda: (translator(luong(attend=Doubled(Dot()))), nullcontext()),
    "location": lambda: (translator(luong(attend=SourceAttention(Location(HIDDEN, 29)))), nullcontext()),
}


@pytest.mark.parametrize("case", WATCHED)
def test_modules_run_where_something_watches_or_native_code_has_no_such_step(case, calls):
    model, context = WATCHED[case]()
    with context, torch.no_grad():
        model(*batch())
        decoded(model.eval(), batch())
    assert not calls


def test_an_attention_hook_sees_every_step():
    model, example, seen = translator(bahdanau()).eval(), batch(), []
    with torch.no_grad(), attention_hook(lambda problem, lse: seen.append(lse.shape)):
        decoded(model, example)
    assert len(seen) == TARGET


def test_without_native_code_the_modules_run(calls, monkeypatch):
    monkeypatch.setattr(native, "available", lambda: False)
    model, example = translator(bahdanau()), batch()
    model(*example).sum().backward()
    with torch.no_grad():
        decoded(model, example)
    assert not calls


@pytest.fixture
def other_defaults():
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)
    torch.set_default_dtype(torch.float32)


def test_results_do_not_depend_on_defaults_of_torch(request):
    model, example = translator(bahdanau()), batch()
    memory, embedded = model.encode(*example[:2]), model.target_embedding(example[2])
    expected = model.decoder.unroll(embedded, memory).features
    (gradient,) = torch.autograd.grad(expected.sum(), embedded)
    request.getfixturevalue("other_defaults")
    found = model.decoder.unroll(embedded, memory).features
    assert torch.equal(found, expected)
    assert torch.equal(torch.autograd.grad(found.sum(), embedded)[0], gradient)


def test_torch_func_takes_the_modules(calls):
    model, example = translator(bahdanau()), batch()
    memory = model.encode(*example[:2])
    embedded = model.target_embedding(example[2])
    torch.func.grad(lambda words: model.decoder.unroll(words, memory).features.sum())(embedded.detach())
    assert not calls


@pytest.mark.parametrize("score", SCORES)
def test_steps_that_attend_after_the_cell_have_gradients_of_the_formula(score):
    model, (source, lengths, target) = translator(luong(score)), batch()
    decoder = model.decoder
    memory, embedded = model.encode(source, lengths), model.target_embedding(target)
    hidden = decoder.start(memory).hidden[0].squeeze(1)
    assert native_decoder(decoder.cell, decoder.attend, memory, embedded, hidden, attends_after=True) is None
    found_weights = native_steps._weights(decoder.cell, decoder.attend)
    assert found_weights is not None
    weights, scale = found_weights
    steps = GruDecoder(weights, memory.keys, memory.values, lengths, scale, attends_after=True)
    parameters = [*decoder.cell.parameters(), *decoder.attend.parameters(), embedded, memory.values, hidden]

    def with_gradients(states: Tensor, contexts: Tensor) -> list[Tensor]:
        first = torch.autograd.grad(states.square().sum() + contexts.cos().sum(), parameters, create_graph=True)
        above = torch.stack([each.square().sum() for each in first]).sum()
        second = torch.autograd.grad(above, parameters, retain_graph=True)
        return [states, contexts, *first, *second]

    found = with_gradients(*run_steps(steps, None, embedded, hidden))
    queries, _ = run(decoder.cell, embedded, (hidden.unsqueeze(1),))
    torch.testing.assert_close(found, with_gradients(queries, decoder.attend(queries, memory)), rtol=1e-3, atol=1e-4)


def test_a_step_with_gradients_that_attends_after_the_cell_is_that_of_the_modules(calls):
    model, example = translator(luong()), batch()
    with_gradients = decoded(model, example)
    assert not calls
    with_gradients.sum().backward()
    with torch.no_grad():
        torch.testing.assert_close(decoded(model, example), with_gradients)
    assert len(calls) == TARGET


@pytest.mark.parametrize(
    "wrong", ["fewer rows of memory", "state in float64", "wider state", "two directions", "length first"]
)
def test_what_does_not_fit_is_left_to_the_modules_and_their_errors(wrong):
    model, (source, lengths, target) = translator(bahdanau()), batch()
    decoder, cell = model.decoder, model.decoder.cell
    memory, embedded = model.encode(source, lengths), model.target_embedding(target)
    hidden = decoder.start(memory).hidden[0].squeeze(1)

    def steps():
        return native_decoder(cell, decoder.attend, memory, embedded, hidden, attends_after=False)

    assert steps() is not None
    if wrong == "fewer rows of memory":
        memory = memory.reorder(torch.tensor([0, 1]))
    elif wrong in ("two directions", "length first"):
        both = wrong == "two directions"
        cell = nn.GRU(cell.input_size, HIDDEN, batch_first=both, bidirectional=both)
    else:
        hidden = hidden.double() if wrong == "state in float64" else torch.cat([hidden, hidden], 1)
    assert steps() is None


def test_the_mask_of_a_memory_is_that_of_its_lengths():
    model, (source, lengths, _) = translator(bahdanau()), batch()
    memory = model.encode(source, lengths)
    assert torch.equal(memory.mask.dense(1, SOURCE)[:, 0, 0], torch.arange(SOURCE) < lengths[:, None])
    rows = torch.tensor([4, 0])
    assert torch.equal(memory.reorder(rows).mask.dense(1, SOURCE), memory.mask.dense(1, SOURCE)[rows])
    with pytest.raises(TypeError, match="mask"):  # native steps know the lengths alone
        replace(memory, mask=causal())
