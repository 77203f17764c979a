"""What the recipe of effects counts, by hand."""

import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")
sys.path.insert(0, str(Path(__file__).parents[2] / "recipes"))
recipe = importlib.import_module("effects_of_heads")


def test_a_word_moves_as_the_mean_of_its_tokens():
    moved = torch.tensor([[9.0, 1.0, 3.0, 5.0, 9.0], [9.0, 0.0, 2.0, 8.0, 9.0]]).double()
    assert recipe.by_word(moved, [None, 0, 0, 2, None], 3).tolist() == [[2.0, 0.0, 5.0], [1.0, 0.0, 8.0]]


def test_effects_are_means_over_cases_and_texts_of_a_group_are_one():
    parts = [
        ("b", np.array([1.0, 5.0]), np.array([1.0, 0.0]), 1),
        ("a", np.array([3.0, 0.0]), np.array([0.0, 1.0]), 2),
        ("b", np.array([2.0, 1.0]), np.array([1.0, 1.0]), 1),
    ]
    found = recipe.joined(parts)
    assert (found.moved.tolist(), found.counts.tolist()) == ([[3.0, 0.0], [3.0, 6.0]], [2.0, 2.0])
    assert (found.effects.tolist(), found.accuracies.tolist()) == ([1.5, 1.5], [0.5, 0.5])
    assert (found.half(True).counts.tolist(), found.half(False).effects.tolist()) == ([2.0], [1.5, 3.0])


def test_an_interval_is_that_of_resampled_texts():
    same = recipe.RelationEffects(np.full((20, 2), 0.3), np.zeros((20, 2)), np.ones(20))
    assert same.interval(1) == pytest.approx((0.3, 0.3))
    draw = np.random.default_rng(3)
    moved = draw.normal(1.0, 0.5, (400, 1))
    low, high = recipe.RelationEffects(moved, np.zeros((400, 1)), np.ones(400)).interval(0)
    half = 1.96 * moved.std() / 20  # of the mean of 400 independent texts
    assert (low, high) == pytest.approx((moved.mean() - half, moved.mean() + half), abs=0.01)


def test_a_row_ranks_the_head_chosen_by_weight_on_the_other_half():
    moved, right = np.zeros((4, 72)), np.zeros((4, 72))
    right[:, 37], moved[:, 71], moved[:, 37], moved[:, 5] = 1.0, 0.2, 0.05, 0.1
    row = recipe.row("pronoun → person", "Winogender", recipe.RelationEffects(moved, right, np.ones(4)), {})
    by_weight, by_effect = "3-1 | 100.0 | 50.0 [50.0, 50.0] | 3", "5-11 | 200.0 [200.0, 200.0] | 0.0"
    assert row == f"| pronoun → person | Winogender | {by_weight} | {by_effect} | 2 |"
