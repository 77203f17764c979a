"""What reductions need of their tensors, and what Python and C agree on for them."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard import native
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.kernels.batched_problem import BatchedProblem
from regard.kernels.native_inputs import native_problems
from regard.kernels.validation import make_problem
from regard.native import build, flash, reducing

pytestmark = pytest.mark.usefixtures("built")


def problem() -> native.FlashProblem:
    ((_, part),) = native_problems(
        BatchedProblem.from_problem(make_problem(*(torch.zeros(1, 2, n, 4) for n in (5, 7, 7))))
    )
    return part


def double(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.float64)


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (
            lambda: native.RowTerms(double(1, 2, 6)),
            ShapeError,
            r"into of RowTerms has shape \(1, 2, 6\); it needs \(1, 2, 5\)",
        ),
        (lambda: native.ColumnSums(torch.zeros(1, 2, 7)), DtypeError, "into of ColumnSums is torch.float32"),
        (
            lambda: native.ColumnSums(double(1, 7, 2).mT),
            ShapeError,
            r"into of ColumnSums needs to be contiguous; its strides are \(14, 1, 2\)",
        ),
        (
            lambda: native.RowTerms(double(1, 2, 5).to("meta")),
            DeviceError,
            "into of RowTerms is on meta; native code runs on the CPU",
        ),
        (
            lambda: native.Cells(torch.arange(5), torch.arange(7), double(1, 2, 5, 6)),
            ShapeError,
            "columns of Cells has cell 6; into has 6 of them",
        ),
        (
            lambda: native.Cells(torch.tensor([0, 1, 0, -1, 1]), torch.arange(7), double(1, 2, 2, 7)),
            ShapeError,
            "rows of Cells need to grow from row to row, but for those of none",
        ),
        (
            lambda: native.Largest(torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 3)),
            DtypeError,
            "columns of Largest is torch.float32; native code takes torch.int64",
        ),
        (
            lambda: native.Reach(
                torch.arange(5) - 2**23, torch.arange(7), torch.tensor([1]), *(double(1, 2, n) for n in (5, 5, 2))
            ),
            ShapeError,
            "positions of Reach are more than 8,388,608 apart",
        ),
        (
            lambda: native.Reach(
                torch.arange(5), torch.arange(7), torch.tensor([1]), *(double(1, 2, n) for n in (5, 5, 3))
            ),
            ShapeError,
            r"histogram of Reach has shape \(1, 2, 3\); it needs \(1, 2, 2\)",
        ),
    ],
)
def test_what_does_not_fit(asked: Callable[[], native.Reduction], error: type, message: str):
    with pytest.raises(error, match=message):
        native.reduce_weights(problem(), torch.zeros(1, 2, 5), [asked()])


def test_positions_are_the_same_for_all():
    def reach(first: int) -> native.Reach:
        sums = (double(1, 2, size) for size in (5, 5, 2))
        return native.Reach(torch.arange(5) + first, torch.arange(7), torch.tensor([1]), *sums)

    with pytest.raises(ShapeError, match="several of Reach have other positions; they need the same, or to be asked"):
        native.reduce_weights(problem(), torch.zeros(1, 2, 5), [reach(0), reach(1)])


def test_the_log_sum_exp_fits():
    with pytest.raises(ShapeError, match=r"lse has shape \(1, 2, 4\); it needs \(1, 2, 5\)"):
        native.reduce_weights(problem(), torch.zeros(1, 2, 4), [native.RowTerms(double(1, 2, 5))])


@pytest.mark.skipif(shutil.which("cc") is None, reason="there is no C compiler")
def test_python_and_c_agree_on_the_layout(tmp_path):
    lines = []
    for name in ("flash", "reductions", "map", "top", "reach"):
        structure = flash.FlashWork if name == "flash" else getattr(reducing, f"{name.capitalize()}Work")
        lines.append(f'printf("%d\\n", sizeof(struct {name}) == {ctypes.sizeof(structure)});')
        for field, *_ in structure._fields_:
            here = getattr(structure, field).offset
            lines.append(f'printf("%d\\n", offsetof(struct {name}, {field}) == {here});')
    headers = "".join(f"#include {name}\n" for name in ("<stddef.h>", "<stdio.h>", '"flash.h"', '"reductions.h"'))
    (tmp_path / "layout.c").write_text(headers + "int main(void) {" + "\n".join(lines) + "}")
    subprocess.run(["cc", "-I", build.SOURCES, tmp_path / "layout.c", "-o", tmp_path / "layout"], check=True)
    agreed = subprocess.run([tmp_path / "layout"], check=True, capture_output=True, text=True).stdout.split()
    assert agreed == ["1"] * len(lines)
