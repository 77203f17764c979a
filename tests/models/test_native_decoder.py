"""Native steps of the Transformer's decoder are those of its modules, and leave it to these where something watches."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from regard import native
from regard.backends.cpu.transformer_step import TransformerDecoder
from regard.errors import ShapeError
from regard.kernels.hooks import attention_hook
from regard.masks import causal, window
from regard.models import Transformer
from regard.models.transformer import Decoder, Embedding, Encoder, TiedOutput
from regard.models.transformer.native_decoder import NativeState
from regard.nn import (
    SSRU,
    Attention,
    FeedForward,
    GatedFeedForward,
    PostNorm,
    PreNorm,
    Projections,
    RMSNorm,
    TransformerBlock,
)
from regard.positions import Sinusoidal
from regard.scores import Dot
from regard.translation.search import beam_search
from regard.translation.settings import SearchSettings

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

BATCH, SOURCE, TARGET, WORDS = 5, 11, 7, 67
DIM, HEADS, HIDDEN, LAYERS = 24, 6, 37, 3
LENGTHS = torch.tensor([11, 4, 1, 0, 7])
FORMS = {"post": PostNorm, "pre": PreNorm}
READERS = pytest.mark.parametrize("recurrent", [False, True], ids=["attention", "SSRU"])
"""What reads the target's tokens so far."""


def block(kind: Any = PostNorm, *, cross: bool = True, key_heads: int = 3, **parts: Any) -> TransformerBlock:
    """A block whose parts can be replaced, attention and feed_forward, or which is recurrent."""

    def projections() -> Projections:
        return Projections(DIM, HEADS, num_kv_heads=key_heads, head_dim=7)

    own = SSRU(DIM) if parts.get("recurrent") else parts.get("attention")
    return TransformerBlock(
        own or Attention(projections(), mask=causal() if cross else None),
        parts.get("feed_forward") or FeedForward(DIM, HIDDEN),
        lambda: kind(parts.get("norm", nn.LayerNorm)(DIM)),
        cross_attention=(parts.get("cross_attention") or Attention(projections())) if cross else None,
    )


