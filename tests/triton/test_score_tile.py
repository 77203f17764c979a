"""The functions that all kernels in Triton share, each against torch, by Triton's interpreter."""

import pytest
import torch

from regard.backends.triton import jit_runtime
from regard.core.dropout import Dropout, _hash64

pytestmark = pytest.mark.interpreted
triton = pytest.importorskip("triton")
tl = triton.language

from regard.backends.triton import score_tile  # noqa: E402  # where there is Triton


@triton.jit
def _products(A, B, OUT, dim, D: tl.constexpr, BD: tl.constexpr, SIZE: tl.constexpr):
    a = score_tile.load_rows(A, 0, 13, dim, D, BD, SIZE)
    b = score_tile.load_rows(B, 3, 16, dim, D, BD, SIZE)
    at = tl.arange(0, SIZE)
    tl.store(OUT + at[:, None] * SIZE + at[None, :], score_tile.product(a, tl.trans(b), None, "ieee"))


@pytest.mark.parametrize("dtype", jit_runtime.DTYPES)
@pytest.mark.parametrize("dim", [16, 24])
def test_products_of_rows(dtype, dim):
    a, b = torch.randn(2, 16, dim).to(dtype)
    out = torch.full((16, 16), float("nan"))
    _products[(1,)](a, b, out, dim, D=dim, BD=triton.next_power_of_2(dim), SIZE=16)
    rows, columns = a.double(), torch.cat([b[3:], torch.zeros(3, dim)]).double()
    rows[13:] = 0
    torch.testing.assert_close(out.double(), rows @ columns.mT, atol=dim * 2.0**-22, rtol=0)


@triton.jit
def _rounded(X, OUT, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(OUT + at, score_tile.rounded(tl.load(X + at), OUT.dtype.element_ty))


@pytest.mark.parametrize("dtype", jit_runtime.DTYPES)
def test_numbers_are_rounded_to_the_nearest(dtype):
    x = torch.cat([torch.randn(60), torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 0.0])])  # ties go to even
    out = torch.full((64,), float("nan"), dtype=dtype)
    _rounded[(1,)](x, out, SIZE=64)
    assert out.equal(x.to(dtype))


@triton.jit
def _dropped(ROWS, COLUMNS, OUT, threshold, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    rows, columns = tl.load(ROWS + at)[:, None], tl.load(COLUMNS + at)[None, :]
    tl.store(OUT + at[:, None] * SIZE + at[None, :], score_tile.dropped(rows, columns, threshold).to(tl.int32))


@triton.jit
def _hashes(NUMBERS, OUT, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(OUT + at, score_tile.hash64(tl.load(NUMBERS + at)))


def test_the_weights_that_dropout_drops():
    dropout = Dropout(0.3, torch.tensor(123456789123))
    positions = torch.arange(32)
    rows, columns = dropout.hashes(torch.tensor([[[5]]]), positions, positions)
    out = torch.full((32, 32), -1, dtype=torch.int32)
    _dropped[(1,)](rows[0, 0], columns, out, dropout.threshold, SIZE=32)
    assert out.equal(1 - dropout.dropout_mask(torch.tensor([[[5]]]), positions, positions)[0, 0].int())
    assert 0.2 < out.float().mean() < 0.4


def test_the_hash_of_64_bits():
    numbers = torch.randint(-(2**62), 2**62, (32,))
    out = torch.zeros_like(numbers)
    _hashes[(1,)](numbers, out, SIZE=32)
    assert out.equal(_hash64(numbers))


@triton.jit
def _capped(X, OUT, SLOPE, cap, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    out, slope = score_tile.capped(tl.load(X + at), cap)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(OUT + at, out)
    tl.store(SLOPE + at, slope)


def test_softcap():
    x = torch.cat([torch.linspace(-12, 12, 62), torch.tensor([0.0, 1e-7])])
    out, slope = torch.zeros(2, 64)
    _capped[(1,)](x, out, slope, 50.0, SIZE=64)
    expected = x.double().tanh()
    torch.testing.assert_close(out.double(), 50 * expected, atol=50 * 6e-8, rtol=0)
    torch.testing.assert_close(slope.double(), 1 - expected.square(), atol=2e-7, rtol=0)
