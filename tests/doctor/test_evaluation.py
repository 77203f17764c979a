"""How many of the planted mistakes the static half of the doctor finds, and that it finds none in correct code."""

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from regard.doctor import RuleSelection, Severity, diagnose
from regard.doctor.finding import CodeFinding

PLANTED = Path(__file__).parent / "planted"
MISTAKES: list[dict[str, Any]] = tomllib.loads((PLANTED / "mistakes.toml").read_text())["mistake"]
CORRECT = sorted((PLANTED / "correct").glob("*.py"))
WARNINGS = RuleSelection(least=Severity.WARNING)
NEAR = 3
"""Lines between a mistake and a finding of it."""
FLOOR = 66
"""Planted mistakes that static findings name; raised with the rules, never lowered."""

KINDS = {
    "polarity": ("ATT201", "ATT208"),
    "polarity/0-1 float": ("ATT202",),
    "no scale": ("ATT101",),
    "double scale": ("ATT102",),
    "wrong scale": ("ATT103",),
    "wrong scale dim": ("ATT104",),
    "zero scale": ("ATT106",),
    "scale after softmax": ("ATT105",),
    "softmax axis": ("ATT111", "ATT112"),
    "softmax of size 1": ("ATT111", "ATT113"),
    "softmax in half precision": ("ATT311",),
    "linear denominator": ("ATT114",),
    "causal with cache": ("ATT211", "ATT213"),
    "prefill unmasked": ("ATT212", "ATT213"),
    "causal dropped": ("ATT214", "ATT231"),
    "no causal mask": ("ATT231", "ATT252"),
    "future leak": ("ATT206", "ATT207", "ATT215"),
    "finite mask beaten": ("ATT221", "ATT205"),
    "fp16 mask value": ("ATT221", "ATT223"),
    "masked rows NaN": ("ATT203", "ATT204", "ATT222"),
    "mask after softmax": ("ATT207",),
    "mask broadcast axis": ("ATT209",),
    "mask per head order": ("ATT405",),
    "mask not registered": ("ATT241",),
    "mask thrown away": ("ATT251", "ATT252"),
    "cross mask": ("ATT232", "ATT252"),
    "documents": ("ATT242",),
    "window not applied": ("ATT251", "ATT252"),
    "softcap dropped": ("ATT251", "ATT252"),
    "dropout in eval": ("ATT301", "ATT303"),
    "dropout off for ever": ("ATT302",),
    "heads mixed": ("ATT401", "ATT402"),
    "GQA order": ("ATT403",),
    "batch as sequence": ("ATT404",),
    "keys repeated": ("ATT607",),
    "RoPE pairs": ("ATT507",),
    "RoPE axis": ("ATT508",),
    "RoPE precision": ("ATT503", "ATT509"),
    "rotary to the values": ("ATT501",),
    "rotary with cache": ("ATT502",),
    "ALiBi": ("ATT505", "ATT506"),
    "no positions": ("ATT504",),
    "no cache": ("ATT511",),
    "Python loop": ("ATT601",),
    "need_weights": ("ATT602",),
    "fast path": ("ATT603",),
    "flex not compiled": ("ATT604",),
    "block mask per step": ("ATT605",),
    "causal buffer per layer": ("ATT606",),
}
"""The codes that name a kind of mistake; kinds that are not here have no static rule."""


def findings() -> dict[str, list[CodeFinding]]:
    return {path.name: diagnose(path.read_text(), selection=WARNINGS) for path in sorted(PLANTED.glob("*.py"))}


def named(mistake: dict[str, Any], found: list[CodeFinding]) -> list[CodeFinding]:
    """The findings of the right kind near a mistake."""
    codes = KINDS.get(mistake["kind"], ())
    return [one for one in found if one.code in codes and abs(one.line - mistake["line"]) <= NEAR]


def missed() -> list[tuple[str, int, str]]:
    found = findings()
    return [(one["file"], one["line"], one["kind"]) for one in MISTAKES if not named(one, found[one["file"]])]


def test_planted_mistakes_are_found() -> None:
    assert len(MISTAKES) - len(missed()) >= FLOOR


def test_the_page_lists_what_is_missed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor-evaluation.md").read_text("utf-8")
    listed = set(re.findall(r"`([a-z_]+\.py):(\d+)`", page.partition("## Missed")[2].partition("\n## ")[0]))
    assert listed == {(name, str(line)) for name, line, _ in missed()}


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: path.name)
def test_nothing_is_wrong_in_correct_code(path: Path) -> None:
    assert [str(one) for one in diagnose(path.read_text(), selection=WARNINGS)] == []
