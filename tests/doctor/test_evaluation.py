"""How many of the planted mistakes the static half of the doctor finds, and that it finds none in correct code."""

import ast
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from regard.doctor import RuleSelection, Severity, diagnose
from regard_doctor.finding import CodeFinding

PLANTED = Path(__file__).parent / "planted"
BLIND = Path(__file__).parent / "planted_blind"
MISTAKES: list[dict[str, Any]] = tomllib.loads((PLANTED / "mistakes.toml").read_text())["mistake"]
CORRECT = sorted((PLANTED / "correct").glob("*.py"))
EVERYTHING, WARNINGS = RuleSelection(), RuleSelection(least=Severity.WARNING)
NEAR = 3
"""Lines between a mistake and a finding of it."""
FLOOR, BLIND_FLOOR = 109, 40
"""Mistakes that static findings name, of both sets; raised with the rules, never lowered."""
FLOOR_OF_WARNINGS, BLIND_FLOOR_OF_WARNINGS = 104, 36
"""Those of them that errors and warnings name; the others are hints."""

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
    "no causal mask": ("ATT231", "ATT233", "ATT252"),
    "future leak": ("ATT206", "ATT207", "ATT215", "ATT218"),
    "finite mask beaten": ("ATT221", "ATT205"),
    "fp16 mask value": ("ATT221", "ATT223"),
    "masked rows NaN": ("ATT203", "ATT204", "ATT222", "ATT224"),
    "mask after softmax": ("ATT207",),
    "mask broadcast axis": ("ATT209",),
    "mask per head order": ("ATT405",),
    "mask not registered": ("ATT241",),
    "mask thrown away": ("ATT251", "ATT252"),
    "cross mask": ("ATT232", "ATT252"),
    "documents": ("ATT217", "ATT242"),
    "window not applied": ("ATT216", "ATT251", "ATT252"),
    "window cache": ("ATT515",),
    "cache unmasked": ("ATT513",),
    "position with cache": ("ATT512",),
    "left padding": ("ATT243",),
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
    "ALiBi": ("ATT505", "ATT506", "ATT514"),
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


def findings(folder: Path = PLANTED, selection: RuleSelection = EVERYTHING) -> dict[str, list[CodeFinding]]:
    return {path.name: diagnose(path.read_text(), selection=selection) for path in sorted(folder.glob("*.py"))}


def blind_mistakes() -> list[dict[str, Any]]:
    """The second set, with the line of each mistake."""
    mistakes = tomllib.loads((BLIND / "mistakes.toml").read_text())["mistake"]
    for one in mistakes:
        lines = (BLIND / one["file"]).read_text().splitlines()
        (one["line"],) = (number for number, line in enumerate(lines, 1) if one["at"] in line)
    return mistakes


def named(mistake: dict[str, Any], found: list[CodeFinding]) -> list[CodeFinding]:
    """The findings of the right kind near a mistake."""
    codes = KINDS.get(mistake["kind"], ())
    return [one for one in found if one.code in codes and abs(one.line - mistake["line"]) <= NEAR]


def unit(path: Path, line: int) -> str:
    """The class or function at the top level of a file in which a line is."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.lineno <= line <= (node.end_lineno or 0):
            return node.name
    return ""


def matched(
    folder: Path, mistakes: list[dict[str, Any]], selection: RuleSelection = EVERYTHING
) -> list[tuple[dict[str, Any], CodeFinding | None]]:
    """Each mistake and the finding that names it, near it or in the same class or function; a finding counts once."""
    found, taken, near = findings(folder, selection), set(), {}
    for index, one in enumerate(mistakes):
        for finding in named(one, found[one["file"]]):
            taken.add(id(finding))
            near[index] = finding
    for index, one in enumerate(mistakes):
        path, codes = folder / one["file"], KINDS.get(one["kind"], ())
        for finding in found[one["file"]] if index not in near else ():
            inside = unit(path, one["line"]) and unit(path, finding.line) == unit(path, one["line"])
            if finding.code in codes and inside and id(finding) not in taken:
                taken.add(id(finding))
                near[index] = finding
                break
    return [(one, near.get(index)) for index, one in enumerate(mistakes)]


def missed(folder: Path = PLANTED, mistakes: list[dict[str, Any]] = MISTAKES) -> list[tuple[str, int, str]]:
    return [(one["file"], one["line"], one["kind"]) for one, finding in matched(folder, mistakes) if finding is None]


def test_planted_mistakes_are_found() -> None:
    assert len(MISTAKES) - len(missed()) >= FLOOR


def test_how_many_are_more_than_hints() -> None:
    assert sum(one is not None for _, one in matched(PLANTED, MISTAKES, WARNINGS)) >= FLOOR_OF_WARNINGS
    assert sum(one is not None for _, one in matched(BLIND, blind_mistakes(), WARNINGS)) >= BLIND_FLOOR_OF_WARNINGS


def test_mistakes_of_the_second_set_are_found() -> None:
    mistakes = blind_mistakes()
    assert len(mistakes) - len(missed(BLIND, mistakes)) >= BLIND_FLOOR


def test_the_page_lists_what_is_missed() -> None:
    page = (Path(__file__).parents[2] / "docs" / "doctor-evaluation.md").read_text("utf-8")
    listed = set(re.findall(r"`([a-z_]+\.py):(\d+)`", page.partition("## Missed")[2].partition("\n## ")[0]))
    assert listed == {(name, str(line)) for name, line, _ in missed()}


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: path.name)
def test_nothing_is_wrong_in_correct_code(path: Path) -> None:
    assert [str(one) for one in diagnose(path.read_text(), selection=WARNINGS)] == []
