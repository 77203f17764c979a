"""The largest entries of each row and its log-sum-exp, against torch's in float64."""

import math

import pytest
import torch

from regard.backends.cpu.top_entries import top_entries


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (67, 5003), (2, 16), (5, 33)], ids=str)
@pytest.mark.parametrize("count", [0, 1, 7])
def test_entries_and_sums(shape, count, variant):
    entries, count = 9 * torch.randn(shape), min(count, shape[1])
    values, indices, lse = top_entries(entries, count)
    assert torch.equal(values, entries.topk(count).values)
    assert torch.equal(entries.gather(1, indices), values)
    expected = entries.double().logsumexp(-1, keepdim=True)
    torch.testing.assert_close(lse.double(), expected, rtol=4e-7, atol=4e-7)


def test_of_equal_entries_the_first_come_first(variant):
    _, indices, _ = top_entries(torch.tensor([[1.0, 3.0, 3.0, 3.0, 2.0]]).repeat(1, 8), 4)
    assert indices.tolist() == [[1, 2, 3, 6]]


def test_forbidden_entries_are_minus_infinity(variant):
    entries = torch.full((2, 37), -math.inf)
    entries[0, 35] = 2.0
    values, indices, lse = top_entries(entries, 3)
    assert values.tolist() == [[2.0, -math.inf, -math.inf], [-math.inf] * 3]
    assert indices[0, 0] == 35
    assert lse.flatten().tolist() == [2.0, -math.inf]


@pytest.mark.parametrize("column", [0, 31, 36])
def test_nan_makes_the_sum_nan(column, variant):
    entries = torch.randn(2, 37)
    entries[1, column] = math.nan
    assert top_entries(entries, 3)[2].isnan().flatten().tolist() == [False, True]


def test_other_dtypes_are_left_to_torch():
    entries = torch.randn(3, 37, dtype=torch.float64)
    values, indices, lse = top_entries(entries, 3)
    assert torch.equal(values, entries.topk(3).values)
    assert torch.equal(indices, entries.topk(3).indices)
    assert torch.equal(lse, entries.logsumexp(-1, keepdim=True))
