"""Every rule finds its wrong example, and nothing that is wrong in its right one."""

import re
from pathlib import Path

import pytest

from regard.doctor import RULES, RuleSelection, Severity, diagnose

IMPORTS = """import math

import torch
import torch.nn.functional as F
from torch import nn


"""
EVERYTHING = RuleSelection()
MISTAKES = RuleSelection(least=Severity.WARNING)


def codes(source: str, selection: RuleSelection = EVERYTHING) -> list[str]:
    return [finding.code for finding in diagnose(IMPORTS + source, selection=selection)]


@pytest.mark.parametrize("code", RULES)
def test_the_wrong_example_is_found(code):
    assert code in codes(RULES[code].wrong)


@pytest.mark.parametrize("code", RULES)
def test_nothing_is_wrong_with_the_right_example(code):
    assert code not in codes(RULES[code].right)
    assert codes(RULES[code].right, MISTAKES) == []


@pytest.mark.parametrize("code", RULES)
def test_a_rule_is_described(code):
    rule = RULES[code]
    assert re.fullmatch(r"ATT[1-9]\d\d", code)
    assert rule.summary.endswith(".")
    assert len(rule.explanation) > len(rule.summary)
    assert re.search(r"https://", rule.source)
    compile(rule.wrong, "wrong", "exec")
    compile(rule.right, "right", "exec")


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("scores = scores + (1.0 - mask) * -10000.0", "ATT221"),
        ("scores = scores + -1e9 * (1 - mask)", "ATT221"),
        ("scores = torch.where(mask, scores, torch.tensor(-1e9))", "ATT221"),
        ("scores[mask == 0] = 0", "ATT205"),
        ("scores.masked_fill_(mask, -1e-9)", "ATT205"),
        ("scores *= mask", "ATT206"),
    ],
)
def test_spellings_of_a_wrong_mask(line, code):
    source = f"def f(q, k, v, mask):\n    scores = q @ k.mT / 8\n    {line}\n    return scores.softmax(-1) @ v\n"
    assert codes(source, MISTAKES) == [code]


def test_the_page_lists_every_rule():
    page = (Path(__file__).parents[2] / "docs" / "doctor.md").read_text("utf-8")
    for rule in RULES.values():
        assert f"| `{rule.code}` | {rule.severity.value} | {rule.summary} |" in page
