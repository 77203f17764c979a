"""Every lens against the same reduction of the reference's weights, with the log-sum-exp of any kernel."""

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from regard import lenses
from regard.core.problem import Problem
from regard.kernels import KERNELS, Kernel, lens_pass, zero_nonfinite_inputs
from regard.kernels.tiled import TiledKernel
from regard.lenses import topk
from regard.testing import Case, cases, long_cases, make_inputs, suite
from regard.tiles import mask_tiles

Result = dict[lenses.Lens, object]
GROUPS, LONG_GROUPS = 12, 8
"""Tests that share the cases."""


def each_case_once(kernels: Sequence[Kernel], among: Sequence[Case]) -> list[tuple[Kernel, Case]]:
    """Every case with one kernel that returns its log-sum-exp: of those, the one with the fewest cases so far.

    A lens computes from the log-sum-exp alone, and test_agreement.py holds that of every kernel to the oracle.
    """
    admitted: dict[Case, list[Kernel]] = {}
    for kernel, case in suite(kernels, among=among, with_lse=True):
        admitted.setdefault(case, []).append(kernel)
    counts, found = Counter(), []
    for case, able in admitted.items():
        kernel = min(able, key=lambda kernel: counts[kernel.name])
        counts[kernel.name] += 1
        found.append((kernel, case))
    return found


@pytest.fixture(scope="module")
def short() -> list[tuple[Kernel, Case]]:
    return each_case_once((*KERNELS, TiledKernel(16)), cases(2))


@pytest.fixture(scope="module")
def long() -> list[tuple[Kernel, Case]]:
    return each_case_once((*KERNELS, TiledKernel(2**12)), long_cases())


def look(problem: Problem, lse: Tensor, *wanted: lenses.Lens) -> Result:
    """Apply lenses as `observe` does after the kernel has run."""
    looks, clean = lens_pass.start_lenses(problem, wanted), zero_nonfinite_inputs(problem)
    lens_pass.run_reductions(clean, lse, (reduction for seen in looks.values() for reduction in seen.reductions))
    return {lens: seen.finish(clean, lse) for lens, seen in looks.items()}


def dense(problem: Problem, lse: Tensor) -> Tensor:
    """The reference's weights in float64; a row that attends to NaN is NaN."""
    clean = zero_nonfinite_inputs(problem)
    pairs = replace(clean.pairs, query=clean.pairs.query.double(), key=clean.pairs.key.double())
    clean = replace(clean, pairs=pairs, value=clean.value.double())
    with torch.no_grad():
        scores = clean.scores()
        sink = scores.new_full((*scores.shape[:-1], 1), -math.inf)
        sink = sink if clean.sinks is None else clean.sinks.to(sink)[:, None, None].expand_as(sink)
        weights = torch.cat([scores, sink], -1).softmax(-1).nan_to_num(0.0)[..., :-1]
    return weights.masked_fill((lse.isnan() | lse.isposinf()).unsqueeze(-1), math.nan)


