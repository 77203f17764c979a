"""fairseq (MIT): the tests of its rotary and relative sinusoidal positions."""

import torch

from regard.positions import Rotary, Sinusoidal


def close(actual, expected):
    torch.testing.assert_close(actual, torch.tensor(expected), atol=0.6e-4, rtol=0)


def test_cosines_and_sines():
    rotation = Rotary(2).rotation(torch.arange(3))
    close(rotation.cos, [[1.0000], [0.5403], [-0.4161]])
    close(rotation.sin, [[0.0000], [0.8415], [0.9093]])


def test_turned_queries():
    torch.manual_seed(0)
    query = torch.randn(3, 1, 2).transpose(0, 1)
    close(Rotary(2).rotate(query, torch.arange(3)), [[[1.5410, -0.2934], [-1.6555, -1.5263], [1.7231, -0.4041]]])


def test_distances_of_both_signs():
    expected = [
        [0.1411, -0.9900],
        [0.9093, -0.4161],
        [0.8415, 0.5403],
        [0.0000, 1.0000],
        [-0.8415, 0.5403],
        [-0.9093, -0.4161],
        [-0.1411, -0.9900],
    ]
    close(Sinusoidal(2)(torch.arange(3, -4, -1)), expected)
