import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.additive_tiles import DIRECT, EXPONENTIALS, FEW_QUERIES, TANGENTS, AdditiveScores
from regard.backends.cpu.library import DTYPES
from regard.errors import DtypeError, ShapeError


def all_scores(query: Tensor, key: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
    """The scores of all pairs, (H, M, N)."""
    return AdditiveScores(query, key, weight).scores(out=out)


pytestmark = pytest.mark.usefixtures("built")


def plain(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    key = key.repeat_interleave(query.shape[0] // max(key.shape[0], 1), 0)
    return torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight


def near(has: Tensor, query: Tensor, key: Tensor, weight: Tensor) -> bool:
    """At most five times as far from the truth as the plain formula in float32, and a rounding of the largest term."""
    truth = plain(query.double(), key.double(), weight.double())
    usual = (plain(query.float(), key.float(), weight).double() - truth).abs().amax()
    allowed = 5 * usual + torch.finfo(torch.float32).eps * weight.abs().amax()
    return has.dtype == torch.float32 and has.shape == truth.shape and bool(((has - truth).abs() <= allowed).all())


def inputs(
    heads: int, rows: int, columns: int, features: int, size: float = 1.0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    weight = torch.randn(features) / math.sqrt(max(features, 1))
    query, key = size * torch.randn(heads, rows, features), size * torch.randn(heads, columns, features)
    return query.to(dtype), key.to(dtype), weight


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


SIZES = [
    (2, 37, 131, 23),
    (1, 1, 1, 1),
    (3, 5, 64, 16),
    (1, 3, 257, 67),
    (7, 1, 61, 19),
    (1, 2, 129, 128),
    (2, 11, 7, 5),
]


@dtypes
@pytest.mark.parametrize("shape", SIZES)
def test_scores(variant, shape, dtype):
    query, key, weight = inputs(*shape, dtype=dtype)
    assert near(all_scores(query, key, weight), query, key, weight)


@pytest.mark.parametrize("size", [1e-3, 0.01, 0.1, 0.3, 1, 3, 10, 30, 100])
@dtypes
def test_scores_of_small_and_large_entries(variant, size, dtype):
    query, key, weight = inputs(2, 67, 149, 64, size, dtype)
    assert near(all_scores(query, key, weight), query, key, weight)


@pytest.mark.parametrize("shape", [(0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0), (0, 0, 0, 0)])
def test_nothing_at_all(variant, shape):
    query, key, weight = inputs(*shape)
    scores = all_scores(query, key, weight)
    assert torch.equal(scores, torch.zeros(shape[:3]))


def test_each_form_is_taken(variant):
    def form(rows: int, size: float) -> int:
        query, key = torch.full((1, rows, 3), size), torch.full((1, 9, 3), -size)
        return AdditiveScores(query, key, torch.ones(3)).work.form

    assert form(FEW_QUERIES, 1.0) == DIRECT
    assert form(FEW_QUERIES + 1, 1.0) == TANGENTS
    assert form(FEW_QUERIES + 1, 1.01) == EXPONENTIALS
    assert form(FEW_QUERIES + 1, math.nan) == EXPONENTIALS


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize(
    ("x", "y"),
    [
        *[(15.0, -14.0), (-14.0, 15.0), (21.0, 21.0), (-21.0, -21.0), (42.9, -42.5), (43.1, -42.9), (43.0, -33.0)],
        *[
            (44.0, -32.9),
            (60.0, 60.0),
            (60.0, -59.0),
            (-60.0, 59.0),
            (1e4, 1e4),
            (1e4, -1e4),
            (-1e4, 9999.5),
            (1e4, 3.0),
        ],
        *[(0.5, 3e38), (-3e38, 3e38), (0.0, 0.0), (-0.0, 1e-38), (1.0, -1.0), (1.001, -1.0)],
    ],
)
def test_the_sum_decides_and_not_its_parts(variant, rows, x, y):
    query, key, weight = torch.full((1, rows, 7), x), torch.full((1, 70, 7), y), torch.arange(7.0) - 2.5
    query[:, :, 1::2], key[:, ::3] = 0.25, 0.5
    assert near(all_scores(query, key, weight), query, key, weight)


@pytest.mark.parametrize(("x", "y"), [(5.0, 5.0), (5.01, 5.0), (8.0, 8.0), (12.0, 9.0), (21.0, 21.0), (15.0, -14.0)])
def test_the_same_in_all_features(variant, x, y):
    """Products of four powers are as large as they come: from x + y = 11 on they would overflow."""
    query, key, weight = torch.full((1, 5, 9), x), torch.full((1, 70, 9), y), torch.randn(9)
    key[:, ::3] = -y
    assert near(all_scores(query, key, weight), query, key, weight)


def test_large_keys_among_small_ones(variant):
    query, key, weight = inputs(2, 13, 300, 33)
    key[0, 70] *= 1e3
    key[1, 299, 5] = -50.0
    query[0, 7] *= 100
    assert near(all_scores(query, key, weight), query, key, weight)


@pytest.mark.parametrize("rows", [2, 13])
@pytest.mark.parametrize("size", [0.01, 1.0, 40.0])
def test_nan_stays_in_its_row_and_column(variant, rows, size):
    query, key, weight = inputs(2, rows, 150, 33, size)
    clean = all_scores(query, key, weight)
    query[0, 1, 3], key[1, 77, 32] = math.nan, math.nan
    scores = all_scores(query, key, weight)
    spoilt = torch.zeros_like(scores, dtype=torch.bool)
    spoilt[0, 1], spoilt[1, :, 77] = True, True
    assert scores[spoilt].isnan().all()
    torch.testing.assert_close(scores[~spoilt], clean[~spoilt], rtol=0, atol=1e-5)


def test_infinite_entries_are_taken_to_one(variant):
    query, key, weight = inputs(1, 5, 70, 8)
    query[0, 1, 3], key[0, 50, 3], key[0, 51, 2] = math.inf, math.inf, -math.inf
    assert near(all_scores(query, key, weight), query, key, weight)
    key[0, 50, 3] = -math.inf
    scores = all_scores(query, key, weight)
    assert scores.isnan().nonzero().tolist() == [[0, 1, 50]]


@pytest.mark.parametrize("value", [1e35, 1e30, 1e-30, math.inf, math.nan])
def test_weights_of_any_size(variant, value):
    query, key, weight = inputs(1, 5, 70, 9)
    weight[4] = value
    truth = plain(query, key, weight)
    torch.testing.assert_close(all_scores(query, key, weight), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_strided_heads_and_rows_and_groups(variant):
    weight = torch.randn(19)
    projected = torch.randn(11, 6, 2 * 19)  # [M, H, 2A]
    query, key = projected[..., :19].transpose(0, 1), torch.randn(3, 19, 150).mT
    assert near(all_scores(query, key, weight), query, key, weight)
    one_key = torch.randn(1, 19).expand(3, 70, 19)
    assert near(all_scores(query, one_key, weight), query, one_key, weight)


@pytest.mark.parametrize("rows", [2, 37])
def test_tiles_are_parts_of_the_whole(variant, rows):
    query, key, weight = inputs(4, rows, 311, 23, 3.0)
    prepared = AdditiveScores(query, key[:2], weight)
    whole = prepared.scores()
    for top, bottom in ((0, 1), (1, rows), (rows, rows), (-1, None)):
        for left, right in ((0, 64), (64, 256), (5, 6), (63, 311), (300, 300), (130, 140)):
            tile = prepared.scores(slice(top, bottom), slice(left, right))
            torch.testing.assert_close(tile, whole[:, top:bottom, left:right], rtol=0, atol=1e-6)


def test_out_is_written_and_nothing_beside_it(variant):
    query, key, weight = inputs(2, 5, 150, 9)
    around = torch.full((2, 7, 160), math.nan)
    out = around[:, 1:6, 3:153]
    assert all_scores(query, key, weight, out=out) is out
    assert near(out, query, key, weight)
    assert around.isnan().sum() == around.numel() - out.numel()


@pytest.mark.parametrize("shape", [(1, 3, 5000, 31), (3, 700, 90, 31), (1, 1, 70000, 16)])
def test_threads_change_nothing(shape, monkeypatch):
    query, key, weight = inputs(*shape)
    each = []
    for count in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        each.append(all_scores(query, key, weight))
    assert torch.equal(each[0], each[1])
    assert torch.equal(each[0], each[2])


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        (lambda q, k, w: (q.double(), k, w), DtypeError, r"query is torch.float64; .* pass query.float\(\)"),
        (lambda q, k, w: (q, k[0], w), ShapeError, r"key has shape \(5, 4\); it needs to be \(Hk, N, A\)"),
        (lambda q, k, w: (q, k, w[:3]), ShapeError, "have 4, 4 and 3 features; they need the same number"),
        (lambda q, k, w: (q[:1], k, w), ShapeError, "query has 1 heads and key 2; those of key need to divide them"),
        (lambda q, k, w: (q, k[:0], w), ShapeError, "query has 2 heads and key 0"),
    ],
)
def test_inputs_that_do_not_fit(change, error, match):
    with pytest.raises(error, match=match):
        AdditiveScores(*change(*inputs(2, 3, 5, 4)))


def test_outputs_that_do_not_fit():
    prepared = AdditiveScores(*inputs(2, 3, 5, 4))
    with pytest.raises(
        ShapeError, match=r"out has shape \(2, 3, 4\); the tile needs \(2, 3, 5\): heads, rows, columns"
    ):
        prepared.scores(out=torch.empty(2, 3, 4))
    with pytest.raises(ShapeError, match=r"its last axis must be contiguous: pass out.contiguous\(\)"):
        prepared.scores(out=torch.empty(2, 5, 3).mT)
    with pytest.raises(ShapeError, match="every 2th row or column is asked for"):
        prepared.scores(rows=slice(0, 3, 2))
