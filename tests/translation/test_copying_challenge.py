"""The challenge set of copying is what its recipe makes."""

import importlib.util
from pathlib import Path

import pytest

RECIPE = Path(__file__).parents[2] / "recipes" / "copying_challenge.py"


@pytest.fixture(scope="module")
def recipe():
    spec = importlib.util.spec_from_file_location("copying_challenge", RECIPE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_file_has_the_300_lines_of_the_recipe(recipe):
    found = [line.split("\t") for line in recipe.SET.read_text("utf-8").splitlines()]
    assert found == [[kind, line, " | ".join(values)] for kind, line, values in recipe.lines()]
    assert len({line for _, line, _ in found}) == 300
    assert all(value in line for _, line, values in found for value in values.split(" | "))


@pytest.mark.parametrize(
    ("translation", "held"),
    [
        ("J'ai 17 livres, pas 1,299.99.", True),
        ("J'ai 17 livres, pas 11,299.99.", False),
        ("J'ai 170 livres, pas 1,299.99.", False),
        ("J'ai dix-sept livres, pas 1,299.99.", False),
        ("I have 17 books, not 1,299.99.", False),  # no translation at all
    ],
)
def test_a_translation_holds_whole_values(recipe, translation, held):
    assert recipe.holds(translation, "I have 17 books, not 1,299.99.", ["17", "1,299.99"]) is held
