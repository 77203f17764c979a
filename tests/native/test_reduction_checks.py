"""Reductions whose tensors do not fit are refused."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.flash_tiles import FlashProblem, tile_problems
from regard.backends.cpu.reduce_tiles import reduce_weights
from regard.core.batched_problem import BatchedProblem
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.kernels.validation import make_problem
from regard.lenses.forms import (
    CellReduction,
    ColumnSums,
    DistanceSums,
    EntropySums,
    LargestWeights,
    RowSums,
    TermPositions,
    WeightForm,
)

pytestmark = pytest.mark.usefixtures("built")


def problem() -> FlashProblem:
    ((_, part),) = tile_problems(
        BatchedProblem.from_problem(make_problem(*(torch.zeros(1, 2, n, 4) for n in (5, 7, 7))))
    )
    return part


def double(*sizes: int) -> Tensor:
    return torch.zeros(*sizes, dtype=torch.float64)


class DistanceRowSums(RowSums):
    """A sum of a term that reads positions."""

    term = "weight_distance"


@pytest.mark.parametrize(
    ("asked", "error", "message"),
    [
        (
            lambda: EntropySums(double(1, 2, 6)),
            ShapeError,
            r"into of EntropySums has shape \(1, 2, 6\); it needs \(1, 2, 5\)",
        ),
        (
            lambda: ColumnSums(torch.zeros(1, 2, 7)),
            DtypeError,
            "into of ColumnSums is torch.float32",
        ),
        (
            lambda: ColumnSums(double(1, 7, 2).mT),
            ShapeError,
            r"into of ColumnSums needs to be contiguous; its strides are \(14, 1, 2\)",
        ),
        (
            lambda: EntropySums(double(1, 2, 5).to("meta")),
            DeviceError,
            "into of EntropySums is on meta; native code runs on the CPU",
        ),
        (
            lambda: CellReduction(torch.arange(5), torch.arange(7), double(1, 2, 5, 6)),
            ShapeError,
            "columns of CellReduction has cell 6; into has 6 of them",
        ),
        (
            lambda: CellReduction(torch.tensor([0, 1, 0, -1, 1]), torch.arange(7), double(1, 2, 2, 7)),
            ShapeError,
            "rows of CellReduction need cells that never decrease, but for those below 0",
        ),
        (
            lambda: LargestWeights(torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 3)),
            DtypeError,
            "columns of LargestWeights is torch.float32; native code takes torch.int64",
        ),
        (
            lambda: DistanceSums(
                torch.arange(5) - 2**23, torch.arange(7), torch.tensor([1]), *(double(1, 2, n) for n in (5, 5, 2))
            ),
            ShapeError,
            "positions of DistanceSums are more than 8,388,608 apart",
        ),
        (
            lambda: DistanceRowSums(double(1, 2, 5)),
            ShapeError,
            r"DistanceRowSums sums weight_distance, which reads positions: it needs positions=TermPositions\(",
        ),
        (
            lambda: DistanceRowSums(double(1, 2, 5), TermPositions(torch.arange(4), torch.arange(7))),
            ShapeError,
            r"queries of DistanceRowSums has shape \(4,\); it needs \(5,\)",
        ),
        (
            lambda: DistanceSums(
                torch.arange(5), torch.arange(7), torch.tensor([1]), *(double(1, 2, n) for n in (5, 5, 3))
            ),
            ShapeError,
            r"histogram of DistanceSums has shape \(1, 2, 3\); it needs \(1, 2, 2\)",
        ),
    ],
)
def test_what_does_not_fit(asked: Callable[[], WeightForm], error: type, message: str):
    with pytest.raises(error, match=message):
        reduce_weights(problem(), torch.zeros(1, 2, 5), [asked()])


def test_positions_are_the_same_for_all():
    def sums_by_distance(first: int) -> DistanceSums:
        sums = (double(1, 2, size) for size in (5, 5, 2))
        return DistanceSums(torch.arange(5) + first, torch.arange(7), torch.tensor([1]), *sums)

    with pytest.raises(
        ShapeError, match="several reductions have other positions; they need the same, or calls of their own"
    ):
        reduce_weights(problem(), torch.zeros(1, 2, 5), [sums_by_distance(0), sums_by_distance(1)])


def test_the_log_sum_exp_fits():
    with pytest.raises(ShapeError, match=r"lse has shape \(1, 2, 4\); it needs \(1, 2, 5\)"):
        reduce_weights(problem(), torch.zeros(1, 2, 4), [EntropySums(double(1, 2, 5))])