def model_of(kind: Any = PostNorm, **parts: Any) -> Transformer:
    torch.manual_seed(5)
    tokens = Embedding(nn.Embedding(WORDS, DIM), Sinusoidal(DIM))
    last = nn.LayerNorm(DIM) if kind is PreNorm else None
    model = Transformer(
        tokens,
        tokens,
        encoder=Encoder([block(kind, cross=False)], last),
        decoder=Decoder([block(kind, **parts) for _ in range(LAYERS)], last),
        output=TiedOutput(tokens.tokens, bias=True),
    )
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    source = torch.randint(1, WORDS, (BATCH, SOURCE), generator=generator)
    return source, LENGTHS, torch.randint(1, WORDS, (BATCH, TARGET), generator=generator)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each native step."""
    made, step = [], TransformerDecoder.step
    monkeypatch.setattr(TransformerDecoder, "step", lambda *given, **told: made.append(1) or step(*given, **told))
    return made


def decoded(model: Transformer, example: tuple[Tensor, Tensor, Tensor], name: str = "step") -> list[Any]:
    memory = model.encode(*example[:2])
    state, steps = model.start(memory), []
    for tokens in example[2].unbind(1):
        steps.append(getattr(model, name)(tokens, state, memory))
        state = steps[-1].state
    return steps


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "activation", [functional.relu, functional.silu, nn.ReLU(), nn.SiLU()], ids=["relu", "silu", "ReLU()", "SiLU()"]
)
@READERS
@torch.no_grad()
def test_steps_are_the_model_in_double_precision(form, activation, recurrent, calls):
    feed_forward = FeedForward(DIM, HIDDEN, activation=activation)
    model, example = model_of(FORMS[form], feed_forward=feed_forward, recurrent=recurrent), batch()
    steps = decoded(model, example, "observe_step")
    assert len(calls) == TARGET
    logits = torch.stack([step.logits for step in steps], 1)
    weights = torch.stack([step.weights for step in steps], 1)
    plain = model(*example)
    wide = model.double()
    true, true_weights = wide(*example), wide.attention_weights(*example)
    budget = 5 * (plain - true).abs().max() + 8 * torch.finfo(torch.float32).eps * true.abs().max()
    assert (logits - true).abs().max() <= budget
    assert (weights - true_weights).abs().max() <= budget


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("beam", [1, 2, 5])
@pytest.mark.parametrize("method", ["exact", "refilled"])
@READERS
@torch.no_grad()
def test_a_search_finds_the_same(form, beam, method, recurrent, calls, monkeypatch):
    model, (source, lengths, _) = model_of(FORMS[form], recurrent=recurrent), batch()
    settings = SearchSettings(beam=beam, n_best=beam, method=method, max_length_ratio=2.0)
    natively = beam_search(model, source, lengths, settings)
    assert len(calls) > TARGET
    unseen = beam_search(model, source, lengths, settings, observe=False)
    monkeypatch.setattr(native, "available", lambda: False)
    made = len(calls)
    by_modules = beam_search(model, source, lengths, settings)
    assert len(calls) == made
    for mine, blind, theirs in zip(natively, unseen, by_modules, strict=True):
        assert [one.ids for one in mine] == [one.ids for one in blind] == [one.ids for one in theirs]
        for one, other in zip(mine, theirs, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-5)
            torch.testing.assert_close(one.weights, other.weights, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(one.self_weights, other.self_weights, rtol=1e-4, atol=1e-5)


@READERS
@torch.no_grad()
def test_two_branches_from_one_state(recurrent, calls):
    model, (source, lengths, target) = model_of(recurrent=recurrent), batch()
    memory = model.encode(source, lengths)
    first = model.step(target[:, 0], model.start(memory), memory)
    one = model.step(target[:, 1], first.state, memory)
    other = model.step(target[:, 2], first.state, memory)
    again = model.step(target[:, 3], one.state, memory)
    assert len(calls) == 4
    straight = decoded(model, (source, lengths, target[:, [0, 1, 3]]))
    assert torch.equal(again.logits, straight[-1].logits)
    assert torch.equal(other.logits, decoded(model, (source, lengths, target[:, [0, 2]]))[-1].logits)


def hook_added(module: nn.Module) -> None:
    module.register_forward_hook(lambda *_: None)


def hook_before_added(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda *_: None)


def forward_replaced(module: nn.Module) -> None:
    module.forward = module.forward


@pytest.mark.parametrize("watch", [hook_added, hook_before_added, forward_replaced])
@pytest.mark.parametrize("name", ["step", "observe_step"])
@READERS
@torch.no_grad()
def test_modules_go_on_from_a_native_state(watch, name, recurrent, calls):
    model, (source, lengths, target) = model_of(recurrent=recurrent), batch()
    memory, rows = model.encode(source, lengths), torch.tensor([4, 0, 0, 2, 1])
    state = model.step(target[:, 0], model.start(memory), memory).state
    state = model.step(target[:, 1], state.reorder(rows), memory.reorder(rows)).state.reorder(rows)
    memory = memory.reorder(rows).reorder(rows)
    natively = getattr(model, name)(target[:, 2], state, memory)
    watch(model.decoder.blocks[1].feed_forward)
    assert isinstance(state, NativeState)
    made = len(calls)
    by_modules = getattr(model, name)(target[:, 2], state, memory)
    assert len(calls) == made
    torch.testing.assert_close(by_modules.logits, natively.logits, rtol=1e-4, atol=1e-5)
    next_step = model.step(target[:, 3], by_modules.state, memory)
    torch.testing.assert_close(
        next_step.logits, model.step(target[:, 3], natively.state, memory).logits, rtol=1e-4, atol=1e-5
    )


@READERS
@torch.no_grad()
def test_rows_that_are_not_there_are_refused(recurrent):
    model, (source, lengths, target) = model_of(recurrent=recurrent), batch()
    memory = model.encode(source, lengths)
    assert isinstance(model.start(memory).reorder(torch.tensor([0, 9])), NativeState)  # as yet there are no rows
    state = model.step(target[:, 0], model.start(memory), memory).state
    with pytest.raises(ShapeError, match="rows are in 0..5, but the batch has the size 5"):
        state.reorder(torch.tensor([0, 5]))
    with pytest.raises(ShapeError):
        model.step(target[:3, 1], state, memory)


def hooked(model: Transformer, name: str) -> Transformer:
    model.get_submodule(name).register_forward_hook(lambda *_: None)
    return model


class Doubled(nn.Linear):
    """Twice the product."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return 2 * super().forward(input)


