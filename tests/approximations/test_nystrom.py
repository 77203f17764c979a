"""Nyström attention against its three softmaxes in float64, with gradients; its inverse against torch's."""

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, nn
from regard.approximations import Nystrom, nystrom_attention, pseudo_inverse, segment_means
from regard.errors import ConfigurationError, ShapeError


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def means(rows: Tensor, count: int) -> Tensor:
    """One segment after the other."""
    length, count = rows.shape[-2], min(count, rows.shape[-2])
    segments = [[i for i in range(length) if i * count // length == segment] for segment in range(count)]
    return torch.stack([rows[..., segment, :].mean(-2) for segment in segments], -2)


def three_softmaxes(query: Tensor, key: Tensor, value: Tensor, *, landmarks: int, scale: float) -> Tensor:
    """With the inverse of six iterations, written out for each matrix."""
    key, value = (tensor.repeat_interleave(query.shape[1] // tensor.shape[1], 1) for tensor in (key, value))
    small_query, small_key = means(query, landmarks), means(key, landmarks)
    left = (scale * query @ small_key.mT).softmax(-1)
    middle = (scale * small_query @ small_key.mT).softmax(-1)
    right = (scale * small_query @ key.mT).softmax(-1)
    columns, rows = middle.sum(-2).amax(-1), middle.sum(-1).amax(-1)
    inverse, one = middle.mT / (columns * rows)[..., None, None], torch.eye(middle.shape[-2], dtype=middle.dtype)
    for _ in range(6):
        product = middle @ inverse
        inverse = 0.25 * inverse @ (13 * one - product @ (15 * one - product @ (7 * one - product)))
    return left @ inverse @ right @ value


@pytest.mark.parametrize(("queries", "keys", "landmarks"), [(37, 53, 7), (131, 131, 16), (64, 64, 8), (5, 53, 7)])
@pytest.mark.parametrize("scale", [None, 0.2])
def test_it_is_three_softmaxes_with_all_gradients(queries, keys, landmarks, scale):
    leaves = [drawn(2, 4, queries, 8), drawn(2, 2, keys, 8), drawn(2, 2, keys, 5)]
    found = nystrom_attention(*leaves, landmarks=landmarks, scale=scale)
    expected = three_softmaxes(*leaves, landmarks=landmarks, scale=8**-0.5 if scale is None else scale)
    torch.testing.assert_close(found, expected)
    above = torch.randn_like(expected)
    torch.testing.assert_close(*(torch.autograd.grad(each, leaves, above) for each in (found, expected)))


def test_float32_and_bfloat16():
    leaves = [drawn(1, 2, 512, 16).detach() for _ in range(3)]
    expected = three_softmaxes(*leaves, landmarks=32, scale=0.25)
    for dtype, within in ((torch.float32, 1e-4), (torch.bfloat16, 0.1)):
        found = nystrom_attention(*(tensor.to(dtype) for tensor in leaves), landmarks=32)
        assert found.dtype == dtype
        assert (found.double() - expected).norm() < within * expected.norm()


def test_a_landmark_for_each_token_is_softmax_attention():
    query, key, value = (drawn(1, 2, 13, 8) for _ in range(3))
    found = nystrom_attention(query, key, value, landmarks=13, iterations=60)
    torch.testing.assert_close(found, regard.attention(query, key, value), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 7), (7, 0)])
def test_empty_sequences(queries, keys):
    found = nystrom_attention(drawn(1, 2, queries, 8), drawn(1, 2, keys, 8), drawn(1, 2, keys, 3), landmarks=4)
    assert found.shape == (1, 2, queries, 3)
    assert not found.any()


def test_the_inverse_is_that_of_torch():
    matrices = torch.rand(3, 7, 5, dtype=torch.float64)
    torch.testing.assert_close(pseudo_inverse(matrices, 40), torch.linalg.pinv(matrices))
    square = matrices[:, :5]
    assert (pseudo_inverse(square, 6) @ square - torch.eye(5)).norm() < (pseudo_inverse(square, 3) @ square).norm()


def test_means_of_segments():
    rows = drawn(2, 37, 3)
    for count in (1, 5, 36, 37, 40):
        torch.testing.assert_close(segment_means(rows, count), means(rows, count))


def test_it_is_compared_with_softmax_attention():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 256, 16).unbind()
    few, many = (regard.approximation(query, key, value, Nystrom(count), lengths=()).error for count in (4, 256))
    assert many < few < 1.5


def test_what_it_cannot_compute_is_said():
    query = torch.randn(1, 2, 37, 8)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"causal": True}, "Nyström attention, whose landmarks are means of all positions: leave the mask out"),
        ({"mask": masks.padding([20])}, "pass each sequence without padding"),
        ({"bias": biases.alibi(2)}, "no scores of single pairs, so it cannot have a bias"),
    ]
    for options, message in cases:
        with pytest.raises(ConfigurationError, match=message):
            regard.approximation(query, query, query, Nystrom(4), lengths=(), **options)
    with pytest.raises(ConfigurationError, match="landmarks is 0; it needs at least 1"):
        nystrom_attention(query, query, query, landmarks=0)
    with pytest.raises(ConfigurationError, match="iterations is 0"):
        Nystrom(4, 0)
    with pytest.raises(ShapeError, match="key"):
        nystrom_attention(query, query[..., :3], query, landmarks=4)


def test_luna_is_two_calls():
    """Ma et al. 2021, Eq. 4 and 5: a short sequence packs the context, which the long one unpacks."""
    torch.manual_seed(0)
    pack, unpack = (nn.Attention(nn.Projections(16, 2)).double() for _ in range(2))
    x, short = drawn(2, 37, 16), drawn(2, 5, 16)

    def by_hand(layer: nn.Attention, rows: Tensor, memory: Tensor) -> Tensor:
        queries, (keys, values) = layer.projections.queries(rows), layer.projections.keys_and_values(memory)
        weights = (queries @ keys.mT / 8**0.5).softmax(-1)
        return layer.projections.project_output(weights @ values)

    torch.testing.assert_close(unpack(x, pack(short, x)), by_hand(unpack, x, by_hand(pack, short, x)))
