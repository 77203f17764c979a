import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.additive_tiles import AdditiveGradients, AdditiveScores, _partial_sums
from regard.backends.cpu.library import DTYPES
from regard.errors import ShapeError

pytestmark = pytest.mark.usefixtures("built")


def all_gradients(query: Tensor, key: Tensor, weight: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients by query, key and weight of all pairs at once."""
    gradients = AdditiveGradients(AdditiveScores(query, key, weight))
    gradients.add(upstream)
    return gradients.result()


Triple = tuple[Tensor, Tensor, Tensor]


def plain(query: Tensor, key: Tensor, weight: Tensor, upstream: Tensor) -> list[Tensor]:
    """By autograd, in the dtype of the query."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in (query, key, weight)]
    keys = leaves[1].repeat_interleave(query.shape[0] // max(key.shape[0], 1), 0)
    scores = torch.tanh(leaves[0].unsqueeze(-2) + keys.unsqueeze(-3)) @ leaves[2]
    return list(torch.autograd.grad(scores, leaves, upstream.to(query.dtype)))


def all_near(has: Triple, query: Tensor, key: Tensor, weight: Tensor, upstream: Tensor) -> bool:
    """At most five times as far from the truth as autograd in float32, and a rounding of the largest terms' sum."""
    truths = plain(query.double(), key.double(), weight.double(), upstream)
    usual = plain(query.float(), key.float(), weight, upstream)
    terms = (
        upstream.abs().sum(-1).amax() * weight.abs().amax(),
        upstream.abs().sum(-2).amax() * weight.abs().amax(),
        1.0,
    )
    return all(
        a.dtype == torch.float32
        and a.shape == truth.shape
        and bool(((a - truth).abs() <= 5 * (b - truth).abs().amax() + torch.finfo(torch.float32).eps * term).all())
        for a, b, truth, term in zip(has, usual, truths, terms, strict=True)
    )


def inputs(
    heads: int,
    key_heads: int,
    rows: int,
    columns: int,
    features: int,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, ...]:
    query, key = size * torch.randn(heads, rows, features), size * torch.randn(key_heads, columns, features)
    weight, upstream = torch.randn(features) / math.sqrt(features), torch.randn(heads, rows, columns)
    return query.to(dtype), key.to(dtype), weight, upstream


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


SIZES = [
    *[(2, 2, 37, 131, 23), (1, 1, 1, 1, 1), (3, 3, 5, 64, 16), (1, 1, 3, 257, 67), (7, 7, 1, 61, 19)],
    *[(1, 1, 2, 129, 128), (2, 2, 11, 7, 5), (6, 2, 19, 67, 33), (4, 1, 1, 67, 9), (2, 1, 1, 67, 9)],
]


@dtypes
@pytest.mark.parametrize("shape", SIZES)
def test_gradient(variant, shape, dtype):
    given = inputs(*shape, dtype=dtype)
    assert all_near(all_gradients(*given), *given)


@pytest.mark.parametrize("size", [1e-3, 0.01, 0.1, 0.3, 1, 3, 10, 30, 100])
@dtypes
def test_gradient_of_small_and_large_entries(variant, size, dtype):
    given = inputs(2, 2, 67, 149, 64, size, dtype)
    assert all_near(all_gradients(*given), *given)


@pytest.mark.parametrize("shape", [(0, 0, 3, 5, 7), (2, 2, 0, 5, 7), (2, 1, 3, 0, 7)])
def test_nothing_at_all(variant, shape):
    given = inputs(*shape)
    for has, like in zip(all_gradients(*given), given, strict=False):
        assert torch.equal(has, torch.zeros_like(like))


def test_no_features(variant):
    query, key = torch.randn(1, 3, 0), torch.randn(1, 5, 0)
    has = all_gradients(query, key, torch.randn(0), torch.randn(1, 3, 5))
    assert [tuple(each.shape) for each in has] == [(1, 3, 0), (1, 5, 0), (0,)]


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (5.0, 5.0),
        (8.0, 8.0),
        (12.0, 9.0),
        (15.0, -14.0),
        (21.0, 21.0),
        (43.1, -42.9),
        (44.0, -32.9),
        (60.0, 60.0),
        (60.0, -59.0),
        (1e4, -1e4),
        (-1e4, 9999.5),
    ],
)
def test_the_sum_decides_and_not_its_parts(variant, x, y):
    query, key, weight = torch.full((1, 5, 7), x), torch.full((1, 70, 7), y), torch.arange(7.0) - 2.5
    query[:, :, 1::2], key[:, ::3] = 0.25, 0.5
    given = query, key, weight, torch.randn(1, 5, 70)
    assert all_near(all_gradients(*given), *given)


