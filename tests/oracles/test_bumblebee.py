"""Bumblebee (Apache-2.0): the tests of its rotary embedding with scalings."""

import math

import pytest
import torch

from regard.positions import DynamicNTK, Rotary, YaRN


def test_dynamic_scaling_beyond_the_original_length():
    turned = Rotary(4, scaling=DynamicNTK(2.0, 2)).rotate(torch.ones(4, 4), torch.arange(4))
    # Four positions where two were trained on: the base is 10000 · (2 · 4/2 - 1)².
    angle = 1 / math.sqrt(10000 * 3**2)
    assert turned[1, 1].item() == pytest.approx(math.cos(angle) - math.sin(angle), abs=1e-7)


def test_yarn():
    turned = Rotary(4, scaling=YaRN(4.0, 2)).rotate(torch.ones(4, 4), torch.arange(4))
    expected = torch.tensor([[-0.3012, 0.9975], [-1.3254, 0.9950], [-1.1311, 0.9925]]) * (0.1 * math.log(4) + 1)
    torch.testing.assert_close(turned[1:, :2], expected, atol=0.6e-4 * 1.14, rtol=0)
