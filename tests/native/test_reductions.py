import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import biases, masks
from regard.backends.cpu import reduce_tiles
from regard.backends.cpu.flash_tiles import tile_problems
from regard.backends.cpu.library import DTYPES
from regard.backends.cpu.reduce_tiles import reduce_weights
from regard.core.batched_problem import BatchedProblem
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
    WeightMatrix,
)

pytestmark = pytest.mark.usefixtures("built")

SIZES = [  # batch, heads, key heads, queries, keys, dim
    (1, 2, 2, 64, 64, 64),
    (2, 4, 2, 131, 257, 32),
    (1, 3, 1, 67, 61, 23),
    (2, 2, 2, 1, 130, 16),
    (1, 1, 1, 200, 3, 5),
    (1, 2, 1, 513, 97, 80),
    (3, 1, 1, 1, 1, 1),
]
SCALE = 0.3
SUMS = "mass", "moments", "histogram"


def inputs(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    batch, heads, shared, queries, keys, dim = shape
    return torch.randn(batch, heads, queries, dim).to(dtype), torch.randn(batch, shared, keys, dim).to(dtype)


def weights_of(query: Tensor, key: Tensor, dtype: torch.dtype, lse: Tensor | None = None, **options: Any) -> Tensor:
    """The formula; without `lse`, each row is normed by itself."""
    problem = make_problem(query.to(dtype), key.to(dtype), key.to(dtype), scale=SCALE, **options)
    scores = problem.scores()
    lse = scores.logsumexp(-1) if lse is None else lse.to(dtype)
    return torch.exp(scores - lse.masked_fill(~lse.isfinite(), math.inf).unsqueeze(-1))


def lse_of(query: Tensor, key: Tensor, **options: Any) -> Tensor:
    problem = make_problem(query.double(), key.double(), key.double(), scale=SCALE, **options)
    return problem.scores().logsumexp(-1).float()


def reduce(query: Tensor, key: Tensor, lse: Tensor, asked: list[WeightForm], **options: Any) -> None:
    value = key[..., :1]
    for batch, part in tile_problems(
        BatchedProblem.from_problem(make_problem(query, key, value, scale=SCALE, **options))
    ):
        reduce_weights(part, lse[batch], [each.part(batch) for each in asked])


class Asked:
    """One of everything, and its formula; edges of cells that fall where they like."""

    def __init__(
        self,
        sizes: tuple[int, int, int, int],
        rows: Tensor,
        columns: Tensor,
        most: int,
        places: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        batch, heads, queries, keys = sizes
        self.rows, self.columns, self.most = rows, columns, most
        cells = int(rows.max()) + 1, int(columns.max()) + 1
        self.terms = EntropySums(torch.zeros(batch, heads, queries, dtype=torch.float64))
        self.received = ColumnSums(torch.zeros(batch, heads, keys, dtype=torch.float64))
        self.sums = CellReduction(rows, columns, torch.zeros(batch, heads, *cells, dtype=torch.float64))
        self.maxima = CellReduction(rows, columns, torch.zeros(batch, heads, *cells))
        leading = batch, heads, queries, most
        self.top = LargestWeights(torch.full(leading, math.nan), torch.full(leading, 9**9))
        self.reach = DistanceSums(
            torch.arange(queries) + keys - queries if places is None else places[0],
            torch.arange(keys) if places is None else places[1],
            torch.tensor([1, 3, 64, 70]),
            *(torch.zeros(batch, heads, size, dtype=torch.float64) for size in (queries, queries, 5)),
        )
        self.weights = WeightMatrix(torch.zeros(sizes))
        self.all: list[WeightForm] = [self.terms, self.received, self.sums, self.maxima, self.reach, self.top]
        self.all.append(self.weights)

    def found(self) -> list[Tensor]:
        reach = self.reach.mass, self.reach.moments, self.reach.histogram
        sums = self.terms.into, self.received.into, self.sums.into, *reach
        return [*sums, self.maxima.into, self.weights.into, self.top.weights]

    def formula(self, weights: Tensor) -> list[Tensor]:
        of_rows, of_columns = (
            torch.nn.functional.one_hot(cells + 1)[:, 1:].to(weights.dtype) for cells in (self.rows, self.columns)
        )
        sums = of_rows.mT @ weights @ of_columns
        maxima = torch.zeros_like(sums)
        for row in range(sums.shape[-2]):
            for column in range(sums.shape[-1]):
                cell = weights[..., self.rows == row, :][..., self.columns == column]
                if cell.numel():
                    maxima[..., row, column] = cell.amax((-2, -1))
        padded = torch.cat([weights, weights.new_zeros(*weights.shape[:-1], self.most)], -1)
        top = padded.sort(-1, descending=True).values[..., : self.most]
        far = (self.reach.queries[:, None] - self.reach.keys).abs()
        edges = [0, *self.reach.edges.tolist(), 2**62]
        bins = [(far >= begin) & (far < end) for begin, end in itertools.pairwise(edges)]
        histogram = torch.stack([(weights * each).sum((-2, -1)) for each in bins], -1)
        reach = weights.sum(-1), (weights * far).sum(-1), histogram
        terms = torch.xlogy(weights, weights).sum(-1) / math.log(2)
        return [terms, weights.sum(-2), sums, *reach, maxima, weights, top]

    def agrees(self, true: Tensor, plain: Tensor) -> bool:
        """As near as the formula in float32, some times over, and a few roundings of what is added up."""
        eps = torch.finfo(torch.float32).eps
        for has, exact, rough in zip(self.found(), self.formula(true), self.formula(plain), strict=True):
            assert has.shape == exact.shape
            allowed = 5 * (rough - exact).abs().amax() + 8 * eps * exact.abs().amax().clamp(min=1.0)
            assert (has - exact).abs().le(allowed).all()
        columns = self.top.columns.masked_fill(self.top.weights == 0, -1)
        there = true.gather(-1, columns.clamp(min=0)).masked_fill(columns < 0, 0.0)
        assert torch.allclose(there, self.top.weights.double(), rtol=2e-4, atol=1e-5)
        each = columns.sort(-1).values
        assert not ((each.diff(dim=-1) == 0) & (each[..., 1:] >= 0)).any()
        return True


def edges(length: int, cells: int) -> Tensor:
    return torch.arange(length) * min(cells, length) // length


def agrees(
    query: Tensor, key: Tensor, cells: tuple[Tensor, Tensor] | None = None, most: int = 3, **options: Any
) -> bool:
    (batch, heads, queries, _), keys = query.shape, key.shape[2]
    asked = Asked((batch, heads, queries, keys), *(cells or (edges(queries, 5), edges(keys, 7))), most)
    lse = lse_of(query, key, **options)
    reduce(query, key, lse, asked.all, **options)
    plain = weights_of(query, key, torch.float32, lse, **options)
    return asked.agrees(weights_of(query, key, torch.float64, lse, **options), plain)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_they_are_the_formula(variant, shape, dtype):
    assert agrees(*inputs(shape, dtype))
    assert agrees(*inputs(shape, dtype), softcap=1.5)
    assert agrees(*inputs(shape, dtype), most=shape[4] + 20)


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("leading", ["alike", "each batch", "each head"])
def test_a_mask(variant, shape, leading):
    batch, heads = shape[0] if leading == "each batch" else 1, shape[1] if leading == "each head" else 1
    keep = torch.rand(batch, heads, shape[3], shape[4]) < 0.4
    keep[..., ::5, :] = False  # rows that attend to nothing
    assert agrees(*inputs(shape), mask=keep)


@pytest.mark.parametrize("mask", [masks.causal(), masks.window(40, 3), masks.causal() & masks.padding(lengths=[300])])
def test_tiles_that_are_left_out(variant, mask):
    assert agrees(*inputs((1, 2, 1, 701, 701, 16)), mask=mask)
    assert agrees(*inputs((1, 2, 2, 130, 701, 16)), mask=mask)


@pytest.mark.parametrize("shape", SIZES)
def test_a_bias_by_distance(variant, shape):
    bias = biases.relative(torch.randn(shape[1], 32))
    assert agrees(*inputs(shape), bias=bias)
    assert agrees(*inputs(shape), bias=bias, softcap=2.0, mask=masks.causal())


@settings(max_examples=60, deadline=None)
@given(
    queries=st.integers(1, 200),
    keys=st.integers(1, 200),
    rows=st.lists(st.integers(1, 90), min_size=1, max_size=40),
    columns=st.lists(st.integers(1, 90), min_size=1, max_size=40),
    none=st.booleans(),
    causal=st.booleans(),
)
def test_cells_with_any_edges(queries, keys, rows, columns, none, causal):
    def cells(sizes: list[int], length: int) -> Tensor:
        found = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[:length]
        found = torch.cat([found, found[-1:].expand(length - len(found))])
        return torch.where(torch.arange(length) % 7 == 3, -1, found) if none and length > 4 else found

    query, key = inputs((1, 1, 1, queries, keys, 3))
    options: dict[str, Any] = {"mask": masks.causal()} if causal else {}
    assert agrees(query, key, (cells(rows, queries), cells(columns, keys)), **options)


def test_columns_may_be_in_any_cells():
    query, key = inputs((1, 2, 2, 150, 170, 8))
    assert agrees(query, key, (edges(150, 3), torch.randint(-1, 4, (170,)).index_fill_(0, torch.tensor([5]), 3)))


@pytest.mark.parametrize("spread", [1, 40, 4000])
def test_distances_of_any_positions(variant, spread):
    query, key = inputs((1, 2, 1, 150, 170, 8))
    places = torch.randint(-spread, spread, (150,)), torch.randint(2 * spread, (170,)).sort().values
    asked = Asked((1, 2, 150, 170), edges(150, 3), edges(170, 3), 2, places)
    lse = lse_of(query, key)
    reduce(query, key, lse, asked.all)
    assert asked.agrees(weights_of(query, key, torch.float64, lse), weights_of(query, key, torch.float32, lse))


class DistanceRowSums(RowSums):
    """Σ_j w_ij · d_ij."""

    term = "weight_distance"


class DistanceColumnSums(ColumnSums):
    """Σ_i w_ij · d_ij."""

    term = "weight_distance"


class DistanceCells(CellReduction):
    """Σ w_ij · d_ij of cells."""

    term = "weight_distance"


@pytest.mark.parametrize("spread", [1, 40])
def test_a_term_that_reads_positions_needs_no_sums_by_distance(variant, spread):
    (query, key), wide = inputs((2, 2, 1, 131, 257, 16)), torch.float64
    positions = TermPositions(torch.randint(300, (131,)) * spread, torch.randint(300, (257,)) * spread)
    rows, columns = edges(131, 5), edges(257, 7)
    by_row = DistanceRowSums(torch.zeros(2, 2, 131, dtype=wide), positions)
    by_column = DistanceColumnSums(torch.zeros(2, 2, 257, dtype=wide), positions)
    cells = DistanceCells(rows, columns, torch.zeros(2, 2, 5, 7, dtype=wide), positions)
    reduce(query, key, lse_of(query, key), [by_row, by_column, cells])
    distances = (positions.queries[:, None] - positions.keys).abs()
    products = weights_of(query, key, torch.float64) * distances
    of_rows, of_columns = (torch.nn.functional.one_hot(cells).double() for cells in (rows, columns))
    for has, true in (
        (by_row.into, products.sum(-1)),
        (by_column.into, products.sum(-2)),
        (cells.into, of_rows.mT @ products @ of_columns),
    ):
        torch.testing.assert_close(has, true, rtol=1e-5, atol=1e-5 * spread)


def test_bins_of_several_that_ask():
    query, key = inputs((1, 2, 1, 150, 170, 8))
    lse, found = lse_of(query, key), []
    for edges_ in ([], [5], [1, 2, 70], [2, 5, 6]):
        sums = (torch.zeros(1, 2, size, dtype=torch.float64) for size in (150, 150, len(edges_) + 1))
        positions = torch.arange(150), torch.arange(170)
        found.append(DistanceSums(*positions, torch.tensor(edges_, dtype=torch.int64), *sums))
    reduce(query, key, lse, found)
    for one in found:
        alone = DistanceSums(one.queries, one.keys, one.edges, *(torch.zeros_like(getattr(one, name)) for name in SUMS))
        reduce(query, key, lse, [alone])
        for name in SUMS:
            torch.testing.assert_close(getattr(one, name), getattr(alone, name), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_they_are_the_same_for_any_number_of_threads(threads, monkeypatch):
    """To the bit; and cells of rows that go on from strip to strip."""
    query, key = inputs((1, 1, 1, 2900, 300, 8))
    lse = lse_of(query, key)

    def found(count: int) -> list[Tensor]:
        monkeypatch.setattr("torch.get_num_threads", lambda: count)
        asked = Asked((1, 1, 2900, 300), edges(2900, 4), edges(300, 3), 5)
        reduce(query, key, lse, asked.all)
        assert asked.agrees(weights_of(query, key, torch.float64, lse), weights_of(query, key, torch.float32, lse))
        return [*asked.found(), asked.top.columns]

    monkeypatch.setattr(reduce_tiles, "LEAST_WORK", 1)
    expected = found(1)
    assert all(torch.equal(has, before) for has, before in zip(found(threads), expected, strict=True))


def test_strips_have_about_as_much_work_each():
    query, key = inputs((1, 1, 1, 16_384, 16_384, 1))
    ((_, part),) = tile_problems(BatchedProblem.from_problem(make_problem(query, key, key, mask=masks.causal())))
    strips = reduce_tiles._strips(part.tiles, 8).tolist()
    spent = [sum(range(begin + 1, end + 1)) for begin, end in itertools.pairwise(strips)]
    assert (strips[0], strips[-1], len(spent)) == (0, 256, 8)
    assert max(spent) < 1.25 * min(spent)
    assert reduce_tiles._strips(part.tiles, 64).tolist() == [0, 256]


def test_what_is_there_is_added_to():
    query, key = inputs((1, 2, 1, 70, 130, 8))
    lse, rows, columns = lse_of(query, key), edges(70, 4), edges(130, 3)
    once, twice = (Asked((1, 2, 70, 130), rows, columns, 4) for _ in range(2))
    reduce(query, key, lse, once.all)
    for _ in range(2):
        reduce(query, key, lse, twice.all)
    for one, two, times in zip(once.found(), twice.found(), (2,) * 6 + (1, 1, 1), strict=True):
        assert torch.equal(one * times, two)


def test_the_same_asked_twice_is_there_twice():
    query, key = inputs((1, 2, 1, 70, 130, 8))
    one, other = (Asked((1, 2, 70, 130), edges(70, 4), edges(130, 3), most) for most in (2, 9))
    reduce(query, key, lse_of(query, key), [*one.all, *other.all])
    for has, also in zip(one.found()[:-1], other.found()[:-1], strict=True):
        assert torch.equal(has, also)
    assert torch.equal(one.top.weights, other.top.weights[..., :2])
    assert torch.equal(one.top.columns, other.top.columns[..., :2])


def test_sums_of_many_rows_do_not_drift(variant):
    """262,144 times the same weight, which float32 would no longer add up."""
    query, key = torch.zeros(1, 1, 2**18, 1), torch.zeros(1, 1, 3, 1)
    lse = torch.full((1, 1, 2**18), math.log(3))
    asked = Asked((1, 1, 2**18, 3), torch.zeros(2**18, dtype=torch.int64), torch.tensor([0, 0, 1]), 1)
    reduce(query, key, lse, asked.all)
    weight = asked.top.weights[0, 0, 0, 0].double()
    torch.testing.assert_close(asked.received.into / 2**18, weight.expand(1, 1, 3), rtol=5e-7, atol=0.0)
    torch.testing.assert_close(asked.sums.into[0, 0, 0] / 2**18, weight * torch.tensor([2, 1]), rtol=5e-7, atol=0.0)


def test_terms_of_many_columns_do_not_drift(variant):
    query, key = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 3 * 2**16, 1)
    terms = EntropySums(torch.zeros(1, 1, 1, dtype=torch.float64))
    reduce(query, key, torch.full((1, 1, 1), math.log(3 * 2**16)), [terms])
    assert terms.into.item() == pytest.approx(-math.log2(3 * 2**16), rel=2e-6)


def test_rows_that_take_no_part(variant):
    query, key = inputs((1, 2, 2, 70, 130, 16))
    lse = lse_of(query, key)
    lse[:, 0, 3], lse[:, 1, 5], lse[:, 0, 69] = math.nan, -math.inf, math.inf
    query[:, 0, 3] = math.nan
    asked = Asked((1, 2, 70, 130), edges(70, 5), edges(130, 7), 3)
    reduce(query, key, lse, asked.all)
    clean = query.nan_to_num()
    true, plain = (weights_of(clean, key, dtype, lse) for dtype in (torch.float64, torch.float32))
    assert (true[:, 0, 3] == 0).all()
    assert asked.agrees(true, plain)


def test_nothing_comes_from_where_there_is_no_pair(variant):
    query, key = inputs((1, 2, 1, 70, 130, 16))
    keep = torch.rand(1, 1, 70, 130) < 0.7
    keep[..., 100] = False
    lse = lse_of(query, key, mask=keep)

    def found(key: Tensor) -> list[Tensor]:
        asked = Asked((1, 2, 70, 130), edges(70, 5), edges(130, 7), 3)
        reduce(query, key, lse, asked.all, mask=keep)
        return [*asked.found(), asked.top.columns]

    expected = found(key)
    key[:, :, 100] = math.nan
    assert all(torch.equal(has, before) for has, before in zip(found(key), expected, strict=True))


def test_strides(variant):
    query, key = inputs((2, 4, 2, 70, 130, 32))
    lse = lse_of(query, key)

    def found(query: Tensor, key: Tensor, lse: Tensor) -> list[Tensor]:
        asked = Asked((2, 4, 70, 130), edges(70, 5), edges(130, 7), 3)
        reduce(query, key, lse, asked.all)
        return asked.found()

    apart = query.transpose(1, 2).contiguous().transpose(1, 2), key.mT.contiguous().mT, lse.mT.contiguous().mT
    assert all(torch.equal(has, one) for has, one in zip(found(*apart), found(query, key, lse), strict=True))


def test_nothing_is_written_beyond_the_tensors(variant):
    query, key = inputs((1, 1, 1, 67, 131, 5))
    kept = []

    def inside(tensor: Tensor) -> Tensor:
        around = torch.full((tensor.numel() + 200,), 77, dtype=tensor.dtype)
        kept.append(around)
        return around[100:-100].view_as(tensor).copy_(tensor)

    asked = Asked((1, 1, 67, 131), edges(67, 5), edges(131, 7), 3)
    for name in ("terms", "received", "sums", "maxima", "weights"):
        each = getattr(asked, name)
        setattr(asked, name, replace(each, into=inside(each.into)))
    asked.top = LargestWeights(inside(asked.top.weights), inside(asked.top.columns))
    asked.reach = replace(asked.reach, **{name: inside(getattr(asked.reach, name)) for name in SUMS})
    everything = [asked.terms, asked.received, asked.sums, asked.maxima, asked.weights, asked.reach, asked.top]
    reduce(query, key, lse_of(query, key), everything)
    assert asked.agrees(*(weights_of(query, key, dtype) for dtype in (torch.float64, torch.float32)))
    assert all((around[:100] == 77).all() and (around[-100:] == 77).all() for around in kept)


def test_nothing_at_all():
    terms = EntropySums(torch.zeros(1, 2, 5, dtype=torch.float64))
    top = LargestWeights(torch.ones(1, 2, 5, 2), torch.ones(1, 2, 5, 2, dtype=torch.int64))
    reduce(torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 0, 4), torch.full((1, 2, 5), -math.inf), [terms, top])
    assert (terms.into == 0).all()
    assert (top.weights == 0).all()
    empty = EntropySums(torch.zeros(1, 2, 0, dtype=torch.float64))
    reduce(torch.zeros(1, 2, 0, 4), torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 0), [empty])