def edges(length: int, cells: int) -> list[int]:
    return [cell * length // cells for cell in range(cells + 1)]


def pooled(weights: Tensor, rows: int, columns: int, reduce: str) -> Tensor:
    def cell(above: int, below: int, left: int, right: int) -> Tensor:
        part = weights[..., above:below, left:right]
        return {"mean": part.mean, "max": part.amax, "sum": part.sum}[reduce]((-2, -1))

    down, across = (itertools.pairwise(edges(*of)) for of in ((weights.shape[-2], rows), (weights.shape[-1], columns)))
    across = list(across)
    return torch.stack([torch.stack([cell(*row, *column) for column in across], -1) for row in down], -2)


def masses(weights: Tensor, of_queries: Tensor, of_keys: Tensor) -> Tensor:
    queries, keys = (
        torch.nn.functional.one_hot(ids + 1, 6)[..., 1:].double() for ids in (of_queries, of_keys)
    )  # -1 is none
    return torch.einsum("...mn,ma,nb->...ab", weights, queries, keys)


def assert_near(shown: object, true: Tensor, case: Case, size: float = 1.0) -> None:
    assert isinstance(shown, Tensor)
    assert shown.shape == true.shape
    assert shown.dtype == (torch.float64 if case.dtype == "float64" else torch.float32)
    rtol, atol = (1e-9, 1e-10 * size) if case.dtype == "float64" else (2e-4, 1e-5 * size)
    torch.testing.assert_close(shown.double(), true, equal_nan=True, rtol=rtol, atol=atol)


def assert_top(shown: object, weights: Tensor, k: int, case: Case) -> None:
    assert isinstance(shown, lenses.TopKResult)
    true = torch.cat([weights, weights.new_zeros(*weights.shape[:-1], k)], -1)
    true = true.sort(-1, descending=True).values[..., :k].masked_fill(weights.isnan().any(-1, keepdim=True), math.nan)
    assert_near(shown.weights, true, case)
    columns = shown.columns
    filled = columns >= 0
    assert filled.equal(shown.weights > 0)
    if weights.shape[-1]:
        there = weights.gather(-1, columns.clamp(min=0)).masked_fill(~filled, 0.0)
        assert_near(shown.weights.masked_fill(~filled, 0.0), there, case)
    each = columns.masked_fill(~filled, -1).sort(-1).values
    assert not ((each.diff(dim=-1) == 0) & (each[..., 1:] >= 0)).any()


def check(kernel: Kernel, case: Case) -> None:
    inputs = make_inputs(case)
    problem = inputs.problem(wants_lse=True)
    with torch.no_grad():
        lse = kernel.run(problem).lse
    assert lse is not None
    weights = dense(problem, lse)
    queries, keys = weights.shape[-2:]
    draw = torch.Generator().manual_seed(case.seed)
    of_queries, of_keys = (torch.randint(-1, 5, (size,), generator=draw) for size in (queries, keys))
    of_queries, of_keys = (
        torch.cat([ids[:-1], ids.new_tensor([4])]) if len(ids) else ids for ids in (of_queries, of_keys)
    )
    mass, entropy, received = lenses.Mass(of_queries, of_keys), lenses.Entropy(), lenses.Received()
    distance, few, many = lenses.Distance((1, 3)), lenses.TopK(2), lenses.TopK(keys + 2)
    cells = min(queries, 3), min(keys, 2)
    maps = [lenses.Pooled(cells, reduce) for reduce in ("mean", "max", "sum")] if all(cells) else []  # type: ignore[arg-type]
    whole = lenses.Weights()
    seen = look(problem, lse, mass, entropy, received, distance, few, many, whole, *maps)
    total = max(queries, 1)
    assert_near(seen[whole], weights, case)
    assert_near(seen[entropy], torch.special.entr(weights).sum(-1), case, 4.0)
    assert_near(seen[received], weights.sum(-2), case, total)
    for lens in maps:
        assert_near(seen[lens], pooled(weights, *cells, lens.reduce), case, total)
    if queries and keys:
        there = masses(weights.nan_to_num(), of_queries, of_keys)
        broken = masses(weights.isnan().double(), of_queries, torch.zeros_like(of_keys))[..., :1] > 0
        assert_near(seen[mass], there.masked_fill(broken, math.nan), case, total)
    grid = problem.grid()
    far = (grid.query - grid.key).abs()
    reach = seen[distance]
    assert isinstance(reach, lenses.DistanceResult)
    sums = weights.sum(-1)
    mean = (weights * far).sum(-1) / sums.masked_fill(sums == 0, 1.0)
    # Where a sink leaves the keys next to nothing, the quotient is less exact.
    assert_near(reach.mean * sums.to(reach.mean.dtype), mean * sums, case, float(far.max()) if far.numel() else 1.0)
    bins = (far < 1, (far >= 1) & (far < 3), far >= 3)
    assert_near(reach.histogram, torch.stack([(weights * each).sum((-2, -1)) for each in bins], -1), case, total)
    assert_top(seen[few], weights, 2, case)
    assert_top(seen[many], weights, keys + 2, case)


@pytest.mark.parametrize("group", range(GROUPS))
def test_lenses_show_the_reductions_of_the_weights(group: int, short, assert_all, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)  # batches that differ are visited apart, however small
    monkeypatch.setattr(lens_pass, "WEIGHTS_PER_TILE", 16)
    monkeypatch.setattr(topk, "GROUP", 2)
    monkeypatch.setattr(topk, "LANES", 2)
    monkeypatch.setattr(topk, "BUFFERED", 16)
    assert_all(check, short[group::GROUPS])


@pytest.mark.parametrize("group", range(LONG_GROUPS))
def test_lenses_show_the_reductions_over_many_tiles(group: int, long, assert_all, monkeypatch):
    monkeypatch.setattr(lens_pass, "WEIGHTS_PER_TILE", 2**13)
    monkeypatch.setattr(topk, "BUFFERED", 2**12)
    assert_all(check, long[group::LONG_GROUPS])
