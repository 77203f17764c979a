"""The largest products of rows with a packed matrix, and their log-sum-exp, against the formula in float64."""

import math

import pytest
import torch

from regard.backends.cpu.panels import PackedMatrix, rounded_to_bytes
from regard.backends.cpu.top_products import top_products

pytestmark = pytest.mark.usefixtures("built")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize(
    ("rows", "terms", "columns", "count"), [(1, 1, 1, 1), (3, 37, 53, 7), (131, 67, 1031, 12), (5, 300, 257, 3)]
)
def test_products_and_sums(rows, terms, columns, count, bias, variant):
    left, weight = torch.randn(rows, terms), torch.randn(columns, terms)
    added = 5 * torch.randn(columns) if bias else None
    values, indices, lse = top_products(left, PackedMatrix.of(weight, added), count)
    true, plain = (left.to(dtype) @ weight.to(dtype).T for dtype in (torch.float64, torch.float32))
    if added is not None:
        true, plain = true + added, plain + added
    budget = 5 * (plain - true).abs().max() + 8 * torch.finfo(torch.float32).eps * true.abs().max()
    assert (values - true.topk(count).values).abs().max() <= budget
    assert (true.gather(1, indices) - values).abs().max() <= budget
    assert (values.diff(dim=1) <= 0).all()
    assert all(len(set(row)) == count for row in indices.tolist())
    assert (lse - true.logsumexp(-1, keepdim=True)).abs().max() <= budget


def test_of_equal_products_the_first_come_first(variant):
    weight = torch.zeros(523, 3)
    weight[[1, 31, 300, 522]] = 1.0
    _, indices, _ = top_products(torch.ones(9, 3), PackedMatrix.of(weight, None), 5)
    assert indices.tolist() == [[1, 31, 300, 522, 0]] * 9


@pytest.mark.parametrize("in_bytes", [False, True], ids=["floats", "bytes"])
def test_numbers_that_are_not_finite_stay_in_their_row(in_bytes, variant):
    left, bias = torch.ones(3, 2), torch.full((700,), -math.inf)
    bias[600] = 2.0
    left[1, 0] = math.nan
    left[2] = math.inf
    values, indices, lse = top_products(left, PackedMatrix.of(torch.ones(700, 2), bias, in_bytes=in_bytes), 2)
    assert values[0].tolist() == [4.0, -math.inf]
    assert indices[0, 0] == 600
    assert lse[0].item() == 4.0
    assert lse[1].isnan()
    assert not lse[2].isfinite()


@pytest.mark.parametrize(("rows", "terms", "columns"), [(1, 1, 1), (3, 37, 53), (131, 67, 523), (5, 300, 257)])
def test_products_of_bytes_are_those_of_rounded_rows_and_columns(rows, terms, columns, variant):
    left, weight, bias = torch.randn(rows, terms), torch.randn(columns, terms), torch.randn(columns)
    left[-1], weight[-1] = 0.0, 0.0
    values, indices, lse = top_products(left, PackedMatrix.of(weight, bias, in_bytes=True), columns)
    assert indices.sort(1).values.equal(torch.arange(columns).expand(rows, -1))
    has = torch.empty_like(values).scatter(1, indices, values)
    true = rounded_to_bytes(left).double() @ rounded_to_bytes(weight).double().T + bias
    sizes = rounded_to_bytes(left).double().abs() @ rounded_to_bytes(weight).double().abs().T + bias.abs()
    assert ((has - true).abs() <= 8 * torch.finfo(torch.float32).eps * sizes).all()
    assert (lse - has.double().logsumexp(-1, keepdim=True)).abs().max() <= 1e-5


def test_sums_of_the_largest_bytes_do_not_saturate(variant):
    signs = torch.tensor([[1.0], [-1.0]])
    left, weight = signs.expand(2, 131).contiguous(), signs.expand(2, 131).contiguous()
    values, indices, _ = top_products(left, PackedMatrix.of(weight, None, in_bytes=True), 2)
    assert indices.tolist() == [[0, 1], [1, 0]]
    torch.testing.assert_close(values, 131 * torch.tensor([[1.0, -1.0]]).expand(2, 2), rtol=1e-6, atol=0.0)


def test_rounding_twice_is_rounding_once():
    once = rounded_to_bytes(torch.randn(67, 131))
    torch.testing.assert_close(rounded_to_bytes(once), once, rtol=1e-6, atol=0.0)
