"""burn (MIT or Apache-2.0): the tests of its RotaryEncoding, which makes pairs of neighbours."""

import math

import pytest
import torch

from regard.positions import Llama3, Rotary


def test_two_heads():
    tensor = torch.tensor(
        [[[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]], [[9.0, 10.0, 11.0, 12.0], [13.0, 14.0, 15.0, 16.0]]]
    )
    expected = torch.tensor(
        [
            [[1.0000, 2.0000, 3.0000, 4.0000], [-2.3473, 7.4492, 6.9197, 8.0696]],
            [[9.0000, 10.0000, 11.0000, 12.0000], [-4.7567, 18.5034, 14.8393, 16.1492]],
        ]
    )
    turned = Rotary(4, layout="interleaved").rotate(tensor[None], torch.arange(2))[0]
    torch.testing.assert_close(turned, expected, atol=0.6e-4, rtol=0)


def fifth_digit(number):
    """One unit of it: their numbers have five digits, the last of which is rounded up in one place, down in another."""
    return 10.0 ** (math.floor(math.log10(number)) - 4)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        (None, [(0.54030, 0.84147), (0.99500, 0.099833), (0.99995, 0.0099998), (0.99999, 0.00099999)]),
        (Llama3(8.0, 8192), [(0.54030, 0.84148), (0.99500, 0.099833), (0.99995, 0.0099998), (1.0, 0.00021361)]),
    ],
)
def test_cosines_and_sines(scaling, expected):
    rotation = Rotary(8, scaling=scaling).rotation(torch.arange(2))
    assert rotation.cos[0].tolist() == [1.0] * 4
    assert rotation.sin[0].tolist() == [0.0] * 4
    for pair, (cosine, sine) in enumerate(expected):
        assert rotation.cos[1, pair].item() == pytest.approx(cosine, abs=fifth_digit(cosine))
        assert rotation.sin[1, pair].item() == pytest.approx(sine, abs=fifth_digit(sine))
