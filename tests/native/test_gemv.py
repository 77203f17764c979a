import pytest
import torch

from regard.backends.cpu import gemv
from regard.backends.cpu.gemv import matmul_few_rows
from regard.errors import DeviceError, DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")

SIZES = [(1, 64, 128), (2, 67, 23), (3, 1, 1), (4, 131, 96), (5, 61, 33), (7, 5, 256), (32, 19, 40), (6, 257, 16)]


def error_of(has: torch.Tensor, rows: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None) -> float:
    """The largest error against float64, in units of what float32 may lose in sums of this size."""
    truth = torch.nn.functional.linear(rows.double(), matrix.double(), None if bias is None else bias.double())
    size = rows.double().abs() @ matrix.double().abs().T + (0.0 if bias is None else bias.double().abs())
    return float(((has - truth).abs() / (size * torch.finfo(torch.float32).eps)).amax())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("shape", SIZES)
def test_it_is_the_formula(variant, shape, biased):
    count, columns, dim = shape
    rows, matrix = torch.randn(count, dim), torch.randn(columns, dim)
    bias = torch.randn(columns) if biased else None
    has = matmul_few_rows(rows, matrix, bias)
    assert has.shape == (count, columns)
    assert error_of(has, rows, matrix, bias) < 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_half_precision_is_widened_and_rounded_once(variant, shape, dtype):
    count, columns, dim = shape
    rows, matrix, bias = (torch.randn(*size).to(dtype) for size in ((count, dim), (columns, dim), (columns,)))
    has = matmul_few_rows(rows, matrix, bias)
    wide = matmul_few_rows(rows.float(), matrix.float(), bias.float())
    assert has.dtype == dtype
    assert torch.equal(has, wide.to(dtype))


def test_any_strides():
    rows, matrix = torch.randn(40, 3).T, torch.randn(40, 50).T
    assert error_of(matmul_few_rows(rows, matrix), rows, matrix, None) < 8
    rows, matrix = torch.randn(6, 2, 40)[:, 1], torch.randn(50, 80)[::2, :40]
    assert error_of(matmul_few_rows(rows, matrix), rows, matrix, None) < 8


def test_any_number_of_threads_gives_the_same(monkeypatch):
    monkeypatch.setattr(gemv, "LEAST_WORK", 1)
    monkeypatch.setattr(gemv, "UNIT", 1024)
    rows, matrix = torch.randn(5, 96), torch.randn(301, 96)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(matmul_few_rows(rows, matrix))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_nan_stays_in_its_row_and_its_column():
    rows, matrix = torch.randn(3, 40), torch.randn(7, 40)
    rows[1, 5], matrix[4, 39] = torch.nan, torch.inf
    has = matmul_few_rows(rows, matrix)
    assert has[1].isnan().all()
    assert not has[::2, 4].isfinite().any()
    assert has[::2][:, [0, 1, 2, 3, 5, 6]].isfinite().all()


def test_nothing_to_do():
    assert matmul_few_rows(torch.zeros(0, 4), torch.zeros(5, 4)).shape == (0, 5)
    assert matmul_few_rows(torch.zeros(2, 4), torch.zeros(0, 4)).shape == (2, 0)
    assert matmul_few_rows(torch.zeros(2, 0), torch.zeros(3, 0)).eq(0).all()


def test_what_does_not_fit_is_said():
    rows, matrix = torch.zeros(2, 8), torch.zeros(5, 8)
    with pytest.raises(DtypeError, match=r"rows are torch.float32 and matrix is torch.bfloat16; native code takes"):
        matmul_few_rows(rows, matrix.bfloat16())
    with pytest.raises(DtypeError, match=r"bias is torch.float64"):
        matmul_few_rows(rows, matrix, torch.zeros(5).double())
    with pytest.raises(ShapeError, match=r"rows have the shape \(2, 8\) and matrix \(5, 7\)"):
        matmul_few_rows(rows, matrix[:, :7])
    with pytest.raises(ShapeError, match=r"bias has the shape \(4,\); it needs \(5,\)"):
        matmul_few_rows(rows, matrix, torch.zeros(4))
    with pytest.raises(DeviceError, match=r"rows is on meta"):
        matmul_few_rows(rows.to("meta"), matrix)
