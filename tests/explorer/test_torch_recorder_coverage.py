"""Which of torch's layers are heard: forwards of their own, other threads, records within records, failed calls."""

from contextvars import copy_context
from threading import Event, Thread, get_ident

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook

import regard
from regard.errors import AtlasError
from regard.explorer import record, torch_recorder


def compare(maps, weights):
    for shown in maps:
        everything = slice(0, shown.queries), slice(0, shown.keys)
        whole = np.stack([shown.weights(head, *everything) for head in range(shown.heads)])
        np.testing.assert_allclose(whole, weights[shown.sequence].detach(), atol=1e-6)


class Tripled(nn.MultiheadAttention):
    def forward(self, query, key, value, **options):
        return super().forward(query * 3, key, value, **options)


class OfOne(nn.MultiheadAttention):
    def forward(self, x):
        return super().forward(x, x, x, need_weights=False)[0]


class Ours(nn.MultiheadAttention):
    def forward(self, x):
        return regard.attention(x, x, x)


class Renamed(nn.TransformerEncoderLayer):
    def forward(self, tokens, *, hidden=None):
        return super().forward(tokens * 2, src_mask=hidden)


@pytest.mark.parametrize("kind", [Tripled, OfOne])
def test_a_forward_of_its_own_is_left_out_and_named(kind):
    """What it hands on is not what it was given; nor may the hook fail where it is called otherwise."""
    own, other = kind(8, 2, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
    model, x = nn.ModuleList([own, other]), torch.randn(1, 4, 8)
    given = (x, x, x) if kind is Tripled else (x,)
    plain = own(*given)[0]
    with record(model) as recording:
        assert torch.equal(own(*given)[0], plain)
    with pytest.raises(
        AtlasError, match=f"Not heard: '0', a {kind.__name__} with a forward of its own: call regard.at"
    ):
        recording.atlas()
    with record(model) as recording:
        own(*given)
        other(x, x, x)
    with pytest.warns(UserWarning, match=f"not all of the model's attention. Not heard: '0', a {kind.__name__} with"):
        atlas = recording.atlas()
    assert [shown.name for shown in atlas.maps] == ["1"]


def test_a_forward_put_on_one_layer_is_its_own_too():
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(4, 1, 8)
    theirs, changed = layer.forward, nn.ModuleList([layer])
    layer.forward = lambda query, key, value: theirs(3 * query, key, value)  # type: ignore[method-assign]
    with record(changed) as recording:
        layer(x, x, x)
    with pytest.raises(AtlasError, match="Not heard: '0', a MultiheadAttention with a forward of its own"):
        recording.atlas()


def test_a_forward_of_its_own_that_calls_ours_is_heard_and_not_named():
    model = nn.ModuleList([Ours(8, 2)])
    with record(model) as recording:
        model[0](torch.randn(1, 4, 8))
    assert [shown.name for shown in recording.atlas().maps] == ["0"]


def test_a_layer_called_by_words_of_its_own():
    layer = Renamed(16, 4, 24, dropout=0.0, batch_first=True).eval()
    model, x = nn.ModuleList([layer]), torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = layer(tokens=x)
        with record(model) as recording:  # on torch's fast path, where the attention is never called
            assert torch.equal(layer(tokens=x), plain)
    message = (
        r"Not heard: '0.self_attn', in a Renamed .*calling it: torch.backends.mha.set_fastpath_enabled\(False\) makes"
    )
    with pytest.raises(AtlasError, match=message):
        recording.atlas()
    with record(model, dtype="keep") as recording:
        layer(tokens=x)
    expected = layer.self_attn(2 * x, 2 * x, 2 * x, average_attn_weights=False)[1]
    compare(recording.atlas().maps, expected)


def test_a_layer_whose_block_is_its_own():
    class Doubled(nn.TransformerEncoderLayer):
        def _sa_block(self, x, attn_mask, key_padding_mask, is_causal=False):
            return super()._sa_block(2 * x, attn_mask, key_padding_mask, is_causal)

    layer, x = Doubled(16, 4, 24, dropout=0.0, batch_first=True), torch.randn(2, 5, 16)
    with record(layer, dtype="keep") as recording:
        layer(x)
    compare(recording.atlas().maps, layer.self_attn(2 * x, 2 * x, 2 * x, average_attn_weights=False)[1])


def test_a_repetition_that_fails_changes_nothing(monkeypatch):
    layer, x = nn.MultiheadAttention(8, 2), torch.randn(4, 1, 8)

    def fail(given):
        raise MemoryError("no room")

    monkeypatch.setattr(torch_recorder, "_without_nested_tensors", fail)
    with record(layer) as recording:
        layer(x, x, x)
    with pytest.raises(AtlasError, match="whose attention could not be repeated: MemoryError: no room"):
        recording.atlas()


def test_a_call_of_its_attention_before_a_layer_hides_none_of_the_layers():
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval(), torch.randn(1, 4, 16)
    with torch.no_grad(), record(layer) as recording:
        layer.self_attn(x, x, x)
        layer(x)
        layer(x)
    assert len(recording.calls) == 3


def test_a_layer_that_failed_hides_no_later_call():
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True), torch.randn(1, 4, 16)

    def fail(*_):
        raise RuntimeError("stop")

    handle = layer.linear1.register_forward_pre_hook(fail)
    with record(layer) as recording:
        with pytest.raises(RuntimeError, match="stop"):
            layer(x)
        handle.remove()
        layer.eval()
        with torch.no_grad():
            layer(x)
    assert len(recording.calls) == 2


