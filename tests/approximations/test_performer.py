"""FAVOR+ is unbiased for exp(q · k / √D), and the error of the attention it approximates falls as 1/√m.

Seeds are fixed. A map with a bias of a few per cent, and an error that does not fall, do not pass the same checks.
"""

import pytest
import torch

import regard
from regard.linear import FavorPlus
from regard.linear.feature_maps import orthogonal_rows

DIM, PAIRS, DRAWS, FEATURES = 8, 12, 2000, 32


def pairs():
    """Pairs of a query and a key, (2, PAIRS, DIM), short enough that the tails of the estimates are not heavy."""
    return 0.4 * torch.randn(2, PAIRS, DIM, generator=torch.Generator().manual_seed(7), dtype=torch.float64)


def z_scores(rows):
    """(mean of φ(q) · φ(k) - exp(q · k / √D)) / standard error, for each pair, over draws of rows(generator)."""
    query, key = pairs()
    generator = torch.Generator().manual_seed(11)
    estimates = []
    for _ in range(DRAWS):
        features = FavorPlus(DIM, FEATURES, seed=0, matrix=rows(generator))
        estimates.append((features(query) * features(key)).sum(-1))
    estimates = torch.stack(estimates)  # (DRAWS, PAIRS)
    exact = ((query * key).sum(-1) / DIM**0.5).exp()
    error = estimates.std(0) / DRAWS**0.5
    assert bool((error < 0.02 * exact).all()), "a bias of 8 per cent is seen for every pair"
    return (estimates.mean(0) - exact) / error


def of_constant_norm(generator):
    """Orthogonal rows whose norms are √D in place of those of normal vectors: a known map that has a bias."""
    rows = orthogonal_rows(FEATURES, DIM, generator)
    return rows / rows.norm(dim=-1, keepdim=True) * DIM**0.5


def is_unbiased(z):
    """No pair is more than 4 standard errors off: by chance one of 12 is for 8 of 10,000 seeds."""
    return float(z.abs().max()) < 4


def test_favor_plus_is_unbiased():
    assert is_unbiased(z_scores(lambda generator: orthogonal_rows(FEATURES, DIM, generator)))


def test_the_check_finds_a_bias():
    assert not is_unbiased(z_scores(of_constant_norm))
    assert not is_unbiased(z_scores(lambda generator: 1.05 * orthogonal_rows(FEATURES, DIM, generator)))


def slope(errors):
    """Of log error over log m, by least squares."""
    x, y = torch.tensor([*errors], dtype=torch.float64).log(), torch.tensor([*errors.values()]).double().log()
    return float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())


@pytest.mark.parametrize("causal", [False, True])
def test_the_error_falls_as_the_root_of_the_features(causal):
    query, key, value = torch.randn(3, 1, 2, 48, DIM, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    query, key = 0.3 * query, 0.3 * key
    errors = {}
    for count in (32, 128, 512, 2048):
        method = FavorPlus(DIM, count, seed=5)
        errors[count] = regard.approximation(
            query, key, value, method, causal=causal, redraws=16, lenses=(), lengths=()
        ).error
    assert abs(slope(errors) + 0.5) < 0.05
    assert abs(slope({count: error**2 for count, error in errors.items()}) + 0.5) > 0.4, "another power is seen"
