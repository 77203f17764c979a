"""torch's own attention recorded: results unchanged by a bit on every path that torch takes."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from regard.explorer import record
from regard.nn import swap

LAYOUTS = pytest.mark.parametrize("batch_first", [True, False])


def whole(shown):
    everything = slice(0, shown.queries), slice(0, shown.keys)
    return np.stack([shown.weights(head, *everything) for head in range(shown.heads)])


def compare(maps, weights):
    for shown in maps:
        np.testing.assert_allclose(whole(shown), weights[shown.sequence].detach(), atol=1e-6)


def inputs(layer, *lengths, batch=2):
    return [
        torch.randn(batch, length, layer.embed_dim)
        if layer.batch_first
        else torch.randn(length, batch, layer.embed_dim)
        for length in lengths
    ]


PADDED = torch.tensor([[False, False, False, False, True], [False] * 5])
MASKS = {
    "none": {},
    "padding": {"key_padding_mask": PADDED},
    "added padding": {"key_padding_mask": torch.zeros(2, 5).masked_fill(PADDED, -2.0)},
    "bool": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1)},
    "causal": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "is_causal": True},
    "added": {"attn_mask": torch.linspace(-2, 2, 25).view(5, 5)},
    "per head": {"attn_mask": torch.rand(8, 5, 5)},
    "both": {"attn_mask": torch.ones(5, 5, dtype=torch.bool).triu(1), "key_padding_mask": PADDED},
}


@LAYOUTS
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS.keys())
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"bias": False}])
def test_what_torch_returns_is_what_is_kept(batch_first, masks, options):
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first, **options)
    (x,) = inputs(layer, 5)
    plain = layer(x, x, x, average_attn_weights=False, **masks)
    with record(layer, dtype="keep") as recording:
        recorded = layer(x, x, x, average_attn_weights=False, **masks)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    maps = recording.atlas().maps
    assert [(shown.name, shown.kind) for shown in maps] == [("MultiheadAttention", "self")] * 2
    compare(maps, plain[1])


def test_other_sequences_dims_and_a_call_without_weights():
    layer = nn.MultiheadAttention(16, 4, kdim=6, vdim=10, batch_first=True)
    q, k, v = torch.randn(2, 5, 16), torch.randn(2, 7, 6), torch.randn(2, 7, 10)
    expected = layer(q, k, v, average_attn_weights=False)[1]
    with record(layer, dtype="keep") as recording:
        layer(q, k, value=v, need_weights=False)
    maps = recording.atlas().maps
    assert [shown.kind for shown in maps] == ["cross"] * 2
    compare(maps, expected)


def test_no_batch():
    layer = nn.MultiheadAttention(16, 4)
    x = torch.randn(5, 16)
    with record(layer, dtype="keep") as recording:
        _, weights = layer(x, x, x, average_attn_weights=False)
    compare(recording.atlas().maps, weights[None])


def encoder(**options):
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options.get("norm_first", False))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_on_its_fast_path_and_off_it(training, grad, norm_first, padded, causal):
    model = encoder(norm_first=norm_first).train(training)
    x, real = torch.randn(2, 5, 16), 4
    asked = {"src_key_padding_mask": PADDED if padded else None}
    if causal:
        asked["mask"] = torch.ones(5, 5, dtype=torch.bool).triu(1)
    with torch.set_grad_enabled(grad):
        plain = model(x, **asked)
        with record(model, dtype="keep") as recording:
            recorded = model(x, **asked)
        assert torch.equal(plain, recorded)
        plain_again = model(x, **asked)
        assert torch.equal(plain, plain_again)
    maps = recording.atlas().maps
    assert [shown.name for shown in maps[::2]] == ["layers.0.self_attn", "layers.1.self_attn"]
    first: Any = model.layers[0]
    seen = first.norm1(x) if norm_first else x
    mask = {"key_padding_mask": asked["src_key_padding_mask"], "attn_mask": asked.get("mask")}
    expected = first.self_attn(seen, seen, seen, average_attn_weights=False, **mask)[1].detach()
    np.testing.assert_allclose(whole(maps[0])[:, :real, :real], expected[0, :, :real, :real], atol=1e-6)
    np.testing.assert_allclose(whole(maps[1]), expected[1], atol=1e-6)
    assert not maps[0].exists(0, slice(0, 5), slice(4, 5)).any() or not padded


def test_a_whole_transformer():
    model = nn.Transformer(16, 4, 1, 1, 24, dropout=0.0, batch_first=True)
    source, target = torch.randn(1, 7, 16), torch.randn(1, 5, 16)
    plain = model(source, target)
    with record(model) as recording:
        assert torch.equal(model(source, target), plain)
    found = {shown.name: (shown.kind, shown.queries, shown.keys) for shown in recording.atlas().maps}
    assert found == {
        "encoder.layers.0.self_attn": ("self", 7, 7),
        "decoder.layers.0.self_attn": ("self", 5, 5),
        "decoder.layers.0.multihead_attn": ("cross", 5, 7),
    }


def test_dropout_draws_what_it_drew():
    model = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.5, batch_first=True)
    x = torch.randn(2, 5, 16)
    torch.manual_seed(7)
    plain = model(x), torch.rand(3)
    torch.manual_seed(7)
    with record(model) as recording:
        recorded = model(x), torch.rand(3)
    assert all(torch.equal(a, b) for a, b in zip(plain, recorded, strict=True))
    assert len(recording.calls) == 1


def test_the_hooks_of_others_are_called_once():
    layer = nn.MultiheadAttention(16, 4)
    (x,) = inputs(layer, 5)
    calls = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    with record(layer):
        layer(x, x, x)
    assert calls == [1]
    assert len(layer._forward_pre_hooks) == 0


def test_afterwards_nothing_listens():
    layer = nn.MultiheadAttention(16, 4)
    (x,) = inputs(layer, 5)
    with record(layer) as recording:
        pass
    layer(x, x, x)
    assert recording.calls == []


def test_a_swapped_model_has_the_same_names_and_kinds():
    model = nn.Transformer(16, 4, 1, 1, 24, dropout=0.0, batch_first=True)
    source, target = torch.randn(1, 7, 16), torch.randn(1, 5, 16)
    with record(model, dtype="keep") as before:
        model(source, target)
    swap(model)
    with record(model, dtype="keep") as after:
        model(source, target)
    for one, other in zip(before.atlas().maps, after.atlas().maps, strict=True):
        assert (one.name, one.kind) == (other.name, other.kind)
        np.testing.assert_allclose(whole(one), whole(other), atol=1e-5)


def test_words_of_padding_that_torch_took_away():
    """Its encoder makes nested tensors of padded batches: maps are of the lengths that the batch had."""
    model, x, pad = encoder().eval(), torch.randn(2, 7, 16), torch.arange(7) >= torch.tensor([[2], [4]])
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of nested tensors
        plain = model(x, src_key_padding_mask=pad)
        with record(model, dtype="keep") as recording:
            assert torch.equal(model(x, src_key_padding_mask=pad), plain)
    maps = recording.atlas(tokens=[list("abcdefg"), list("hijklmn")]).maps
    assert [(shown.queries, shown.keys) for shown in maps] == [(7, 7)] * 4
    assert maps[1].key_tokens == tuple("hijklmn")
    assert not maps[1].exists(0, slice(0, 7), slice(4, 7)).any()
    first: Any = model.layers[0]
    expected = first.self_attn(x, x, x, average_attn_weights=False, key_padding_mask=pad)[1].detach()
    for shown, real in zip(maps[:2], (2, 4), strict=True):
        np.testing.assert_allclose(whole(shown)[:, :real], expected[shown.sequence, :, :real], atol=1e-6)


def test_no_hook_is_left_behind():
    model = torch.nn.MultiheadAttention(8, 2)
    with record(model):
        model(*[torch.rand(3, 1, 8)] * 3)
    assert not torch.nn.modules.module._has_any_global_hook()
