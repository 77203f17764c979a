"""Jensen-Shannon divergence against its definition, and the order of heads."""

import itertools
import math

import pytest
import torch

import regard
from regard import heads, lenses, masks
from regard.errors import ShapeError


def kl(p, q):
    return torch.where(p > 0, p * (p / q).log(), 0.0).sum(-1)


def by_definition(weights):
    """The mean of the two Kullback-Leibler divergences from the middle, pair by pair: (H, H) of (H, M, N)."""
    p = weights.double().unsqueeze(1)
    q = weights.double().unsqueeze(0)
    middle = (p + q) / 2
    return ((kl(p, middle) + kl(q, middle)) / 2).mean(-1)


def test_it_is_the_mean_divergence_from_the_middle():
    weights = (3 * torch.randn(5, 7, 9)).softmax(-1)
    weights[1, :, :5] = 0
    weights[1] /= weights[1].sum(-1, keepdim=True)
    shown = heads.head_divergence(weights)
    torch.testing.assert_close(shown.double(), by_definition(weights), rtol=1e-5, atol=1e-6)
    batch = heads.head_divergence(torch.stack([weights, weights.flip(0)]))
    torch.testing.assert_close(batch[0], shown)
    torch.testing.assert_close(batch[1], shown.flip(0, 1))
    torch.testing.assert_close(heads.head_divergence(weights[None]), shown[None])


def test_heads_that_never_meet_are_ln_2_apart():
    weights = torch.stack([torch.eye(6), torch.eye(6).roll(1, 0)])
    assert heads.head_divergence(weights)[0, 1].item() == pytest.approx(math.log(2))


def test_the_lens_over_many_tiles():
    query, key = 2 * torch.randn(1, 3, 900, 8), torch.randn(1, 3, 900, 8)
    lens, whole = heads.JensenShannon(), lenses.Weights()
    seen = regard.observe(query, key, key, lens, whole, mask=masks.causal())
    torch.testing.assert_close(seen[lens][0].double(), by_definition(seen[whole][0]), rtol=1e-4, atol=1e-6)


def test_what_a_sink_takes_is_one_more_key():
    query, key = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 6, 4)
    lens, whole = heads.JensenShannon(), lenses.Weights()
    seen = regard.observe(query, key, key, lens, whole, sinks=torch.tensor([1.0, 3.0]))
    rest = 1 - seen[whole].sum(-1, keepdim=True)
    complete = torch.cat([seen[whole], rest], -1)[0]
    torch.testing.assert_close(seen[lens][0].double(), by_definition(complete), rtol=1e-4, atol=1e-6)


def test_a_head_with_nan_is_unlike_any():
    weights = torch.stack([torch.eye(3), torch.eye(3), torch.full((3, 3), math.nan)])
    shown = heads.head_divergence(weights)
    assert shown[:2, :2].isfinite().all()
    assert shown[2].isnan().all()
    assert shown[:, 2].isnan().all()


def test_heads_that_are_alike_stand_together():
    kinds = torch.tensor([0, 2, 1, 0, 2, 1, 1, 0])
    prototypes = (4 * torch.randn(3, 10, 10)).softmax(-1)
    weights = 0.9 * prototypes[kinds] + 0.1 * torch.randn(8, 10, 10).softmax(-1)
    order = heads.similarity_order(heads.head_divergence(weights))
    assert sorted(order) == list(range(8))
    in_order = kinds[order].tolist()
    assert sum(left != right for left, right in itertools.pairwise(in_order)) == 2


def test_heads_on_a_line_are_put_in_its_order():
    places = torch.tensor([0.0, 5.0, 2.0, 9.0, 1.0])
    order = heads.similarity_order((places[:, None] - places).abs())
    assert order in ([0, 4, 2, 1, 3], [3, 1, 2, 4, 0])


@pytest.mark.parametrize("divergence", [torch.zeros(2, 3), torch.zeros(1, 2, 2)])
def test_an_order_needs_a_square(divergence):
    with pytest.raises(ShapeError, match="an order needs a square matrix of numbers"):
        heads.similarity_order(divergence)


def test_an_order_needs_numbers():
    with pytest.raises(ShapeError, match=r"\(2, 2\), with NaN"):
        heads.similarity_order(torch.full((2, 2), math.nan))


def test_no_heads_no_order():
    assert heads.similarity_order(torch.zeros(0, 0)) == []
