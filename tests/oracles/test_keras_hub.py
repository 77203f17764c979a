"""keras-hub (Apache-2.0): the tests of its RotaryEmbedding, which makes pairs of halves."""

import pytest
import torch

from regard.positions import LinearScaling, Rotary


def turned_ones(rotary, position):
    return rotary.rotate(torch.ones(1, rotary.dim), torch.tensor([position]))[0].tolist()


@pytest.mark.parametrize(
    ("position", "expected"), [(0, [1.0] * 6), (3, [-1.1311, 0.8515, 0.9935, -0.8489, 1.1291, 1.0064])]
)
def test_ones(position, expected):
    assert turned_ones(Rotary(6), position) == pytest.approx(expected, abs=0.5e-4)


@pytest.mark.parametrize(
    ("factor", "position", "expected"),
    [
        (2.0, 0, [1.0, 1.0, 1.0, 1.0]),
        (2.0, 1, [0.398157001, 0.994987488, 1.357008100, 1.004987478]),
        (2.0, 2, [-0.301168621, 0.989950180, 1.381773233, 1.009949803]),
        (5.0, 12, [-1.412856817, 0.975714266, -0.061930716, 1.023709655]),
    ],
)
def test_linear_scaling(factor, position, expected):
    # Their numbers come from float32, whose angles of up to 2.4 are off by 2⁻²³.
    assert turned_ones(Rotary(4, scaling=LinearScaling(factor)), position) == pytest.approx(expected, abs=3e-7)
