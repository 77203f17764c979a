"""SOFT: against its three factors written out in float64, and the whole Gaussian kernel."""

import pytest
import torch

from regard.approximations import segment_means, soft_attention
from regard.errors import ConfigurationError, ShapeError


def kernel(rows, columns):
    return (-(rows.unsqueeze(-2) - columns.unsqueeze(-3)).square().sum(-1) / (2 * rows.shape[-1] ** 0.5)).exp()


def formula(query, value, landmarks):
    means = segment_means(query, landmarks)
    return kernel(query, means) @ torch.linalg.inv(kernel(means, means)) @ kernel(means, query) @ value


@pytest.mark.parametrize("length", [5, 37, 131])
def test_it_is_three_factors(length):
    query, value = (torch.randn(2, 3, length, dim, dtype=torch.float64, requires_grad=True) for dim in (7, 5))
    results = soft_attention(query, value, landmarks=5, iterations=30), formula(query, value, 5)
    torch.testing.assert_close(*results)
    above = torch.randn_like(results[0])
    ours, theirs = (torch.autograd.grad(each, (query, value), above) for each in results)
    torch.testing.assert_close(ours, theirs)


def test_a_landmark_for_each_token_is_the_whole_kernel():
    query, value = torch.randn(2, 3, 11, 7, dtype=torch.float64), torch.randn(2, 3, 11, 5, dtype=torch.float64)
    found = soft_attention(query, value, landmarks=11, iterations=60)
    torch.testing.assert_close(found, kernel(query, query) @ value, rtol=1e-6, atol=1e-6)


def test_far_from_the_origin_groups_no_tokens_and_half_precision():
    query, value = torch.randn(2, 4, 37, 8), torch.randn(2, 2, 37, 5)
    whole = value.repeat_interleave(2, 1)
    for dtype, roundings in ((torch.float32, 64), (torch.bfloat16, 1)):
        low = query.to(dtype), value.to(dtype)
        exact = formula(low[0].double(), low[1].double().repeat_interleave(2, 1), 5)
        found = soft_attention(*low, landmarks=5)
        assert found.dtype is dtype
        assert (found - exact).abs().max() < roundings * torch.finfo(dtype).eps * exact.abs().max()
    found = soft_attention(query + 100, value, landmarks=5)
    exact = formula((query + 100).double(), whole.double(), 5)
    # Coordinates of 100 have roundings of 100 eps, and distances change by some of them.
    assert (found - exact).abs().max() < 100 * 64 * torch.finfo(torch.float32).eps * exact.abs().max()
    assert soft_attention(query[:, :, :0], value[:, :, :0], landmarks=5).shape == (2, 4, 0, 5)


def test_bad_arguments_are_named():
    query = torch.randn(2, 3, 11, 7)
    with pytest.raises(ConfigurationError, match="landmarks is 0; it needs"):
        soft_attention(query, query, landmarks=0)
    with pytest.raises(ShapeError, match="10"):
        soft_attention(query, query[:, :, :10], landmarks=5)
