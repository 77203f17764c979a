"""Prices of units are data: each is used, says what it is of and who measures it, and can be fitted to times."""

import sys
from pathlib import Path

import pytest
import torch

import regard
from regard import masks
from regard.kernels.planning.choice import kernels_of
from regard.kernels.planning.rates import predicted_seconds
from regard.kernels.planning.unit_prices import at_another_price, held_prices, price
from regard_command import unit_fit
from regard_command.kernel_choices import Choice, GridProblem

COMMANDS = (
    "regard bench --units",
    "none: by hand, from benchmarks/grid.py",
    "none: by hand, from benchmarks/every_mechanism.py",
    "none yet",
)


def constants_of(name: str) -> list[str]:
    """The constants of modules that are a price."""
    return [
        f"{module_name}.{constant}"
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("regard.kernels")
        for constant, found in list(vars(module).items())
        if found is price(name)
    ]


@pytest.mark.parametrize("name", held_prices())
def test_each_price_is_used_and_says_what_it_is_of_and_who_measures_it(name):
    held = held_prices()[name]
    stem, constant = name.split(".")
    assert [place for place in constants_of(name) if place.endswith(f".{stem}.{constant.upper()}")]
    assert held["value"] > 0
    assert len(held["of"]) > 20
    assert held["command"] in COMMANDS


def test_a_price_is_another_within_the_block_alone():
    query = torch.zeros(1, 8, 700, 64)
    problem = regard.explain(query, query, query, mask=masks.causal()).problem
    kernel = next(each for each in kernels_of(problem) if each.name == "tiled")
    before = predicted_seconds(kernel.cost(problem), problem)
    with at_another_price("unit_costs.tilewise", 100.0):
        assert predicted_seconds(kernel.cost(problem), problem) > 2 * before
    assert predicted_seconds(kernel.cost(problem), problem) == before


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_times_that_another_price_made_give_it_back(factor, monkeypatch):
    monkeypatch.setattr(unit_fit, "DOUBT", 1e-3)
    name, choices = "unit_costs.tilewise", []
    for length in (300, 700, 1500):
        problem = GridProblem("causal", 1, 4, 4, length, length, 64, torch.float32, training=False)
        posed = regard.explain(*problem.tensors(), **problem.options()).problem
        kernel = next(each for each in kernels_of(posed) if each.name == "tiled")
        with at_another_price(name, factor * price(name)):
            seconds = predicted_seconds(kernel.cost(posed), posed)
        choices.append(Choice(problem, "tiled", {"tiled": seconds}, {}))
    found = {row.name: row for row in unit_fit.fitted_prices(choices)}
    assert found[name].fitted / found[name].used == pytest.approx(factor, rel=0.1)
    assert found[name].measurements == 3
    assert found["flex.calls"].fitted == found["flex.calls"].used
    assert found["flex.calls"].measurements == 0


def test_the_file_of_prices_is_shipped():
    assert (Path(regard.__file__).parent / "kernels" / "planning" / "unit_prices.json").is_file()
