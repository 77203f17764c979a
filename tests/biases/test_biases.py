import math

import pytest
import torch

import regard
from regard import biases
from regard.core.grid import Grid
from regard.errors import ConfigurationError, DtypeError, ShapeError


def test_gaussian_is_the_formula():
    center, sigma = torch.tensor([0.5, 2.0]), torch.tensor([1.0, 0.25])
    values = biases.gaussian(center, sigma).values(Grid.from_lengths(2, 4))
    for i in range(2):
        for s in range(4):
            assert values[i, s].item() == pytest.approx(-((s - center[i]) ** 2) / (2 * sigma[i] ** 2))


def test_gaussian_multiplies_the_weights():
    query, key, value = torch.randn(2, 4), torch.randn(5, 4), torch.eye(5)
    center = torch.tensor([1.5, 3.0])
    weights = regard.attention(query, key, value)
    bell = torch.exp(-((torch.arange(5) - center[:, None]) ** 2) / (2 * 0.7**2))
    expected = weights * bell / (weights * bell).sum(-1, keepdim=True)
    output = regard.attention(query, key, value, bias=biases.gaussian(center, 0.7))
    torch.testing.assert_close(output, expected)


def test_gaussian_sees_positions():
    values = biases.gaussian(10.0, 1.0).values(Grid.from_lengths(1, 2, key_positions=torch.tensor([10, 12])))
    assert values.tolist() == [[0.0, -2.0]]


def test_gaussian_per_head_and_batch():
    center = torch.rand(2, 3, 4) * 5
    bias = biases.gaussian(center, 1.0)
    query, key = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 6, 8)
    output = regard.attention(query, key, key, bias=bias)
    alone = regard.attention(query[1, 2], key[1, 2], key[1, 2], bias=biases.gaussian(center[1, 2], 1.0))
    torch.testing.assert_close(output[1, 2], alone)
    tile = bias.values(Grid.from_lengths(4, 6).tile(slice(1, 3), slice(2, 5)))
    assert tile.equal(bias.values(Grid.from_lengths(4, 6))[..., 1:3, 2:5])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gaussian_keeps_far_positions_apart_in_half_precision(dtype):
    center = torch.tensor([1024.0], dtype=dtype)
    at = torch.arange(1020, 1029)
    values = biases.gaussian(center, torch.ones(1, dtype=dtype)).values(Grid.from_lengths(1, 9, key_positions=at))
    assert values.tolist() == [[-((s - 1024) ** 2) / 2 for s in at.tolist()]]


def test_gradients_flow_into_center_and_sigma():
    query, key, value = (torch.randn(2, 3, m, 4).double() for m in (4, 5, 5))
    center = (torch.rand(2, 3, 4).double() * 5).requires_grad_()
    sigma = (torch.rand(2, 3, 4).double() + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda c, s: regard.attention(query, key, value, bias=biases.gaussian(c, s)), (center, sigma)
    )


def test_a_sum_of_biases():
    one, other = torch.randn(4, 5), torch.randn(3, 1, 5)
    both = biases.tensor(one) + biases.tensor(other)
    assert both.values(Grid.from_lengths(4, 5)).equal(one + other)
    assert repr(both) == "tensor(<float32 (4, 5)>) + tensor(<float32 (3, 1, 5)>)"
    grid = Grid.from_lengths(4, 5).tile(slice(0, 2), slice(3, 5))
    assert (biases.tensor(one) + other).values(grid).equal((one + other)[..., 0:2, 3:5])


def test_a_sum_that_does_not_broadcast():
    both = biases.tensor(torch.zeros(2, 1, 4, 5)) + biases.tensor(torch.zeros(3, 1, 4, 5))
    with pytest.raises(ShapeError, match=r"has the shape \(2, 1, 4, 5\) and .* \(3, 1, 4, 5\) .*they do not broadcast"):
        both.values(Grid.from_lengths(4, 5))


def test_reprs():
    assert repr(biases.tensor(torch.zeros(3).half())) == "tensor(<float16 (1, 3)>)"
    assert repr(biases.gaussian(torch.zeros(2, 3), 1.0)) == "gaussian(center=<(2, 3)>, sigma=<()>)"


@pytest.mark.parametrize(
    ("wrong", "has"),
    [
        (torch.zeros(2).int(), "torch.int32"),
        (torch.zeros(2).bool(), "torch.bool"),
        ([0.0], "a list"),
        (None, "None"),
    ],
)
def test_a_bias_is_floating_point(wrong, has):
    match = rf"a bias needs a floating-point tensor; this is {has}.*mask=masks.where\(keep=...\)"
    with pytest.raises(DtypeError, match=match):
        biases.tensor(wrong)
    with pytest.raises(DtypeError, match=match):
        _ = biases.tensor(torch.zeros(2)) + wrong


@pytest.mark.parametrize("sigma", [0.0, -1.0, torch.tensor([1.0, 0.0])])
def test_sigma_is_above_zero(sigma):
    with pytest.raises(ConfigurationError, match="gaussian needs sigma above 0; its smallest here is"):
        biases.gaussian(0.0, sigma)


@pytest.mark.parametrize(("center", "sigma", "named"), [(0.0, math.nan, "sigma is nan"), ("1", 1.0, "center is '1'")])
def test_center_and_sigma_are_finite_numbers(center, sigma, named):
    with pytest.raises(
        ConfigurationError, match=f"{named}; gaussian needs a finite number, or a tensor for the queries"
    ):
        biases.gaussian(center, sigma)
