"""Attention over slots that fade, against the steps of gated slot attention and the sums of ABC in float64."""

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.linear import running_softmax, slot_attention, value_decay


def inputs(length=37, heads=4, key_heads=2, slots=5):
    shapes = (heads, length, 7), (key_heads, length, 7), (key_heads, length, 3), (key_heads, length, slots)
    return tuple(torch.randn(2, *shape, dtype=torch.float64) for shape in shapes)


def by_steps(query, key, value, slots, decay):
    group = query.shape[1] // key.shape[1]
    keys = key.new_zeros(*key.shape[:2], slots.shape[-1], key.shape[-1])
    values, rows = key.new_zeros(*key.shape[:2], slots.shape[-1], value.shape[-1]), []
    for t in range(key.shape[2]):
        fade, share = decay[:, :, t, :, None].exp(), slots[:, :, t, :, None]
        keys = fade * keys + share * key[:, :, t, None]
        values = fade * values + share * value[:, :, t, None]
        scores = keys.repeat_interleave(group, 1) @ query[:, :, t, :, None] / query.shape[-1] ** 0.5
        rows.append((scores.softmax(-2).mT @ values.repeat_interleave(group, 1)).squeeze(-2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", [1, 2, 37, 131])
def test_it_is_gated_slot_attention(length):
    query, key, value, logits = inputs(length)
    keep = logits.sigmoid()
    tensors = [tensor.detach().requires_grad_() for tensor in (query, key, value, 1 - keep, keep.log())]
    results = slot_attention(*tensors), by_steps(*tensors)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    for one, other in zip(*(torch.autograd.grad(each, tensors, upstream) for each in results), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("most", [0.0, 1e3], ids=["by blocks", "all pairs at once"])
@pytest.mark.parametrize("length", [16, 37])
def test_both_ways_of_decaying(length, most, monkeypatch):
    monkeypatch.setattr(value_decay, "MOST_DECAYED", most)
    query, key, value, logits = inputs(length)
    keep = (logits + 2).sigmoid()
    tensors = [tensor.detach().requires_grad_() for tensor in (query, key, value, 1 - keep, keep.log())]
    results = slot_attention(*tensors), by_steps(*tensors)
    torch.testing.assert_close(*results)
    found, exact = (torch.autograd.grad(each.square().sum(), tensors) for each in results)
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other)


def test_decays_near_the_most_are_exact_in_float32():
    query, key, value, logits = (tensor.float() for tensor in inputs(64))
    decay = -logits.abs()
    decay *= 0.99 * value_decay.MOST_DECAYED / decay.sum(-2, keepdim=True).abs()
    found = slot_attention(query, key, value, logits.sigmoid(), decay)
    exact = by_steps(*(tensor.double() for tensor in (query, key, value, logits.sigmoid(), decay)))
    # Sums of 64 numbers, and a logarithm that is rounded 64 times before its exponential.
    assert (found - exact).abs().max() < 2 * 64 * torch.finfo(torch.float32).eps * exact.abs().max()


def test_strong_decays_do_not_overflow():
    query, key, value, logits = (tensor.float() for tensor in inputs(131))
    keep = (40 * logits).sigmoid()  # from 1e-40 to 1
    found = slot_attention(query, key, value, 1 - keep, keep.log())
    exact = by_steps(*(tensor.double() for tensor in (query, key, value, 1 - keep, keep.log())))
    assert (found - exact).abs().max() < 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert torch.isneginf(keep.log()).any()


def test_bounded_memory_control_has_means_of_the_tokens_so_far():
    query, key, value, logits = inputs(heads=2)
    found = slot_attention(query, key, value, *running_softmax(logits))
    for t in range(37):
        shares = logits[:, :, : t + 1].softmax(2).mT  # (2, 2, slots, t + 1)
        weights = (shares @ key[:, :, : t + 1] @ query[:, :, t, :, None] / 7**0.5).softmax(-2)
        torch.testing.assert_close(found[:, :, t], (weights.mT @ shares @ value[:, :, : t + 1]).squeeze(-2))


def test_one_head_no_tokens_and_half_precision():
    query, key, value, logits = inputs(heads=2)
    slots, decay = running_softmax(logits)
    whole = slot_attention(query, key, value, slots, decay)
    alone = slot_attention(query[1, 1], key[1, 1], value[1, 1], slots[1, 1], decay[1, 1])
    torch.testing.assert_close(alone, whole[1, 1])
    low = slot_attention(query.bfloat16(), key.bfloat16(), value.bfloat16(), slots, decay)
    assert low.dtype is torch.bfloat16
    torch.testing.assert_close(low.double(), whole, atol=0.05, rtol=0.05)
    query, key, value, logits = inputs(0)
    assert slot_attention(query, key, value, logits, logits).shape == (2, 4, 0, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v, s: (q, k, v, s, s.abs()), ConfigurationError, "decay has values up to .* pass the logarithm"),
        (lambda q, k, v, s: (q, k, v, s, -s.abs()[..., :2]), ShapeError, "they need the same slots"),
        (lambda q, k, v, s: (q, k, v, s[:, :, :9], -s.abs()), ShapeError, r"slots has the shape \(2, 2, 9, 5\)"),
        (lambda q, k, v, s: (q[:, :, :9], k, v, s, -s.abs()), ShapeError, "query has 9 positions and key 37"),
    ],
)
def test_bad_slots_are_named(change, error, message):
    with pytest.raises(error, match=message):
        slot_attention(*change(*inputs()))


@pytest.mark.parametrize("logits", [torch.zeros(3), torch.zeros(3, 2, dtype=torch.int64)])
def test_a_running_softmax_needs_positions(logits):
    with pytest.raises(ConfigurationError, match=r"it needs \(\.\.\., N, slots\) of a floating-point type"):
        running_softmax(logits)
