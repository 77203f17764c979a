"""Weights of YOSO: the angle between a query and a key, and what hashes of random hyperplanes come to."""

import math

import pytest
import torch
from torch.nn.functional import normalize

import regard
from regard import lenses, masks, normalizers, scores
from regard.errors import ConfigurationError


def inputs(length=37):
    query, key = (normalize(torch.randn(2, 4, length, 8, dtype=torch.float64), dim=-1) for _ in range(2))
    return query, key, torch.randn(2, 4, length, 5, dtype=torch.float64)


def formula(query, key, value, keep, hyperplanes):
    """By the half angle, tan(θ / 2) = ‖q - k‖ / ‖q + k‖, in place of arccos."""
    half = torch.atan2(
        (query.unsqueeze(-2) - key.unsqueeze(-3)).norm(dim=-1), (query.unsqueeze(-2) + key.unsqueeze(-3)).norm(dim=-1)
    )
    return (1 - 2 * half / math.pi).pow(hyperplanes).masked_fill(~keep, 0.0) @ value


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
@pytest.mark.parametrize("hyperplanes", [1, 8])
def test_weights_and_gradients_are_those_of_the_angle(hyperplanes, kernel):
    tensors = inputs()
    keep = torch.rand(37, 37) > 0.3
    keep[5] = False
    results = []
    for attend in (
        lambda *of: regard.attention(
            *of, score=scores.Dot(), mask=keep, normalizer=normalizers.HashCollisions(hyperplanes), kernel=kernel
        ),
        lambda query, key, value: formula(query, key, value, keep, hyperplanes),
    ):
        leaves = [tensor.clone().requires_grad_() for tensor in tensors]
        output = attend(normalize(leaves[0], dim=-1), normalize(leaves[1], dim=-1), leaves[2])
        above = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
        results.append((output, *torch.autograd.grad(output, leaves, above)))
    torch.testing.assert_close(results[0], results[1], rtol=1e-9, atol=1e-11)
    assert not results[0][0][:, :, 5].any()


def test_they_are_the_chance_that_two_hashes_are_equal():
    """20,000 hashes of 3 bits: each count is within five deviations of a binomial distribution."""
    query, key, _ = (each[0, 0] for each in inputs(5))
    planes = torch.randn(20_000, 8, 3, dtype=torch.float64)
    equal = ((query @ planes > 0).unsqueeze(-2) == (key @ planes > 0).unsqueeze(-3)).all(-1).double().mean(0)
    chance = normalizers.HashCollisions(3).normalize((query @ key.mT)[None])[0][0]
    assert ((equal - chance).abs() < 5 * (chance * (1 - chance) / 20_000).sqrt() + 1e-9).all()


def test_a_vector_and_itself_have_weight_one_and_a_finite_gradient():
    rows = normalize(torch.randn(1, 2, 7, 8), dim=-1).requires_grad_()
    weights = lenses.Weights()
    told = {"score": scores.Dot(), "normalizer": normalizers.HashCollisions(8)}
    seen = regard.observe(rows, rows, rows, weights, **told)
    own = seen[weights].diagonal(dim1=-2, dim2=-1)
    # cos = 1 - ε leaves the angle √(2 ε), of some roundings of a sum of 8 products.
    assert (1 - own).abs().max() < 8 / math.pi * (2 * 16 * torch.finfo(torch.float32).eps) ** 0.5
    regard.attention(rows, rows, rows, **told).sum().backward()
    assert rows.grad is not None
    assert rows.grad.isfinite().all()


def test_parts_are_added_and_derivatives_are_right():
    query, key, value = inputs()
    normalizer = normalizers.HashCollisions(4)
    told = {"score": scores.Dot(), "normalizer": normalizer}
    parts = [regard.attention(query, key[:, :, of], value[:, :, of], **told) for of in (slice(9), slice(9, None))]
    torch.testing.assert_close(normalizer.merge(torch.stack(parts)), regard.attention(query, key, value, **told))
    leaves = [torch.randn(1, 2, 4, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    attend = lambda q, k, v: regard.attention(normalize(q, dim=-1), 0.9 * normalize(k, dim=-1), v, **told)  # noqa: E731
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_nan_reaches_the_rows_that_attend_to_it():
    query, key, value = inputs()
    key[0, 0, 30] = math.nan
    told = {"score": scores.Dot(), "normalizer": normalizers.HashCollisions(8), "mask": masks.causal()}
    found = regard.attention(query, key, value, **told)
    assert found[0, 0, 30:].isnan().all()
    assert found[0, 0, :30].isfinite().all()
    assert found[0, 1:].isfinite().all()


def test_what_has_no_meaning_is_refused():
    query, key, value = inputs()
    with pytest.raises(ConfigurationError, match="HashCollisions needs hyperplanes as a whole number of at least 1"):
        normalizers.HashCollisions(0)
    with pytest.raises(ConfigurationError, match="sinks has no meaning with normalizer=HashCollisions"):
        regard.attention(query, key, value, sinks=torch.zeros(4).double(), normalizer=normalizers.HashCollisions())
