"""CTranslate2 (MIT): the tests of its masked softmax and of its position encoder."""

import pytest
import torch

import regard
from regard import lenses, masks
from regard.positions import Tensor2TensorSinusoidal


@pytest.mark.parametrize(
    ("given", "length", "expected"),
    [
        ([-0.2, 3.0, 1.2, -1.1, 0.0], 3, [0.033797, 0.829145, 0.137056, 0.0, 0.0]),
        ([4.6, 3.3, 0.2, -1.6, 1.0], 4, [0.777098, 0.211783, 0.009540, 0.001577, 0.0]),
    ],
)
def test_masked_softmax(given, length, expected):
    weights = lenses.Weights()
    seen = regard.observe(
        torch.zeros(1, 1, 1, 2),
        torch.zeros(1, 1, 5, 2),
        torch.zeros(1, 1, 5, 2),
        weights,
        bias=torch.tensor(given),
        mask=masks.padding(lengths=[length]),
    )
    # The published digits end at 1e-6, and an exponential of torch's flash kernel is off by up to 2⁻²⁰.
    torch.testing.assert_close(seen[weights][0, 0, 0], torch.tensor(expected), atol=0.5e-6 + 2**-20, rtol=0)
    assert seen[weights][0, 0, 0, length:].eq(0).all()


def test_sinusoidal_positions():
    """Its first position is 1: what is added to the input at index 0."""
    given = torch.tensor([0.1, -2.3, 0.5, 1.2])
    expected = torch.tensor([0.941471, -2.2999, 1.0403, 2.2])
    positions = Tensor2TensorSinusoidal(4)(torch.tensor([1]))
    torch.testing.assert_close(given + positions[0], expected, atol=1e-5, rtol=0)
