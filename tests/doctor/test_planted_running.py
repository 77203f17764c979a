"""How many of the planted mistakes `examine` finds, each by itself and not without it, and both halves together."""

import pytest

pytest.importorskip("transformers")

from planted_models import MODELS, PlantedModel, examined, named
from test_evaluation import MISTAKES, missed
from test_planted import PLANTED, needs_what_it_imports

pytestmark = pytest.mark.usefixtures("own_registrations")

RUNNING = frozenset((entry.file, line) for entry in MODELS for line in entry.lines)
"""Mistakes that the running half finds: each of them is a case of the test below."""
FLOOR, FLOOR_TOGETHER = 89, 116


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        pytest.param(
            entry, line, id=f"{entry.file}:{line}", marks=[pytest.mark.slow] * (entry.file == "flex_patterns.py")
        )
        for entry in MODELS
        for line in entry.lines
    ],
)
def test_a_mistake_is_found_where_it_is_and_not_where_it_is_mended(entry: PlantedModel, line: int) -> None:
    needs_what_it_imports((PLANTED / entry.file).read_text())
    assert named(entry, line, examined(entry, line, (line, *entry.beside)))
    assert not named(entry, line, examined(entry, line, entry.beside))


def test_entries_are_of_planted_mistakes() -> None:
    planted = {(one["file"], one["line"]) for one in MISTAKES}
    assert planted >= RUNNING
    assert len(RUNNING) >= FLOOR


def test_both_halves_together_find_nine_of_ten() -> None:
    by_neither = {(name, line) for name, line, _ in missed()} - RUNNING
    assert len(MISTAKES) - len(by_neither) >= FLOOR_TOGETHER
    assert 9 * len(MISTAKES) <= 10 * FLOOR_TOGETHER
