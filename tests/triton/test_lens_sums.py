"""What lenses add up over the weights in Triton, form by form, against the formula in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks
from regard.backends.triton.triton_backend import TRITON
from regard.core.batched_problem import BatchedProblem
from regard.core.problem import Problem
from regard.core.score_forms import DotPairs
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.kernels.validation import make_problem
from regard.lenses.forms import (
    CellReduction,
    ColumnSums,
    DistanceSums,
    EntropySums,
    LargestWeights,
    RowSums,
    WeightForm,
    WeightMatrix,
)

pytestmark = [
    pytest.mark.interpreted,
    # NumPy, of NaN and infinity
    pytest.mark.filterwarnings("ignore:(invalid value|overflow|divide by zero) encountered:RuntimeWarning"),
]
pytest.importorskip("triton")

# ruff: noqa: E402  # where there is Triton
from regard.backends.triton import lens_pass_launch
from regard.backends.triton.launch_settings import LaunchSettings
from regard.backends.triton.lens_pass_launch import TileWriterInTriton, WeightsInTriton
from regard.backends.triton.lens_requests import LensRequests

EDGES = torch.tensor([1, 3, 64, 70])


def edges(length: int, cells: int) -> Tensor:
    return torch.arange(length) * min(cells, length) // length


def positions(problem: Problem) -> tuple[Tensor, Tensor]:
    grid = problem.grid()
    return grid.query_positions, grid.key_positions


class Asked:
    """One form of each kind, and its formula."""

    def __init__(self, problem: Problem, cells: tuple[Tensor, Tensor], most: int) -> None:
        batch, heads, queries, keys = BatchedProblem.from_problem(problem).shape
        counts = int(cells[0].max()) + 1, int(cells[1].max()) + 1
        self.cells, self.most = cells, most

        def double(*sizes: int) -> Tensor:
            return torch.zeros(batch, heads, *sizes, dtype=torch.float64)

        self.sums, self.terms, self.received = (
            RowSums(double(queries)),
            EntropySums(double(queries)),
            ColumnSums(double(keys)),
        )
        self.totals = CellReduction(*cells, double(*counts))
        self.maxima = CellReduction(*cells, torch.zeros(batch, heads, *counts))
        leading = batch, heads, queries, most
        self.top = LargestWeights(torch.full(leading, math.nan), torch.full(leading, 9**9))
        self.reach = DistanceSums(*positions(problem), EDGES, double(queries), double(queries), double(len(EDGES) + 1))
        self.matrix = WeightMatrix(torch.zeros(batch, heads, queries, keys))
        self.forms: list[WeightForm] = [self.sums, self.terms, self.received, self.totals, self.maxima, self.top]
        self.forms += [self.reach, self.matrix]

    def found(self) -> list[Tensor]:
        reach = self.reach.mass, self.reach.moments, self.reach.histogram
        sums = (each.into for each in (self.sums, self.terms, self.received, self.totals, self.maxima, self.matrix))
        return [*sums, *reach, self.top.weights]

    def formula(self, weights: Tensor) -> list[Tensor]:
        rows, columns = (torch.nn.functional.one_hot(cells + 1)[:, 1:].to(weights.dtype) for cells in self.cells)
        chosen = weights.unsqueeze(-3) * rows.mT[:, :, None]  # [B, H, R, M, N]
        maxima = (chosen.amax(-2).unsqueeze(-2) * columns.mT).amax(-1)  # weights are at least 0
        far = (self.reach.queries[:, None] - self.reach.keys).abs()
        bins = [(far >= begin) & (far < end) for begin, end in itertools.pairwise([0, *EDGES.tolist(), 2**62])]
        padded = torch.cat([weights, weights.new_zeros(*weights.shape[:-1], self.most)], -1)
        return [
            weights.sum(-1),
            torch.xlogy(weights, weights).sum(-1) / math.log(2),
            weights.sum(-2),
            rows.mT @ weights @ columns,
            maxima,
            weights,
            weights.sum(-1),
            (weights * far).sum(-1),
            torch.stack([(weights * each).sum((-2, -1)) for each in bins], -1),
            padded.sort(-1, descending=True).values[..., : self.most],
        ]

    def check(self, true: Tensor, plain: Tensor) -> None:
        """As near as the formula in float32, some times over, and a few roundings of what is added up."""
        eps = torch.finfo(torch.float32).eps
        for has, exact, rough in zip(self.found(), self.formula(true), self.formula(plain), strict=True):
            assert has.shape == exact.shape
            allowed = 5 * (rough - exact).abs().amax() + 8 * eps * exact.abs().amax().clamp(min=1.0)
            assert (has - exact).abs().amax() <= allowed
        columns = self.top.columns.masked_fill(self.top.weights == 0, -1)
        there = true.gather(-1, columns.clamp(min=0)).masked_fill(columns < 0, 0.0)
        torch.testing.assert_close(there, self.top.weights.double(), rtol=1e-4, atol=1e-6)
        each = columns.sort(-1).values
        assert not ((each.diff(dim=-1) == 0) & (each[..., 1:] >= 0)).any()


def weights_of(problem: Problem, dtype: torch.dtype, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """The formula, and the log-sum-exp; without `lse`, each row is normed by itself."""
    pairs = problem.pairs
    assert isinstance(pairs, DotPairs)
    query, key = (each.to(dtype).nan_to_num(0.0, 0.0, 0.0) for each in (pairs.query, pairs.key))
    options = {"mask": problem.mask, "bias": problem.bias, "softcap": problem.softcap, "scale": pairs.scale}
    scores = make_problem(query, key, key, **options).scores().to(dtype)
    lse = scores.logsumexp(-1) if lse is None else lse.to(dtype)
    return torch.exp(scores - lse.masked_fill(~lse.isfinite(), math.inf).unsqueeze(-1)), lse


def check(
    query: Tensor, key: Tensor, cells: tuple[Tensor, Tensor] | None = None, most: int = 3, **options: Any
) -> Asked:
    problem = make_problem(query, key, key, scale=0.3, **options)
    asked = Asked(problem, cells or (edges(problem.queries, 3), edges(problem.keys, 5)), most)
    _, lse = weights_of(problem, torch.float64, None)
    lse = lse.float()
    assert WeightsInTriton().reduces(problem)
    assert all(WeightsInTriton().takes(form) for form in asked.forms)
    WeightsInTriton().reduce(BatchedProblem.from_problem(problem), lse, asked.forms)
    asked.check(weights_of(problem, torch.float64, lse)[0], weights_of(problem, torch.float32, lse)[0])
    return asked


def inputs(batch: int, heads: int, shared: int, queries: int, keys: int, dim: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, heads, queries, dim), torch.randn(batch, shared, keys, dim)


def bits() -> Tensor:
    keep = torch.rand(2, 2, 67, 131, generator=torch.Generator().manual_seed(1)) < 0.3
    keep[..., ::5, :] = False  # rows that attend to nothing
    return keep


PROBLEMS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal, softcap": {"mask": masks.causal(), "softcap": 1.5},
    "window, bias by distance": {"mask": masks.window(20, 2), "bias": biases.relative(torch.randn(2, 32))},
    "padding": {"mask": masks.padding(lengths=[20, 131])},
    "bits, bias of pairs": {"mask": bits(), "bias": torch.randn(2, 1, 67, 131)},
}


@pytest.mark.parametrize("name", PROBLEMS)
def test_every_form_is_the_formula(name):
    check(*inputs(2, 2, 1, 67, 131, 24), **PROBLEMS[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_and_strides(dtype):
    query, key = (each.to(dtype) for each in inputs(1, 37, 29, 2, 2, 16))
    check(query.transpose(1, 2), key.transpose(1, 2), mask=masks.causal())


def test_small_tiles(monkeypatch):
    monkeypatch.setattr(lens_pass_launch, "settings", lambda *_, **__: LaunchSettings(32, 32, 4, 1))
    check(*inputs(1, 2, 1, 37, 53, 16), mask=bits()[:1, :, :37, :53], most=20)


CELLS = {
    "many columns": (edges(70, 2), edges(131, 90)),
    "many rows": (edges(70, 60), edges(131, 3)),
    "as many as pairs": (torch.arange(70), torch.arange(131)),
    "in any order, some in none": (
        torch.where(torch.arange(70) % 7 == 3, -1, edges(70, 9)),
        torch.randint(-1, 11, (131,), generator=torch.Generator().manual_seed(1)),
    ),
    "far apart": (torch.arange(70) * 9, torch.arange(131).flip(0) * 9),
}


@pytest.mark.parametrize("name", CELLS)
def test_cells(name):
    query, key = inputs(1, 1, 1, 70, 131, 16)
    rows, columns = CELLS[name]
    counts = int(rows.max()) + 1, int(columns.max()) + 1
    sums = CellReduction(rows, columns, torch.zeros(1, 1, *counts, dtype=torch.float64))
    maxima = CellReduction(rows, columns, torch.zeros(1, 1, *counts))
    problem = make_problem(query, key, key, mask=masks.causal())
    weights, lse = weights_of(problem, torch.float64, None)
    WeightsInTriton().reduce(BatchedProblem.from_problem(problem), lse.float(), [sums, maxima])
    both = rows >= 0, columns >= 0
    chosen = weights[..., both[0], :][..., both[1]]
    at = rows[both[0], None].expand(chosen.shape[2:]), columns[both[1]].expand(chosen.shape[2:])
    true = torch.zeros(counts, dtype=torch.float64).index_put_(at, chosen[0, 0], accumulate=True)
    largest = torch.zeros(counts[0] * counts[1], dtype=torch.float64)
    largest.scatter_reduce_(0, (at[0] * counts[1] + at[1]).flatten(), chosen.flatten(), "amax")
    torch.testing.assert_close(sums.into[0, 0], true, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(maxima.into[0, 0].double(), largest.view(counts), rtol=1e-5, atol=1e-6)


def test_nan_behind_the_mask_and_rows_that_meet_it():
    query, key = inputs(1, 2, 1, 67, 131, 16)
    clean = check(query, key, mask=masks.causal() & masks.where(keep=torch.arange(131) != 120))
    key[0, 0, 120], query[0, 0, 3] = math.nan, math.inf
    problem = make_problem(query, key, key, scale=0.3, mask=masks.causal() & masks.where(keep=torch.arange(131) != 120))
    _, lse = weights_of(problem, torch.float64, None)
    lse[0, 0, 3] = math.nan
    asked = Asked(problem, clean.cells, 3)
    WeightsInTriton().reduce(BatchedProblem.from_problem(problem), lse.float(), asked.forms)
    others = torch.arange(67) != 3
    for has, known in zip(
        (asked.matrix, asked.terms, asked.sums), (clean.matrix, clean.terms, clean.sums), strict=True
    ):
        assert has.into[0, 1].equal(known.into[0, 1])
        assert has.into[0, 0][others].equal(known.into[0, 0][others])
        assert not has.into[0, 0, 3].any()
    assert all(found.isfinite().all() for found in asked.found())


def test_sums_that_are_there_are_added_to_and_shared():
    query, key = inputs(1, 1, 1, 37, 53, 16)
    problem = make_problem(query, key, key)
    weights, lse = weights_of(problem, torch.float64, None)
    one, two = (EntropySums(torch.full((1, 1, 37), start, dtype=torch.float64)) for start in (3.0, 5.0))
    largest = [CellReduction(edges(37, 2), edges(53, 2), torch.full((1, 1, 2, 2), start)) for start in (0.0, 0.5)]
    assert len(LensRequests.of([one, two, *largest])) == 1
    WeightsInTriton().reduce(BatchedProblem.from_problem(problem), lse.float(), [one, two, *largest])
    true = torch.xlogy(weights, weights).sum(-1) / math.log(2)
    for form, start in ((one, 3.0), (two, 5.0)):
        torch.testing.assert_close(form.into, true + start, rtol=1e-5, atol=1e-5)
    assert largest[1].into.equal(largest[0].into.clamp(min=0.5))


SEGMENTS = torch.tensor([0, 2, 2, -1, 3]).repeat_interleave(7)
REDUCED = (
    *(
        lenses.Entropy(),
        lenses.Received(),
        lenses.Distance(),
        lenses.Distance((3, 17)),
        lenses.TopK(1),
        lenses.TopK(20),
    ),
    *(lenses.Pooled((5, 7)), lenses.Pooled((4, 31), "max"), lenses.Mass(SEGMENTS), lenses.MaxLogit("row")),
)
TILED = lenses.TopK(65), lenses.Mass(torch.arange(35) % 3), lenses.Weights(slice(3, 30, 2), slice(0, 20))


def shown(found: object) -> list[Tensor]:
    return list(found) if isinstance(found, tuple) else [found]  # type: ignore[list-item]


@pytest.mark.parametrize("bias", [None, biases.alibi(2), biases.gaussian(3.0, 2.0)], ids=repr)
def test_lenses_show_the_same_by_torch(bias, monkeypatch):
    query, key = torch.randn(1, 2, 35, 16), torch.randn(1, 2, 35, 16)
    options = {"mask": masks.causal(), "bias": bias}
    seen = regard.observe(query, key, key, *REDUCED, *TILED, **options)
    monkeypatch.setattr(TRITON, "runs", lambda *_: False)
    by_torch = regard.observe(query.double(), key.double(), key.double(), *REDUCED, *TILED, **options)
    for lens in (*REDUCED, *TILED):
        for has, also in zip(shown(seen[lens]), shown(by_torch[lens]), strict=True):
            if has.is_floating_point():
                torch.testing.assert_close(has, also.to(has.dtype), rtol=1e-4, atol=1e-5)
            else:
                assert has.eq(also).float().mean() > 0.99  # nearly equal weights may come in any order


def test_what_has_no_tiles_and_what_has(monkeypatch):
    writers, write = [], TileWriterInTriton.tile

    def watched(*arguments, **options):
        writers.append(arguments)
        return write(*arguments, **options)

    monkeypatch.setattr(TileWriterInTriton, "tile", watched)
    query = torch.randn(1, 2, 35, 16)
    regard.observe(query, query, query, *REDUCED)
    assert not writers
    regard.observe(query, query, query, *TILED[:2])
    assert writers
    assert not WeightsInTriton().takes(SquareSums(torch.zeros(1, 2, 35, dtype=torch.float64)))


class SquareSums(RowSums):
    """A term that is not known here."""

    term = "weight_squared"


@pytest.mark.parametrize(
    ("form", "error", "message"),
    [
        (
            EntropySums(torch.zeros(1, 1, 5)),
            DtypeError,
            "into of EntropySums is torch.float32; native code takes torch.float64",
        ),
        (ColumnSums(torch.zeros(1, 1, 6, dtype=torch.float64)), ShapeError, r"it needs \(1, 1, 5\)"),
        (WeightMatrix(torch.zeros(1, 1, 5, 5, device="meta")), DeviceError, "is on meta; the problem is on cpu"),
    ],
)
def test_what_does_not_fit(form, error, message):
    query = torch.zeros(1, 1, 5, 16)
    problem = BatchedProblem.from_problem(make_problem(query, query, query))
    with pytest.raises(error, match=message):
        WeightsInTriton().reduce(problem, torch.zeros(1, 1, 5), [form])
    with pytest.raises(ShapeError, match=r"lse has shape \(1, 1, 4\); it needs \(1, 1, 5\)"):
        WeightsInTriton().reduce(problem, torch.zeros(1, 1, 4), [])
