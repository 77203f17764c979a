import pytest
import torch

import regard
from regard import biases, masks
from regard.core.grid import Grid
from regard.errors import ConfigurationError, DtypeError, ShapeError


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 8, 12, 14])
def test_alibi_is_the_formula(heads):
    slopes = biases.alibi_slopes(heads)
    values = biases.alibi(heads).values(Grid.from_lengths(3, 5))
    assert values.shape == (heads, 3, 5)
    for head in range(heads):
        for i in range(3):
            for j in range(5):
                assert values[head, i, j] == slopes[head] * -abs(j - (i + 2))


# keras-hub, alibi_bias_test.py (Apache-2.0), and CTranslate2, ops_test.cc (MIT)
@pytest.mark.parametrize(
    ("heads", "steepness", "slopes"),
    [
        (4, 8, [2.0 ** -(2 * h) for h in range(1, 5)]),
        (8, 8, [2.0**-h for h in range(1, 9)]),
        (14, 8, [2.0**-h for h in range(1, 9)] + [2.0 ** (-0.5 - h) for h in range(6)]),
        (2, 12, [1 / 64, 1 / 4096]),
    ],
)
def test_published_slopes(heads, steepness, slopes):
    assert biases.alibi_slopes(heads, steepness=steepness).tolist() == pytest.approx(slopes, rel=1e-7)


def test_the_other_convention():
    assert biases.geometric_slopes(8).equal(biases.alibi_slopes(8))
    assert biases.geometric_slopes(3).tolist() == pytest.approx([2 ** (-8 / 3), 2 ** (-16 / 3), 2**-8])
    grid = Grid.from_lengths(2, 4)
    other = biases.alibi(biases.geometric_slopes(3)).values(grid)
    assert other[:, 0, 0].tolist() == pytest.approx([-2 * 2 ** (-8 / 3), -2 * 2 ** (-16 / 3), -(2**-7)])


def test_only_distances_matter():
    query, key, value = (torch.randn(2, 6, length, 8).double() for length in (5, 9, 9))
    at = torch.arange(9)
    outputs = [
        regard.attention(
            query, key, value, bias=biases.alibi(6), query_positions=at[:5] + moved, key_positions=at + moved
        )
        for moved in (0, 1, 1000)
    ]
    assert outputs[0].equal(outputs[1])
    assert outputs[0].equal(outputs[2])


def test_counting_keys_from_the_first_is_the_same_under_a_causal_mask():
    query, key, value = (torch.randn(2, 4, 7, 8).double() for _ in range(3))
    by_key = biases.tensor(biases.alibi_slopes(4).double()[:, None, None] * torch.arange(7))
    torch.testing.assert_close(
        regard.attention(query, key, value, mask=masks.causal(), bias=biases.alibi(4)),
        regard.attention(query, key, value, mask=masks.causal(), bias=by_key),
    )


def test_gradient_into_slopes():
    query, key, value = (torch.randn(2, 3, length, 4).double() for length in (4, 5, 5))
    slopes = torch.rand(3).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda s: regard.attention(query, key, value, bias=biases.alibi(s)), slopes)


def test_far_positions_keep_apart_in_half_precision():
    bias = biases.alibi(torch.tensor([0.5], dtype=torch.bfloat16))
    assert bias.values_at(torch.tensor([-4001, -4000, 3])).tolist() == [[-2000.5, -2000.0, -1.5]]


def test_repr():
    assert repr(biases.alibi(8)) == "alibi(<float32 (8,)>)"


@pytest.mark.parametrize("heads", [0, -3])
def test_at_least_one_head(heads):
    match = rf"slopes of ALiBi need at least 1 head; heads is {heads}"
    for maker in (biases.alibi, biases.alibi_slopes, biases.geometric_slopes):
        with pytest.raises(ConfigurationError, match=match):
            maker(heads)


def test_steepness_is_above_zero():
    with pytest.raises(ConfigurationError, match="need a steepness above 0; it is 0"):
        biases.alibi_slopes(2, steepness=0)


@pytest.mark.parametrize(("wrong", "has"), [(True, "a bool"), (8.0, "a float"), (torch.arange(3), "torch.int64")])
def test_heads_are_a_number_or_slopes(wrong, has):
    with pytest.raises(DtypeError, match=f"number of heads, or a floating-point tensor of their slopes; this is {has}"):
        biases.alibi(wrong)


@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_slopes_have_one_axis(shape):
    with pytest.raises(ShapeError, match=r"one slope for each head, a tensor of the shape \(heads,\); this one has \("):
        biases.alibi(torch.zeros(shape))


def test_heads_of_the_bias_are_those_of_the_problem():
    query = torch.randn(1, 4, 3, 8)
    with pytest.raises(ShapeError, match=r"bias alibi\(<float32 \(6,\)>\) has the shape \(6, 3, 3\), which does not"):
        regard.attention(query, query, query, bias=biases.alibi(6))