def with_doubled_map() -> Transformer:
    model = model_of()
    model.decoder.blocks[0].feed_forward.up = Doubled(DIM, HIDDEN)  # type: ignore[union-attr]
    return model.eval()


def with_one_recurrent_layer() -> Transformer:
    model = model_of()
    model.decoder.blocks[1].attention = SSRU(DIM)
    return model.eval()


def attention(**parts: Any) -> Attention:
    return Attention(Projections(DIM, HEADS, num_kv_heads=3, head_dim=7), **{"mask": causal(), **parts})


Watched = tuple[Transformer, AbstractContextManager]
WATCHED: dict[str, Callable[[], Watched]] = {
    "hook on a map": lambda: (hooked(model_of(), "decoder.blocks.1.attention.projections.key"), nullcontext()),
    "hook on a norm": lambda: (hooked(model_of(), "decoder.blocks.2.cross_residual.norm"), nullcontext()),
    "hook on an SSRU's map": lambda: (
        hooked(model_of(recurrent=True), "decoder.blocks.1.attention.forget"),
        nullcontext(),
    ),
    "attention and an SSRU": lambda: (with_one_recurrent_layer(), nullcontext()),
    "attention hook": lambda: (model_of(), attention_hook(lambda *_: None)),
    "autocast": lambda: (model_of(), torch.autocast("cpu", torch.bfloat16)),
    "gradients": lambda: (model_of(), torch.enable_grad()),
    "training": lambda: (model_of().train(), nullcontext()),
    "float64": lambda: (model_of().double(), nullcontext()),
    "a map of another kind": lambda: (with_doubled_map(), nullcontext()),
    "a gate": lambda: (model_of(feed_forward=GatedFeedForward(DIM, HIDDEN)), nullcontext()),
    "gelu": lambda: (model_of(feed_forward=FeedForward(DIM, HIDDEN, activation=functional.gelu)), nullcontext()),
    "another norm": lambda: (model_of(norm=RMSNorm), nullcontext()),
    "a window": lambda: (model_of(attention=attention(mask=causal() & window(before=2))), nullcontext()),
    "another score": lambda: (model_of(attention=attention(score=Dot())), nullcontext()),
    "softcap": lambda: (model_of(attention=attention(softcap=3.0)), nullcontext()),
    "a bias": lambda: (model_of(attention=attention(bias=torch.zeros(HEADS, 1, 1))), nullcontext()),
    "sinks": lambda: (model_of(attention=attention(sinks=torch.zeros(HEADS))), nullcontext()),
    "a mask to the source": lambda: (
        model_of(cross_attention=attention(mask=window(before=3, after=3))),
        nullcontext(),
    ),
}


@pytest.mark.parametrize("case", WATCHED)
def test_modules_run_where_something_watches_or_native_code_has_no_such_step(case, calls):
    model, context = WATCHED[case]()
    with torch.no_grad(), context:
        decoded(model, batch())
    assert not calls


@READERS
@torch.no_grad()
def test_weights_in_bytes(recurrent, calls):
    model, example = model_of(PreNorm, recurrent=recurrent), batch()
    before = [step.logits for step in decoded(model, example)]
    encoder = [parameter.clone() for parameter in model.encoder.parameters()]
    model.quantize_decoder()
    assert all(map(torch.equal, encoder, model.encoder.parameters()))
    weight = model.decoder.get_parameter("blocks.0.feed_forward.up.weight")
    whole = weight / (weight.abs().amax(1, keepdim=True) / 127)
    torch.testing.assert_close(whole, whole.round(), rtol=0.0, atol=1e-4)
    made = len(calls)
    after = [step.logits for step in decoded(model, example)]
    assert len(calls) == made + TARGET
    exact = model(*example)
    for number, (one, other) in enumerate(zip(before, after, strict=True)):
        assert not torch.equal(one, other)
        close = exact[:, number]  # of the modules, with rounded weights and inputs as they are
        assert (other - close).norm() <= 0.1 * close.norm()
