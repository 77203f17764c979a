"""The trial of a rewrite: a formula that can be run alone computes the same before and after."""

from rewrite_trials import trials

FORMULA = """
import torch

def attend(q, k, v, keep):
    scores = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).masked_fill(~keep, float("-inf"))
    return scores.softmax(-1) @ v
"""


def test_a_formula_is_tried() -> None:
    assert [one.outcome for one in trials(FORMULA)] == ["agree"]
