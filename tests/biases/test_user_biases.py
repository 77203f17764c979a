"""Biases defined by users: errors name the bias."""

from dataclasses import dataclass

import pytest
import torch

import regard
from regard import biases
from regard.core.grid import Grid
from regard.errors import ConfigurationError


@dataclass(frozen=True)
class Divides(biases.Bias):
    def values(self, grid):
        return (grid.query % grid.key).float()


@dataclass(frozen=True, repr=False)
class Returns(biases.Bias):
    result: object

    def values(self, grid):
        return self.result

    def __repr__(self):
        return "Returns()"


@pytest.mark.parametrize("kernel", [None, "reference", "tiled", "sdpa"])
@pytest.mark.parametrize("length", [5, 200])
def test_a_bias_that_fails_names_itself(kernel, length):
    query = torch.randn(1, 2, length, 4)
    for bias in (Divides(), Divides() + biases.alibi(2)):
        with pytest.raises(ConfigurationError, match=r"^Divides\(\) cannot be evaluated: RuntimeError: ZeroDivision"):
            regard.attention(query, query, query, bias=bias, kernel=kernel)


@pytest.mark.parametrize(
    ("result", "has"),
    [
        (torch.zeros(5, 5, dtype=torch.int64), r"torch.int64 of shape \(5, 5\)"),
        (torch.zeros(4, 5), r"torch.float32 of shape \(4, 5\)"),
        (torch.zeros(3), r"torch.float32 of shape \(3,\)"),
        (0.0, "a float"),
    ],
)
def test_a_wrong_result_names_the_bias(result, has):
    for bias in (Returns(result), Returns(result) + torch.zeros(5, 5)):
        with pytest.raises(ConfigurationError, match=rf"^Returns\(\): values returned {has} for 5 queries and 5"):
            bias.evaluate(Grid.from_lengths(5, 5))
        with pytest.raises(ConfigurationError, match=rf"^Returns\(\): values returned {has} for "):
            regard.attention(torch.zeros(5, 4), torch.zeros(5, 4), torch.zeros(5, 4), bias=bias)


def test_a_number_without_axes_is_for_all_pairs():
    assert Returns(torch.tensor(2.0)).evaluate(Grid.from_lengths(2, 3)).shape == (1, 1)
