"""Products with a vector for each distance, and sums of such vectors, in C, against float64, number by number."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, native
from regard.backends.cpu import looked_up_rows
from regard.backends.cpu.looked_up_rows import DistancesInC
from regard.biases.distance_index import ClippedDistances, DistanceIndex, LogBuckets
from regard.biases.distance_products import DistanceProduct, WeightedVectors

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")


def of_pairs(product: DistanceProduct, queries: int, keys: int, scale: float) -> Tensor:
    """Scale · rows · vectors[index(distance)], as a sum over features for each pair."""
    distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    chosen = product.vectors[:, product.index(distances)]  # [H, M, N, D]
    rows = product.rows[:, :, None, :, :] if product.by_key else product.rows[:, :, :, None, :]
    return scale * (rows * chosen).sum(-1)


def assert_within_roundings(found: Tensor, products: list[DistanceProduct], queries: int, keys: int) -> None:
    """Each number is a sum of D products, scaled by a rounded number, and added to another: D + 3 roundings."""
    wide = [each._replace(rows=each.rows.double(), vectors=each.vectors.double()) for each in products]
    sizes = [each._replace(rows=each.rows.abs(), vectors=each.vectors.abs()) for each in wide]
    expected, most = (sum(of_pairs(each, queries, keys, 0.3) for each in given) for given in (wide, sizes))
    roundings = products[0].rows.shape[-1] + 3
    assert bool(((found.double() - expected).abs() <= roundings * 2**-24 * most).all())


CASES: dict[str, tuple[DistanceIndex, int]] = {
    "clipped": (ClippedDistances(5, 2), 4),
    "of all heads": (ClippedDistances(5, 2), 1),
    "one vector": (ClippedDistances(0, 0), 4),
    "more than pairs": (ClippedDistances(60, 1), 4),
    "buckets": (LogBuckets(8, 20), 4),
}


@pytest.mark.parametrize("dim", [1, 7, 16, 37])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_those_of_the_pairs(name, dim):
    torch.manual_seed(0)
    (index, heads), queries, keys = CASES[name], 11, 13
    of_queries, of_keys = (torch.randn(2, 4, length, dim) for length in (queries, keys))
    vectors = torch.randn(heads, index.count, dim)
    first, second = DistanceProduct(of_queries, vectors, index), DistanceProduct(of_keys, -vectors, index, by_key=True)
    for products in ([first], [second], [first, second]):
        found = DistancesInC().sum_of_pairs(products, queries, keys, 0.3)
        assert found.shape == (2, 4, queries, keys)
        assert_within_roundings(found, products, queries, keys)


def test_rows_and_vectors_of_any_strides():
    torch.manual_seed(0)
    index = ClippedDistances(3, 3)
    rows, vectors = torch.randn(11, 9, 4, 2).permute(3, 2, 0, 1), torch.randn(9, 7, 4).permute(2, 1, 0)
    by_head = torch.randn(2, 11, 4, 9).transpose(1, 2)
    for product in (DistanceProduct(rows, vectors, index), DistanceProduct(by_head, vectors, index, by_key=True)):
        assert_within_roundings(DistancesInC().sum_of_pairs([product], 11, 11, 0.3), [product], 11, 11)


@pytest.mark.parametrize("dim", [1, 7, 16, 83])
@pytest.mark.parametrize("name", CASES)
def test_vectors_are_added_by_weight(name, dim):
    """Each number is a sum of N weighted vectors and what is there: N + 2 roundings of the sum of all sizes."""
    torch.manual_seed(0)
    (index, heads), queries, keys = CASES[name], 11, 13
    together = torch.randn(2, 4, queries, dim + keys)  # rows and weights side by side, with gaps
    vectors = torch.randn(heads, index.count, dim)
    given = WeightedVectors(together[..., dim:], vectors, index, together[..., :dim])
    distances = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]

    def total(weights: Tensor, vectors: Tensor, added: Tensor) -> Tensor:
        return added + (weights.unsqueeze(-1) * vectors[:, index(distances)]).sum(-2)

    wide = [each.double() for each in (given.weights, vectors, given.added)]
    bound = (keys + 2) * 2**-24 * total(*(each.abs() for each in wide))
    for found in (DistancesInC().total(given), given.total()):
        assert bool(((found.double() - total(*wide)).abs() <= bound).all())


def test_weights_and_vectors_of_any_strides_are_added():
    torch.manual_seed(0)
    index = ClippedDistances(3, 3)
    weights, vectors = torch.randn(11, 11, 4, 2).permute(3, 2, 1, 0), torch.randn(9, 7, 4).permute(2, 1, 0)
    given = WeightedVectors(weights, vectors, index, torch.randn(2, 11, 9, 4).permute(0, 3, 1, 2))
    dense = WeightedVectors(weights.contiguous(), vectors.contiguous(), index, given.added.contiguous())
    assert torch.equal(DistancesInC().total(given), DistancesInC().total(dense))


def test_what_it_leaves_to_torch(monkeypatch):
    code, index = DistancesInC(), ClippedDistances(3, 3)
    rows, vectors = torch.randn(1, 4, 11, 8), torch.randn(4, 7, 8)

    def takes(rows: Tensor, vectors: Tensor, index: DistanceIndex = index) -> bool:
        return code.takes([DistanceProduct(rows, vectors, index)], 11, 11)

    assert takes(rows, vectors)
    assert not takes(rows.double(), vectors)
    assert not takes(rows, vectors.clone().requires_grad_())
    assert not takes(rows, torch.randn(2, 7, 8))
    assert not takes(rows, torch.randn(4, 1025, 8), ClippedDistances(1024, 0))
    assert takes(rows, torch.randn(4, 1024, 8), ClippedDistances(1023, 0))
    with torch.autocast("cpu"):
        assert not takes(rows, vectors)
    weights = torch.rand(1, 4, 11, 11)
    assert code.takes_sum(WeightedVectors(weights, vectors, index, rows))
    assert not code.takes_sum(WeightedVectors(weights, vectors, index, rows.double()))
    assert not code.takes_sum(WeightedVectors(weights.clone().requires_grad_(), vectors, index, rows))
    assert not code.takes_sum(WeightedVectors(weights, torch.randn(2, 7, 8), index, rows))
    monkeypatch.setattr(looked_up_rows, "MOST_NUMBERS", 4 * 11 * 11 - 1)
    assert not takes(rows, vectors)
    assert not code.takes_sum(WeightedVectors(weights, vectors, index, rows))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_repeated_calls_without_gradients_take_it(dtype, monkeypatch):
    taken, compute = [], DistancesInC.sum_of_pairs
    monkeypatch.setattr(DistancesInC, "sum_of_pairs", lambda *given: (taken.append(1), compute(*given))[1])
    torch.manual_seed(0)
    inputs = [torch.randn(1, heads, 13, 8).to(dtype) for heads in (4, 2, 2)]
    table = torch.randn(4, 16, 8)
    for make in (
        lambda vectors: biases.shaw(vectors, before=8, after=7),
        lambda vectors: biases.deberta(vectors, vectors, buckets=8, max_distance=20),
    ):
        expected = regard.attention(*(each.double() for each in inputs), bias=make(table.double()), kernel="reference")
        for _ in range(3):
            found = regard.attention(*inputs, bias=make(table))
            within = 1e-5 if dtype is torch.float32 else 2e-2
            torch.testing.assert_close(found.double(), expected, rtol=within, atol=within)
    assert len(taken) >= 4
