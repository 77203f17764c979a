import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu import few_queries, library
from regard.backends.cpu.few_queries import attend_few_queries
from regard.backends.cpu.library import DTYPES
from regard.errors import DeviceError, DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")


def merged(output: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Parts of the keys as one; NaN stays."""
    total = lse.logsumexp(2, keepdim=True)
    shares = torch.exp(lse - total.masked_fill(total == -math.inf, 0.0))
    return (shares.unsqueeze(-1) * output).sum(2), total.squeeze(2)


def formula(query: Tensor, key: Tensor, value: Tensor, scale: float, bias: Tensor | None = None):
    scores = scale * (query @ key.mT) + (0.0 if bias is None else bias)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    return weights @ value, lse


def inputs(batch: int, heads: int, rows: int, columns: int, dim: int, value_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(batch, heads, rows, dim),
        torch.randn(batch, heads, columns, dim),
        torch.randn(batch, heads, columns, value_dim),
    )


def agrees(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None = None, scale: float = 0.3) -> bool:
    """As near to the truth as the formula in float32 is, five times over, and two roundings.

    Where bfloat16 is multiplied in pairs, weights are rounded to it.
    """
    exact = None if bias is None else bias.double()
    truth = formula(query.double(), key.double(), value.double(), scale, exact)
    rounding = torch.zeros(())
    if query.dtype == key.dtype == torch.bfloat16 and library.current().pair_speed():
        rounding = 2.0**-8 * formula(query.double(), key.double(), value.double().abs(), scale, exact)[0]
    usual = formula(query.float(), key.float(), value.float(), scale, bias)
    results = merged(*attend_few_queries(query, key, value, scale, bias))
    for has, true, plain, rounded in zip(results, truth, usual, (rounding, torch.zeros(())), strict=True):
        finite = true.isfinite()
        error = (plain[finite] - true[finite]).abs().amax() if finite.any() else torch.zeros(())
        allowed = 5 * error + 2 * torch.finfo(torch.float32).eps
        assert has.shape == true.shape
        assert has.dtype == torch.float32
        assert torch.equal(has[~finite].double(), true[~finite])
        assert (has - true)[finite].abs().le((allowed + rounded).expand(true.shape)[finite]).all()
    return True


SIZES = [
    (1, 2, 4, 131, 64, 64),
    (2, 3, 1, 257, 128, 128),
    (1, 1, 7, 64, 23, 37),
    (2, 2, 5, 61, 16, 3),
    (1, 5, 64, 67, 67, 129),
    (3, 1, 2, 1, 1, 1),
    (1, 2, 8, 259, 128, 64),
    (2, 1, 6, 65, 64, 128),
    (1, 3, 13, 513, 80, 48),
    (2, 1, 32, 200, 128, 128),
    (1, 2, 9, 130, 1, 70),
    (1, 1, 17, 65, 33, 64),
    (1, 2, 40, 71, 64, 1),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_it_is_the_formula(variant, shape, dtype):
    query, key, value = inputs(*shape)
    assert agrees(query, key.to(dtype), value.to(dtype))
    assert agrees(query.to(dtype), key.to(dtype), value.to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_a_narrow_query_is_widened_before_it_is_scaled(variant, dtype):
    query, key, value = (tensor.to(dtype) for tensor in inputs(1, 2, 4, 131, 128, 128))
    has = merged(*attend_few_queries(query, key, value, 0.3))
    wide = merged(*attend_few_queries(query.float(), key, value, 0.3))
    in_pairs = dtype == torch.bfloat16 and library.current().pair_speed() > 0  # which rounds weights, but no query
    tolerance = 2.0**-7 if in_pairs else 0.0
    for one, other in zip(has, wide, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SIZES)
def test_what_is_added_and_what_is_masked(variant, shape):
    query, key, value = inputs(*shape)
    batch, heads, rows, columns = *query.shape[:3], key.shape[2]
    bias = torch.randn(batch, heads, rows, columns).masked_fill(torch.rand(rows, columns) < 0.5, -math.inf)
    bias[:, :, -1] = -math.inf  # a row that keeps nothing
    assert agrees(query, key, value, bias)
    # one line for all heads, and rows that overlap in memory
    line = torch.randn(rows + columns)
    assert agrees(query, key, value, line.as_strided((batch, heads, rows, columns), (0, 0, 1, 1)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SIZES)
def test_limits_are_a_bias_of_minus_infinity(variant, shape, dtype):
    query, key, value = (tensor.to(dtype) for tensor in inputs(*shape))
    (rows, columns), bias = (shape[2], shape[3]), torch.randn(*shape[:2], shape[2], shape[3])
    for limits in (
        columns - torch.arange(rows, dtype=torch.int32) % columns,
        torch.arange(rows, dtype=torch.int32) * columns // rows,
        torch.full((rows,), columns, dtype=torch.int32),
    ):
        beyond = torch.where(torch.arange(columns) < limits[:, None], 0.0, -math.inf).expand(*shape[:2], -1, -1)
        for added in (None, bias):
            has = merged(*attend_few_queries(query, key, value, 0.3, added, limits))
            expected = merged(*attend_few_queries(query, key, value, 0.3, beyond if added is None else beyond + added))
            torch.testing.assert_close(has, expected, rtol=1e-6, atol=1e-6)


def test_rows_are_the_same_alone_and_among_others(variant):
    """One row, a group of rows and rows in the lanes are three ways through the code."""
    query, key, value = inputs(1, 2, 64, 301, 72, 40)
    output, lse = merged(*attend_few_queries(query, key, value, 0.3))
    for rows in (1, 2, 3, 4, 5, 8, 9, 16, 31, 33, 48):
        some = merged(*attend_few_queries(query[:, :, :rows], key, value, 0.3))
        torch.testing.assert_close(some, (output[:, :, :rows], lse[:, :, :rows]), rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_parts_for_any_number_of_threads(monkeypatch, threads):
    monkeypatch.setattr(few_queries, "LEAST_WORK", 1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for shape in ((1, 1, 3, 777, 24, 24), (1, 7, 1, 200, 64, 64)):
            assert agrees(*inputs(*shape))
        parts = attend_few_queries(*inputs(1, 1, 3, 777, 24, 24), 1.0)[1].shape[2]
        assert (parts > 1) == (threads > 1)
    finally:
        torch.set_num_threads(before)


def test_threads_of_its_own_where_torch_brings_none(monkeypatch):
    monkeypatch.setattr("regard.backends.cpu.threads._team", lambda: None)
    monkeypatch.setattr(few_queries, "LEAST_WORK", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    for _ in range(20):
        assert agrees(*inputs(1, 5, 3, 400, 24, 24))


def test_a_view_of_a_cache_and_transposed_axes():
    cache = torch.randn(2, 2, 3, 300, 40)
    query = torch.randn(2, 3, 2, 40)
    assert agrees(query, cache[0, :, :, 20:271], cache[1, :, :, 20:271])
    late = torch.randn(2, 251, 3, 40).transpose(1, 2)  # (batch, length, heads, dim) in memory
    assert agrees(query, late, late)
    assert agrees(query, late[:1].expand(2, -1, -1, -1), late)
    assert agrees(query, torch.randn(2, 3, 40, 91).mT, torch.randn(2, 3, 91, 80)[..., ::2])


def test_large_scores_keep_their_distance(variant):
    query, key, value = inputs(1, 2, 3, 200, 32, 32)
    assert agrees(100 * query, 100 * key, value, scale=1.0)
    output, lse = merged(*attend_few_queries(query, key, value, 1e30))
    assert output.isfinite().all()
    assert lse.isfinite().all()


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_nan_and_infinity_show_in_the_rows_that_meet_them(variant, where, bad):
    named = dict(zip(("query", "key", "value"), inputs(1, 1, 3, 150, 33, 33), strict=True))
    named[where][0, 0, 1, 5] = bad
    output, _ = merged(*attend_few_queries(**named, scale=1.0))
    rows = ~output.isfinite().all(-1)[0, 0]
    # a key of infinity has a score of -infinity, and no weight, where the query's entry is below 0
    meets = named["query"][0, 0, :, 5] > 0 if where == "key" and bad == math.inf else torch.ones(3, dtype=torch.bool)
    assert torch.equal(rows, torch.tensor([False, True, False]) if where == "query" else meets)


@pytest.mark.parametrize("rows", [3, 12, 40])
def test_keys_of_nan_beyond_the_limits_are_not_seen(variant, rows):
    query, key, value = inputs(1, 1, rows, 150, 33, 33)
    limits = torch.full((rows,), 140, dtype=torch.int32)
    key[0, 0, 145] = math.nan
    assert merged(*attend_few_queries(query, key, value, 1.0, None, limits))[0].isfinite().all()
    key[0, 0, 139] = math.nan
    assert merged(*attend_few_queries(query, key, value, 1.0, None, limits))[0].isnan().all()


def test_no_keys_and_no_rows():
    output, lse = merged(*attend_few_queries(*inputs(2, 3, 2, 0, 8, 8), 1.0))
    assert (output == 0).all()
    assert (lse == -math.inf).all()
    assert attend_few_queries(*inputs(2, 3, 0, 5, 8, 8), 1.0)[0].numel() == 0


def test_what_does_not_fit():
    query, key, value = inputs(1, 2, 3, 50, 8, 8)
    with pytest.raises(DtypeError, match=r"key is torch.float16 and value torch.float32.*pass key.float\(\)"):
        attend_few_queries(query, key.half(), value, 1.0)
    with pytest.raises(DtypeError, match=r"bias is torch.float64; .* pass bias.float\(\)"):
        attend_few_queries(query, key, value, 1.0, torch.zeros(1, 2, 3, 50, dtype=torch.float64))
    with pytest.raises(DtypeError, match=r"limits are torch.int64; .* pass limits.int\(\)"):
        attend_few_queries(query, key, value, 1.0, None, torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ShapeError, match=r"limits have shape \(2,\); 3 rows need \(3,\)"):
        attend_few_queries(query, key, value, 1.0, None, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ShapeError, match="query has 65 rows; native code takes at most 64"):
        attend_few_queries(torch.zeros(1, 2, 65, 8), key, value, 1.0)
    with pytest.raises(ShapeError, match=r"key has shape \(1, 2, 50, 7\).*it needs \(1, 2, 50, 8\)"):
        attend_few_queries(query, key[..., :7], value, 1.0)
    with pytest.raises(ShapeError, match="value has shape .* it needs four axes"):
        attend_few_queries(query, key, value[0], 1.0)
    with pytest.raises(DeviceError, match="query is on meta"):
        attend_few_queries(query.to("meta"), key, value, 1.0)
