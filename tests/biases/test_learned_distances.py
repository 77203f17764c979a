"""KERPLE and FIRE against their formulas in float64, with the gradients of their parameters."""

import sys
from typing import Any

import pytest
import torch

import regard
from regard import biases, masks
from regard.core.grid import Grid
from regard.errors import DtypeError, ShapeError


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def away(queries, keys):
    return (torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None]).abs()


def kerple_log(queries, keys, slopes, rates):
    return -slopes[:, None, None] * torch.log(1 + rates[:, None, None] * away(queries, keys))


def kerple_power(queries, keys, slopes, powers):
    far = away(queries, keys)
    raised = far.clamp(min=1) ** powers[:, None, None]
    return -slopes[:, None, None] * torch.where(far == 0, 0.0, raised)


def fire(queries, keys, hidden_weight, hidden_bias, output_weight, output_bias, rate, threshold):
    def psi(x):
        return torch.log(1 + rate.abs() * x)

    position = torch.arange(keys - queries, keys, dtype=torch.float64)[:, None]
    share = psi(away(queries, keys)) / (psi(torch.maximum(position, threshold.abs())) + 1e-6)
    hidden = torch.relu(share[..., None] * hidden_weight + hidden_bias)  # [M, N, F]
    return torch.einsum("mnf,hf->hmn", hidden, output_weight) + output_bias[:, None, None]


def fire_bias(*tensors):
    *weights, rate, threshold = tensors
    return biases.fire(*weights, rate=rate, threshold=threshold)


CASES = {
    "kerple_log": (biases.kerple_log, kerple_log, [drawn(4).abs(), drawn(4, seed=1).abs()]),
    "kerple_power": (biases.kerple_power, kerple_power, [drawn(4).abs(), drawn(4, seed=1).sigmoid()]),
    "fire": (
        fire_bias,
        fire,
        [drawn(8), drawn(8, seed=1), drawn(4, 8, seed=2), drawn(4, seed=3), torch.tensor(0.3), torch.tensor(20.0)],
    ),
}


NUMBERS: dict[str, Any] = {"rate": 1.0, "threshold": 2.0}


@pytest.mark.parametrize("kernel", ["reference", "tiled", None])
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_formula(name, kernel):
    make, formula, parameters = CASES[name]
    query, key, value = drawn(2, 4, 37, 8, seed=5), drawn(2, 2, 53, 8, seed=6), drawn(2, 2, 53, 8, seed=7)
    ours, theirs = ([each.double().clone().requires_grad_() for each in parameters] for _ in range(2))
    output = regard.attention(query, key, value, bias=make(*ours), mask=masks.causal(), kernel=kernel)
    scores = 8**-0.5 * query @ key.repeat_interleave(2, 1).mT + formula(37, 53, *theirs)
    keep = torch.ones(37, 53).tril(53 - 37).bool()
    expected = scores.masked_fill(~keep, float("-inf")).softmax(-1) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(output, expected)
    for mine, exact in zip(
        torch.autograd.grad(output.square().sum(), ours),
        torch.autograd.grad(expected.square().sum(), theirs),
        strict=True,
    ):
        torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_tiles_are_parts_of_the_whole(name):
    make, _, parameters = CASES[name]
    grid = Grid.from_lengths(37, 53)
    whole = make(*parameters).evaluate(grid)
    part = make(*parameters).evaluate(grid.tile(slice(5, 20), slice(30, 41)))
    torch.testing.assert_close(part, whole[..., 5:20, 30:41])


def test_a_power_of_one_is_alibi():
    slopes = torch.tensor([0.5, 0.25])
    grid = Grid.from_lengths(7, 11)
    found = biases.kerple_power(slopes, torch.ones(2)).values(grid)
    torch.testing.assert_close(found, biases.alibi(slopes).values(grid))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: biases.kerple_log(torch.ones(2).long(), torch.ones(2)), DtypeError, "needs floating-point slopes"),
        (lambda: biases.kerple_log(torch.ones(2), torch.ones(3)), ShapeError, "slopes and rates .* of the same heads"),
        (lambda: biases.kerple_power(torch.ones(2, 1), torch.ones(2)), ShapeError, "slopes and powers"),
        (
            lambda: biases.fire(*[torch.ones(3)] * 4, rate=torch.ones(()), threshold=torch.ones(())),
            ShapeError,
            r"output_weight of the shape \(3, 3\)",
        ),
        (
            lambda: biases.fire(torch.ones(3), torch.ones(3), torch.ones(2, 3), torch.ones(2), **NUMBERS),
            DtypeError,
            "floating-point rate; it is a float",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_hidden_features_of_fire_in_parts_are_those_together(monkeypatch):
    torch.manual_seed(0)
    shapes = ((8,), (8,), (3, 8), (3,), (), ())
    parameters = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    bias = biases.fire(*parameters[:4], rate=parameters[4], threshold=parameters[5])
    grid = Grid.from_lengths(37, 53)
    together = bias.values(grid)
    monkeypatch.setattr(sys.modules["regard.biases.fire"], "MOST_HIDDEN", 3 * 37 * 53)  # its name is a function, too
    torch.testing.assert_close(bias.values(grid), together, rtol=1e-12, atol=1e-12)
