"""Pairs of a mistake and its right twin, most from public fixes, written before their author had read a rule.

At the first run the static half named 12 of the 29 in torch, none of the 6 of other frameworks, which it did not read,
and reported no error in a right twin.
"""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from regard_doctor import RuleSelection, Severity, diagnose

FOLDER = Path(__file__).parent / "planted_pairs"
PAIRS: list[dict[str, Any]] = tomllib.loads((FOLDER / "mistakes.toml").read_text())["mistake"]
RIGHT_WITH_A_WARNING = {"text_tower.py": ["ATT606"]}
"""A buffer of a causal mask in each layer costs memory in the right twin too."""


def right_twin(pair: dict[str, Any]) -> str:
    source = (FOLDER / pair["file"]).read_text()
    for old, new in pair["mended"]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


def test_most_are_public() -> None:
    assert len(PAIRS) == 35
    assert sum(pair["source"].startswith("https://github.com/") for pair in PAIRS) >= 30
    assert len({pair["file"] for pair in PAIRS}) == 35


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair["file"])
def test_the_mistake_is_found_and_nothing_in_its_right_twin(pair: dict[str, Any]) -> None:
    twin = diagnose(right_twin(pair), path=pair["file"])
    assert [one.code for one in twin if one.severity is not Severity.HINT] == RIGHT_WITH_A_WARNING.get(pair["file"], [])
    wrong = (FOLDER / pair["file"]).read_text()
    assert {one.code for one in diagnose(wrong, path=pair["file"])} - {one.code for one in twin}


def test_how_many_are_more_than_hints() -> None:
    least = RuleSelection(least=Severity.WARNING)
    found = [pair for pair in PAIRS if diagnose((FOLDER / pair["file"]).read_text(), selection=least)]
    assert len(found) >= 34
