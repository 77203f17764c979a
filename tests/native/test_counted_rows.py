"""The numbers of a table at positions that gates count, in C, against their formula in float64, number by number."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks, native
from regard.backends.cpu.counted_rows import CountedPositionsInC

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")


def numbers(table: Tensor, gates: Tensor) -> Tensor:
    """The table at the sum of the gates from each key on, one pair after another."""
    found, last = torch.empty_like(gates), table.shape[-1] - 1
    for row in range(gates.shape[-2]):
        for column in range(gates.shape[-1]):
            place = gates[..., row, column:].sum(-1).clamp(max=last).unsqueeze(-1)
            low, high = (
                table[..., row, :].gather(-1, each.long()).squeeze(-1) for each in (place.floor(), place.ceil())
            )
            found[..., row, column] = low + (place - place.floor()).squeeze(-1) * (high - low)
    return found


@pytest.mark.parametrize("positions", [1, 2, 5, 37])
def test_numbers_are_those_of_the_formula(positions):
    """Sums are of float64, so that a number is rounded once: by at most 2⁻²⁴ of it, of which there are none above 8."""
    torch.manual_seed(0)
    table, gates = torch.randn(2, 3, 11, positions), torch.rand(2, 3, 11, 13)
    found = CountedPositionsInC().interpolated(table, gates)
    torch.testing.assert_close(found.double(), numbers(table.double(), gates.double()), rtol=1e-6, atol=1e-6)


def test_gates_of_0_and_1_count_whole_tokens():
    table = torch.tensor([[10.0, 20.0, 40.0]])
    found = CountedPositionsInC().interpolated(table, torch.tensor([[1.0, 0.0, 1.0, 1.0, 0.0]]))
    assert found.tolist() == [[40.0, 40.0, 40.0, 20.0, 10.0]]


def test_rows_of_any_strides():
    torch.manual_seed(0)
    code, table, gates = (
        CountedPositionsInC(),
        torch.randn(7, 11, 2).permute(2, 1, 0),
        torch.rand(13, 11, 2).permute(2, 1, 0),
    )
    assert torch.equal(code.interpolated(table, gates), code.interpolated(table.contiguous(), gates.contiguous()))


def test_nan_stays_in_its_row_from_its_key_on():
    table, gates = torch.ones(3, 4), torch.full((3, 5), 0.5)
    gates[1, 2] = torch.nan
    expected = torch.ones(3, 5)
    expected[1, :3] = torch.nan
    found = CountedPositionsInC().interpolated(table, gates)
    torch.testing.assert_close(found, expected, equal_nan=True)


def test_rows_without_keys_and_no_rows():
    code = CountedPositionsInC()
    assert code.interpolated(torch.ones(3, 4), torch.ones(3, 0)).shape == (3, 0)
    assert code.interpolated(torch.ones(0, 4), torch.ones(0, 5)).shape == (0, 5)


def test_what_it_leaves_to_torch():
    code, plain = CountedPositionsInC(), torch.rand(3, 4)
    assert code.takes(plain, plain)
    assert not code.takes(plain, plain.double())
    assert not code.takes(plain.clone().requires_grad_(), plain)
    assert torch.vmap(lambda rows: rows + float(code.takes(rows, rows)))(plain).equal(plain)
    with torch.autocast("cpu"):
        assert not code.takes(plain, plain)


@pytest.mark.parametrize("queries", [1, 13, 37])
def test_attention_without_gradients_takes_it(queries, monkeypatch):
    taken, interpolated = [], CountedPositionsInC.interpolated
    monkeypatch.setattr(CountedPositionsInC, "interpolated", lambda *given: (taken.append(1), interpolated(*given))[1])
    torch.manual_seed(0)
    inputs = torch.randn(2, 4, queries, 8), torch.randn(2, 2, 37, 8), torch.randn(2, 2, 37, 8)
    vectors = torch.randn(4, 6, 8)
    for mask in (masks.causal(), masks.causal() & ~masks.strided(3)):
        expected = regard.attention(
            *(each.double() for each in inputs), mask=mask, bias=biases.cope(vectors.double()), kernel="reference"
        )
        for _ in range(3):
            found = regard.attention(*inputs, mask=mask, bias=biases.cope(vectors))
            torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert taken
