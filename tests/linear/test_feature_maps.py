"""Feature maps: their formulas, and that FAVOR+ is unbiased for exp(q · k / √D) with an error that falls as 1/√m."""

import itertools
import math

import pytest
import torch
from torch.nn import functional

import regard
from regard.errors import ConfigurationError, ShapeError
from regard.linear import Elu, FavorPlus, Identity, Relu, Softmax
from regard.linear.feature_maps import orthogonal_rows


def test_formulas():
    x = torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(Elu()(x), functional.elu(x) + 1)
    torch.testing.assert_close(Relu()(x), x.clamp(min=0))
    torch.testing.assert_close(Softmax()(x), functional.softmax(x, -1))
    assert Identity()(x) is x
    assert Elu() == Elu()
    assert {Elu(), Relu(), Elu()} == {Elu(), Relu()}


def test_small_features_of_elu_are_not_rounded_to_0():
    x = torch.tensor([-40.0], requires_grad=True)
    assert Elu()(x).item() == pytest.approx(math.exp(-40.0))
    Elu()(x).sum().backward()
    assert x.grad is not None
    assert x.grad.item() == pytest.approx(math.exp(-40.0))


def test_positive_random_features_are_the_formula():
    features = FavorPlus(3, 7, seed=5)
    x = torch.randn(2, 3, dtype=torch.float64)
    scaled = x / 3**0.25
    by_hand = (scaled @ features.matrix.T - scaled.square().sum(-1, keepdim=True) / 2).exp() / 7**0.5
    torch.testing.assert_close(features(x), by_hand)
    relu = FavorPlus(3, 7, seed=5, kernel="relu")
    torch.testing.assert_close(relu(x), (scaled @ features.matrix.T).clamp(min=0) / 7**0.5)


@pytest.mark.parametrize(("count", "dim"), [(4, 4), (3, 8), (11, 4)])
def test_rows_are_orthogonal_within_blocks_and_normal_each(count, dim):
    rows = orthogonal_rows(count, dim)
    for block in rows.split(dim):
        products = block @ block.T
        torch.testing.assert_close(products, products.diagonal().diag())
    many = orthogonal_rows(40_000, dim)
    assert many.mean(0).abs().max() < 5 / 200
    assert (many.T @ many / len(many) - torch.eye(dim)).abs().max() < 6 * 2**0.5 / 200
    kurtosis = (many**4).mean()
    assert abs(kurtosis - 3) < 5 * (96 / many.numel()) ** 0.5  # that of a normal distribution


def estimates(count, redraws, x, y):
    """exp(x · y / √D) by each of many maps: (redraws,)."""
    maps = FavorPlus(len(x), count * redraws, seed=3).matrix.unflatten(0, (redraws, count))
    results = []
    for matrix in maps:
        features = FavorPlus(len(x), count, seed=0, matrix=matrix)
        results.append(features(x) @ features(y))
    return torch.stack(results)


def test_favor_is_unbiased():
    x, y = 0.8 * torch.randn(2, 4, dtype=torch.float64)
    exact = (x @ y / 2).exp()
    found = estimates(8, 4000, x, y)
    error = found.std() / len(found) ** 0.5
    assert abs(found.mean() - exact) < 4 * error
    assert error < 0.03 * exact, "the test can tell"


def test_the_error_of_favor_falls_as_the_root_of_its_features():
    x, y = 0.4 * torch.randn(2, 4, dtype=torch.float64)  # of larger ones the spread itself is estimated badly
    spread = [estimates(count, 1500, x, y).std() for count in (8, 32, 128)]
    for few, many in itertools.pairwise(spread):
        assert 2 * 0.85 < few / many < 2 / 0.85


def test_orthogonal_rows_have_a_smaller_error_than_independent_ones():
    x, y = 0.8 * torch.randn(2, 4, dtype=torch.float64)
    independent = torch.randn(4000, 4, 4, dtype=torch.float64)
    by_chance = torch.stack(
        [FavorPlus(4, 4, seed=0, matrix=m)(x) @ FavorPlus(4, 4, seed=0, matrix=m)(y) for m in independent]
    )
    assert estimates(4, 4000, x, y).std() < 0.97 * by_chance.std()


def test_performer_attention_comes_close_to_softmax_attention():
    q, k, v = (0.4 * torch.randn(2, 3, 50, 16, dtype=torch.float64) for _ in range(3))
    exact = regard.attention(q, k, v)
    errors = []
    for count in (64, 1024):
        maps = [FavorPlus(16, count, seed=seed) for seed in range(8)]
        outputs = [regard.linear_attention(q, k, v, feature_map=one) for one in maps]
        errors.append(torch.stack([(output - exact).square().mean() for output in outputs]).mean().sqrt())
    assert errors[1] < errors[0] / 3
    assert errors[1] < 0.1 * exact.std()


@pytest.mark.parametrize("causal", [False, True])
def test_large_queries_and_keys_neither_overflow_nor_vanish(causal):
    """exp(|w| |x|) is beyond float32 here; the formula in float64 is not."""
    q, k, v = (torch.randn(1, 2, 30, 8) for _ in range(3))
    q, k = 12 * q, 6 * k
    features = FavorPlus(8, 32, seed=2)
    assert not features(q).isfinite().all() or not features(k).all()
    ours = regard.linear_attention(q, k, v, feature_map=features, causal=causal)
    truth = regard.linear_attention(q.double(), k.double(), v.double(), feature_map=features, causal=causal)
    assert ours.isfinite().all()
    error = (ours - truth).abs()
    assert error.median() < 1e-4


def test_a_seed_repeats_and_redraw_changes():
    features = FavorPlus(4, 6, seed=7)
    assert torch.equal(features.matrix, FavorPlus(4, 6, seed=7).matrix)
    assert not torch.equal(features.matrix, features.redraw().matrix)
    assert torch.equal(features.redraw(8).matrix, FavorPlus(4, 6, seed=8).matrix)
    torch.manual_seed(1)
    first = FavorPlus(4, 6)
    torch.manual_seed(1)
    assert torch.equal(first.matrix, FavorPlus(4, 6).matrix)
    assert repr(features) == "FavorPlus(dim=4, num_features=6, seed=7, kernel='softmax')"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"dim": 0}, ConfigurationError, "dim is 0; it needs at least 1"),
        ({"num_features": 2.5}, ConfigurationError, "num_features needs a whole number; it is 2.5"),
        ({"kernel": "cosine"}, ConfigurationError, "kernel is 'cosine'; it needs 'softmax' or 'relu'"),
        ({"seed": "one"}, ConfigurationError, "seed is 'one'; it needs a whole number"),
        ({"matrix": torch.zeros(3, 4)}, ShapeError, r"matrix has the shape \(3, 4\); it needs \(256, 4\)"),
    ],
)
def test_bad_arguments(arguments, error, message):
    with pytest.raises(error, match=message):
        FavorPlus(**{"dim": 4} | arguments)
