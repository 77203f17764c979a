"""Differential attention against its formula in float64."""

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks
from regard.errors import ConfigurationError, ShapeError

HEADS, KEY_HEADS, QUERIES, KEYS = 4, 2, 37, 53
Pair = tuple[Tensor, Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs() -> tuple[Pair, Pair, Tensor]:
    queries = drawn(2, HEADS, QUERIES, 8), drawn(2, HEADS, QUERIES, 8)
    return queries, (drawn(2, KEY_HEADS, KEYS, 8), drawn(2, KEY_HEADS, KEYS, 8)), drawn(2, KEY_HEADS, KEYS, 16)


def some_pairs() -> Tensor:
    """With an empty row, and a column that no row attends to."""
    keep = torch.rand(QUERIES, KEYS) > 0.4
    keep[3], keep[:, 7] = False, False
    return keep


def softmax_weights(query: Tensor, key: Tensor, keep: Tensor) -> Tensor:
    scores = query @ key.repeat_interleave(HEADS // KEY_HEADS, 1).mT / 8**0.5
    some = keep.any(-1, keepdim=True)
    return torch.where(keep, scores.masked_fill(~keep & some, -torch.inf).softmax(-1), 0.0)


def formula(query: Pair, key: Pair, share: Tensor, keep: Tensor) -> Tensor:
    first, second = (softmax_weights(q, k, keep) for q, k in zip(query, key, strict=True))
    return first - (share.unsqueeze(-1) if share.ndim else share) * second


@pytest.mark.parametrize("shape", [(), (HEADS, 1), (2, HEADS, QUERIES)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_formula_with_all_gradients(shape, masked):
    query, key, value = inputs()
    share = drawn(*shape)
    keep = some_pairs() if masked else torch.ones(QUERIES, KEYS, dtype=torch.bool)
    found = regard.differential_attention(query, key, value, share, mask=keep if masked else None)
    expected = formula(query, key, share, keep) @ value.repeat_interleave(HEADS // KEY_HEADS, 1)
    leaves, above = [*query, *key, value, share], torch.randn(expected.shape, dtype=torch.float64)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(output, leaves, above) for output in (found, expected))
    torch.testing.assert_close(*gradients)


def test_a_number_as_share():
    query, key, value = inputs()
    number = regard.differential_attention(query, key, value, 0.7)
    torch.testing.assert_close(number, regard.differential_attention(query, key, value, torch.tensor(0.7).double()))


def test_version_2_of_heads_that_alternate():
    query, key, value = drawn(2, 2 * HEADS, QUERIES, 8), drawn(2, KEY_HEADS, KEYS, 8), drawn(2, KEY_HEADS, KEYS, 8)
    share = torch.rand(2, HEADS, QUERIES, dtype=torch.float64)
    found = regard.differential_attention((query[:, 0::2], query[:, 1::2]), (key, key), value, share)
    whole = regard.attention(query, key, value)
    torch.testing.assert_close(found, whole[:, 0::2] - share.unsqueeze(-1) * whole[:, 1::2])


def test_the_weights():
    query, key, value = inputs()
    share, keep = drawn(2, HEADS, QUERIES), masks.causal().dense(QUERIES, KEYS)
    whole, part, spread = lenses.Weights(), lenses.Weights(slice(2, 30, 3), slice(1, 20)), lenses.Entropy()
    seen = regard.observe_differential_attention(query, key, value, share, whole, part, spread, mask=masks.causal())
    expected = formula(query, key, share, keep)
    torch.testing.assert_close(seen[whole], expected)
    torch.testing.assert_close(seen[part], expected[:, :, 2:30:3, 1:20])
    torch.testing.assert_close(
        seen.output, regard.differential_attention(query, key, value, share, mask=masks.causal())
    )
    assert seen.first[spread].shape == (2, HEADS, QUERIES)
    with pytest.raises(
        ConfigurationError, match=r"Entropy\(.*\) says nothing of a difference .* look at \.first\[lens\]"
    ):
        seen[spread]  # type: ignore[reportArgumentType]


def test_what_is_masked_reaches_nothing():
    query, key, value = inputs()
    keep = some_pairs()
    with torch.no_grad():
        expected = regard.differential_attention(query, key, value, 0.8, mask=keep)
        for tensor in (*key, value):
            tensor[:, :, 7] = float("nan")
        assert torch.equal(regard.differential_attention(query, key, value, 0.8, mask=keep), expected)
    assert not expected[:, :, 3].any()


def test_what_does_not_fit_is_named():
    query, key, value = inputs()
    with pytest.raises(
        ShapeError, match=r"query needs a pair of tensors, one for each softmax; it is of shape \(2, 4,"
    ):
        regard.differential_attention(query[0], key, value, 0.5)  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"share is \(3,\); it needs to broadcast to .* \(2, 4, 37\)"):
        regard.differential_attention(query, key, value, torch.rand(3))
