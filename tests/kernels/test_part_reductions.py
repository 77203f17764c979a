"""Lenses over the dense parts of sparse masks: the same as over the tiles of the whole, and as of all weights."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, native
from regard.kernels import lens_pass, make_problem, part_reductions

pytestmark = pytest.mark.skipif(bool(native.why_not()), reason=f"there is no native code: {native.why_not()}")

LENGTH = 331
MASKS = [
    masks.causal() & (masks.window(before=16) | masks.strided(16)),
    masks.strided(7),
    masks.dilated(6, step=5),
    masks.causal() & masks.fixed(16, 3),
    masks.causal() & (masks.window(before=20) | masks.global_tokens([0, 5, 200])),
]
LENSES = {
    "entropy": lenses.Entropy(),
    "received": lenses.Received(),
    "pooled": lenses.Pooled((7, 5)),
    "largest": lenses.Pooled((9, 9), reduce="max"),
    "topk": lenses.TopK(4),
    "distance": lenses.Distance(),
    "largest score": lenses.MaxLogit(),
    "weights": lenses.Weights(),
}


def inputs(*batch: int, queries: int = LENGTH) -> tuple[Tensor, Tensor, Tensor]:
    sizes = (*batch, 4, queries, 8), (*batch, 2, LENGTH, 8), (*batch, 2, LENGTH, 5)
    query, key, value = (torch.randn(size) for size in sizes)
    return query, key, value


def flat(result: object) -> list[Tensor]:
    """The tensors of a lens's result; columns of the largest weights are left to those that are told apart."""
    if isinstance(result, Tensor):
        return [result]
    if hasattr(result, "columns"):
        return [result.weights, result.columns.where(result.weights > 0, -1)]  # type: ignore[attr-defined]
    return [value for value in result if isinstance(value, Tensor)]  # type: ignore[attr-defined]


@pytest.fixture
def forced(monkeypatch):
    """Choose whether parts are used, and count how often they were."""
    calls = []
    reduce_parts = lens_pass.reduce_parts

    def counted(*arguments):
        calls.append(arguments)
        reduce_parts(*arguments)

    monkeypatch.setattr(lens_pass, "reduce_parts", counted)

    def choose(parts: bool) -> list:
        calls.clear()
        monkeypatch.setattr(lens_pass, "prefers_parts", lambda problem: parts)
        return calls

    return choose


@pytest.mark.parametrize("mask", MASKS, ids=repr)
@pytest.mark.parametrize("name", LENSES)
def test_lenses_by_parts_are_those_of_the_whole(mask, name, forced):
    tensors, lens = inputs(2), LENSES[name]
    forced(parts=False)
    expected = regard.observe(*tensors, lens, mask=mask)[lens]
    calls = forced(parts=True)
    found = regard.observe(*tensors, lens, mask=mask)[lens]
    assert len(calls) == 1
    for has, needs in zip(flat(found), flat(expected), strict=True):
        torch.testing.assert_close(has, needs, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mask", MASKS, ids=repr)
def test_all_lenses_in_one_pass_and_the_weights_of_the_definition(mask, forced):
    tensors = inputs(1)
    calls = forced(parts=True)
    # Native code adds a bias at equally spaced positions alone, and so not where rows or columns are listed.
    bias = biases.alibi(4) if mask in MASKS[:3] else None
    seen = regard.observe(*tensors, *LENSES.values(), mask=mask, bias=bias, softcap=5.0)
    assert len(calls) == 1
    problem = make_problem(*(tensor.double() for tensor in tensors), mask=mask, bias=bias, softcap=5.0)
    true = problem.scores().softmax(-1).nan_to_num(0.0)
    close = {"atol": 2e-6, "rtol": 1e-5, "check_dtype": False}
    torch.testing.assert_close(seen[LENSES["weights"]], true, **close)
    torch.testing.assert_close(seen[LENSES["received"]], true.sum(-2), **close)
    torch.testing.assert_close(seen[LENSES["entropy"]], -torch.special.xlogy(true, true).sum(-1), **close)
    torch.testing.assert_close(seen[LENSES["topk"]].weights, true.topk(4).values, **close)


@pytest.mark.parametrize("queries", [LENGTH - 40, LENGTH + 30])
def test_other_numbers_of_queries_and_batches_of_two_axes(queries, forced):
    mask, tensors = MASKS[0], inputs(2, 2, queries=queries)
    chosen = [LENSES["pooled"], LENSES["entropy"], LENSES["topk"]]
    forced(parts=False)
    expected = regard.observe(*tensors, *chosen, mask=mask)
    forced(parts=True)
    found = regard.observe(*tensors, *chosen, mask=mask)
    for lens in chosen:
        for has, needs in zip(flat(found[lens]), flat(expected[lens]), strict=True):
            torch.testing.assert_close(has, needs, atol=1e-6, rtol=1e-5)


def test_cells_that_differ_between_residue_classes(forced, monkeypatch):
    """Cells of 7 rows and classes of 16: neighbouring classes fall into other cells, and few cells fit into memory."""
    monkeypatch.setattr(part_reductions, "CELLS_AT_ONCE", 1)
    tensors, lens = inputs(1), lenses.Pooled((48, 48))
    forced(parts=False)
    expected = regard.observe(*tensors, lens, mask=MASKS[0])[lens]
    forced(parts=True)
    torch.testing.assert_close(regard.observe(*tensors, lens, mask=MASKS[0])[lens], expected, atol=1e-6, rtol=1e-5)


def test_nan_and_rows_without_keys(forced):
    tensors, mask = inputs(1), MASKS[0] & masks.padding([300])
    tensors[1][0, 0, 40] = float("nan")
    chosen = [LENSES["entropy"], LENSES["topk"]]
    forced(parts=False)
    expected = regard.observe(*tensors, *chosen, mask=mask)
    forced(parts=True)
    found = regard.observe(*tensors, *chosen, mask=mask)
    for lens in chosen:
        for has, needs in zip(flat(found[lens]), flat(expected[lens]), strict=True):
            torch.testing.assert_close(has, needs, atol=1e-6, rtol=1e-5, equal_nan=True)


def test_parts_are_preferred_where_they_have_fewer_pairs():
    def preferred(mask, length: int) -> bool:
        query = torch.zeros(1, 2, length, 4)
        return part_reductions.prefers_parts(make_problem(query, query, query, mask=mask))

    assert preferred(masks.causal() & masks.fixed(128, 8), 16384)
    assert preferred(masks.causal() & (masks.window(before=128) | masks.strided(128)), 16384)
    assert not preferred(masks.causal() & masks.strided(16), 64)
    assert not preferred(masks.causal(), 4096)