def test_a_record_of_the_attention_alone_hears_it_in_its_layer():
    layer, x = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True).eval(), torch.randn(1, 4, 16)
    with torch.no_grad(), record(layer.self_attn) as recording:
        layer(x)
    assert [call.name for call in recording.calls] == ["MultiheadAttention"]


def test_a_record_within_another_hears_once_and_alone():
    model, x = nn.ModuleList([nn.MultiheadAttention(8, 2) for _ in range(2)]), torch.randn(3, 1, 8)
    with record(model) as outer:
        model[0](x, x, x)
        with record(model) as inner:
            model[1](x, x, x)
    assert [[call.name for call in of.calls] for of in (outer, inner)] == [["0"], ["1"]]


def test_a_layer_in_another_thread_lends_its_name_to_nothing(monkeypatch):
    ours = regard.nn.Attention(regard.nn.Projections(8, num_heads=2))
    model, x = nn.ModuleDict({"ours": ours, "theirs": nn.MultiheadAttention(8, 2)}), torch.randn(3, 1, 8)
    repeating, goes_on, plain = Event(), Event(), torch_recorder._without_nested_tensors

    def waiting(given):
        repeating.set()
        goes_on.wait(10)
        return plain(given)

    monkeypatch.setattr(torch_recorder, "_without_nested_tensors", waiting)
    with record(model) as recording:
        other = Thread(target=lambda: model["theirs"](x, x, x))
        other.start()
        while other.is_alive() and not repeating.is_set():
            other.join(0.01)
        model["ours"](x)
        goes_on.set()
        other.join()
    assert [call.name for call in recording.calls] == ["ours"]


def test_a_model_goes_on_where_the_record_of_another_thread_ends():
    model, x, failed = nn.MultiheadAttention(8, 2), torch.randn(3, 1, 8), []
    arrived, ended = Event(), Event()

    def run():
        try:
            model(x, x, x)
        except Exception as error:
            failed.append(error)

    other = Thread(target=run)

    def hold(*_):
        if get_ident() == other.ident:
            arrived.set()
            ended.wait(10)

    handle = register_module_forward_hook(hold)  # comes before that of the record, which is gone when it is its turn
    try:
        with record(model):
            other.start()
            arrived.wait(10)
        ended.set()
        other.join()
    finally:
        handle.remove()
    assert failed == []


def test_a_thread_in_the_context_of_the_block_is_heard():
    model, x = nn.ModuleList([nn.MultiheadAttention(8, 2)]), torch.randn(3, 1, 8)
    with record(model) as recording:
        for run in (copy_context().run, lambda work: work()):
            other = Thread(target=run, args=(lambda: model[0](x, x, x),))
            other.start()
            other.join()
    assert [(call.name, call.kind) for call in recording.calls] == [("0", "self")]
