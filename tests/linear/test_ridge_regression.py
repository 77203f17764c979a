"""MesaNet: what conjugate gradients over linear attention find, against a solve for each step in float64."""

from typing import Any

import pytest
import torch

from regard.errors import ConfigurationError, ShapeError
from regard.linear import mesa_attention


def inputs(length=37, heads=3) -> dict[str, Any]:
    def drawn(*shape):
        return torch.randn(2, heads, length, *shape, dtype=torch.float64)

    return {
        "query": drawn(7),
        "key": torch.nn.functional.normalize(drawn(7), dim=-1),
        "value": drawn(5),
        "ridge": torch.rand(heads, 7, dtype=torch.float64) + 0.25,
        "beta": drawn().sigmoid(),
        "decay": -drawn().exp() / 8,
    }


def by_steps(query, key, value, ridge, beta, decay):
    products = key.new_zeros(*key.shape[:2], 7, 7)
    sums, rows = key.new_zeros(*key.shape[:2], 7, 5), []
    for t in range(key.shape[2]):
        fade, written = decay[:, :, t, None, None].exp(), beta[:, :, t, None, None] * key[:, :, t, :, None]
        products = fade * products + written * key[:, :, t, None]
        sums = fade * sums + written * value[:, :, t, None]
        solved = torch.linalg.solve(products + torch.diag_embed(ridge), query[:, :, t])
        rows.append((solved.unsqueeze(-2) @ sums).squeeze(-2))
    return torch.stack(rows, 2)


@pytest.mark.parametrize("length", [1, 6, 7, 8, 37, 64, 65, 131])  # of 7 dims
def test_it_solves_each_system(length):
    given = inputs(length)
    with torch.no_grad():
        torch.testing.assert_close(mesa_attention(**given), by_steps(**given))
    leaves = [tensor.requires_grad_() for tensor in given.values()]
    results = mesa_attention(**given), by_steps(**given)
    torch.testing.assert_close(*results)
    upstream = torch.randn_like(results[0])
    for one, other in zip(*(torch.autograd.grad(each, leaves, upstream) for each in results), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("ridge", [1.0, 2.0**-8])
def test_few_positions_in_float32(ridge):
    given: dict[str, Any] = {name: each.float() for name, each in inputs(7).items()}
    given["ridge"] = torch.full((3, 7), ridge)
    exact = by_steps(**{name: each.double() for name, each in given.items()})
    # Rounded numbers are solutions of systems a rounding away, by the condition of the matrix, at most (1 + 7) / ridge.
    budget = 7 * torch.finfo(torch.float32).eps * (8 / ridge) * exact.abs().max()
    assert (mesa_attention(**given) - exact).abs().max() < budget


@pytest.mark.parametrize("length", [5, 37, 67])
@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_no_number_reaches_no_position_before_it(name, length):
    given = inputs(length)
    clean = mesa_attention(**given)
    given[name][:, :, 3] = torch.nan
    found = mesa_attention(**given)
    torch.testing.assert_close(found[:, :, :3], clean[:, :, :3])
    assert bool(found[:, :, 3].isnan().any(-1).all())


def test_fewer_iterations_are_nearer_the_further_they_go():
    given = inputs(131)
    exact = by_steps(**given)
    errors = [(mesa_attention(**given, iterations=count) - exact).norm().item() for count in (1, 2, 4, 8)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 1e-2 > 1e-6 > errors[-1]


def test_one_head_no_tokens_and_half_precision():
    given = inputs(heads=1)
    alone = {name: each if name == "ridge" else each[0, 0] for name, each in given.items()}
    torch.testing.assert_close(mesa_attention(**alone), by_steps(**given)[0, 0])
    low = {name: each.bfloat16() for name, each in given.items()}
    exact = by_steps(**{name: each.double() for name, each in low.items()})
    found = mesa_attention(**low)
    assert found.dtype is torch.bfloat16
    assert (found - exact).abs().max() < torch.finfo(torch.bfloat16).eps * exact.abs().max()
    assert mesa_attention(**inputs(0)).shape == (2, 3, 0, 5)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"ridge": torch.zeros(3, 7)}, ConfigurationError, "ridge has values down to 0; it needs values above 0"),
        ({"ridge": torch.ones(2, 7)}, ShapeError, r"ridge has the shape \(2, 7\); it needs \(3, 7\)"),
        ({"beta": -torch.ones(2, 3, 37)}, ConfigurationError, "beta has values from -1 to -1; it needs values of at l"),
        ({"iterations": 0}, ConfigurationError, "iterations is 0; it needs a number of at least 1"),
        ({"query": torch.ones(2, 6, 37, 7).double()}, ShapeError, "they need the same heads and positions"),
    ],
)
def test_bad_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        mesa_attention(**{**inputs(), **change})