def test_a_saturated_pair_has_no_slope(variant):
    query, key, weight, upstream = inputs(1, 1, 5, 70, 8)
    for shift in (25.0, -25.0):
        of_query, of_key, _ = all_gradients(query + shift, key + shift, weight, upstream)
        assert of_query.abs().max() < 1e-12
        assert of_key.abs().max() < 1e-12


def test_some_pairs_one_by_one(variant):
    query, key, weight, upstream = inputs(2, 1, 13, 300, 33)
    key[0, 70] *= 1e3
    query[0, 7] *= 100
    query[1, 12] = math.inf
    has = all_gradients(query, key, weight, upstream)
    assert all_near(has, query, key, weight, upstream)


@pytest.mark.parametrize("size", [0.01, 1.0, 40.0])
def test_nan_stays_with_what_it_meets(variant, size):
    query, key, weight, upstream = inputs(3, 3, 13, 150, 9, size)
    clean = all_gradients(query, key, weight, upstream)
    key[1, 77, 5] = math.nan
    of_query, of_key, _ = all_gradients(query, key, weight, upstream)
    assert of_query[1, :, 5].isnan().all()
    assert of_key[1, 77, 5].isnan()
    for has, was in ((of_query, clean[0]), (of_key, clean[1])):
        torch.testing.assert_close(has[[0, 2]], was[[0, 2]], rtol=0, atol=1e-4)
    others = [place for place in range(150) if place != 77]
    torch.testing.assert_close(of_key[1, others][:, :5], clean[1][1, others][:, :5], rtol=0, atol=1e-4)


@pytest.mark.parametrize("rows", [1, 41])
def test_tiles_add_up(variant, rows):
    query, key, weight, upstream = inputs(4, 2, rows, 311, 23, 3.0)
    gradients = AdditiveGradients(AdditiveScores(query, key, weight))
    for top, bottom in ((0, 1), (1, 18), (18, rows)):
        for left, right in ((0, 64), (64, 135), (135, 311)):
            gradients.add(upstream[:, top:bottom, left:right], slice(top, bottom), slice(left, right))
    assert all_near(gradients.result(), query, key, weight, upstream)


def test_strided_and_expanded_upstream(variant):
    query, key, weight, upstream = inputs(2, 2, 17, 70, 9)
    for given in (upstream.mT.contiguous().mT, upstream[:, :1].expand(2, 17, 70), torch.ones(()).expand(2, 17, 70)):
        assert all_near(all_gradients(query, key, weight, given), query, key, weight, given)


def test_many_rows_keep_their_precision(variant):
    given = inputs(1, 1, 4099, 70, 8)
    assert all_near(all_gradients(*given), *given)


@pytest.mark.parametrize("shape", [(1, 1, 700, 311, 31), (6, 3, 200, 90, 31), (8, 4, 1, 900, 64)])
def test_threads_change_the_last_bits_alone(shape, monkeypatch):
    given = inputs(*shape)
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert all_near(all_gradients(*given), *given)


def test_key_heads_are_cut_as_the_threads_need():
    assert [_partial_sums(*each) for each in ((0, 4), (8, 2), (2, 8), (1, 2), (3, 2), (63, 64), (5, 4))] == [
        1,
        1,
        4,
        2,
        2,
        5,
        4,
    ]


def test_upstream_that_does_not_fit():
    query, key, weight, upstream = inputs(2, 2, 3, 5, 4)
    gradients = AdditiveGradients(AdditiveScores(query, key, weight))
    with pytest.raises(ShapeError, match=r"upstream has shape \(2, 3, 4\); the tile needs \(2, 3, 5\)"):
        gradients.add(upstream[..., :4])
    with pytest.raises(ShapeError, match=r"upstream has shape \(2, 3, 5\); the tile needs \(2, 1, 5\)"):
        gradients.add(upstream, slice(2, None))
