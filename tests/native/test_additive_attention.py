import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.additive_tiles import AdditiveForward, AdditiveScores
from regard.backends.cpu.library import DTYPES
from regard.errors import DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def plain(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    value: Tensor,
    softcap: float | None = None,
    bias: Tensor | None = None,
    dropout_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula, in the dtype of the query."""
    key, value = (tensor.repeat_interleave(query.shape[0] // max(key.shape[0], 1), 0) for tensor in (key, value))
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.flatten(0, 1)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)  # no keys at all
    return (weights if dropout_mask is None else weights * dropout_mask.flatten(0, 1)) @ value, lse


def attended(
    query: Tensor, key: Tensor, weight: Tensor, value: Tensor, softcap: float | None = None, **given: Any
) -> tuple[Tensor, Tensor]:
    """The same by native code, all in one tile."""
    result = AdditiveForward(AdditiveScores(query, key, weight), value, softcap)
    result.add(**given)
    return result.output, result.lse


def near(has: tuple[Tensor, Tensor], query: Tensor, key: Tensor, weight: Tensor, value: Tensor, **options: Any) -> bool:
    """At most five times as far from the truth as the formula in float32, and a rounding of the largest number.

    An output of 16 bits may be a rounding of the largest value further off: half of it is its own, and half is that of
    weights that are multiplied as 16 bits, too.
    """
    truths = plain(query.double(), key.double(), weight.double(), value.double(), **options)
    usuals = plain(query.float(), key.float(), weight, value.float(), **options)
    for ours, usual, truth, dtype in zip(has, usuals, truths, (value.dtype, torch.float32), strict=True):
        assert ours.dtype == dtype
        assert ours.shape == truth.shape
        some = truth.isfinite()
        assert torch.equal(ours[~some], truth[~some].to(dtype))
        allowed = 5 * (usual - truth)[some].abs().amax() + torch.finfo(torch.float32).eps * truth[some].abs().amax()
        if dtype != torch.float32:
            allowed += torch.finfo(dtype).eps * value.abs().amax()
        if not bool(((ours - truth)[some].abs() <= allowed).all()):
            return False
    return True


def inputs(
    heads: int,
    key_heads: int,
    rows: int,
    columns: int,
    features: int,
    dim: int,
    size: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> Inputs:
    query, key = size * torch.randn(heads, rows, features), size * torch.randn(key_heads, columns, features)
    weight, value = torch.randn(features) / math.sqrt(max(features, 1)), torch.randn(key_heads, columns, dim)
    return query.to(dtype), key.to(dtype), weight, value.to(dtype)


dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


SIZES = [
    *[(2, 2, 37, 131, 23, 29), (1, 1, 1, 1, 1, 1), (3, 3, 5, 64, 16, 32), (1, 1, 3, 257, 67, 7), (7, 7, 1, 61, 19, 5)],
    *[
        (1, 1, 2, 129, 128, 128),
        (2, 2, 11, 7, 5, 3),
        (6, 2, 19, 67, 33, 64),
        (4, 1, 1, 67, 9, 13),
        (1, 1, 300, 70, 8, 9),
    ],
]


@dtypes
@pytest.mark.parametrize("shape", SIZES)
def test_output_and_lse(variant, shape, dtype):
    given = inputs(*shape, dtype=dtype)
    assert near(attended(*given), *given)


@dtypes
@pytest.mark.parametrize("size", [1e-3, 0.1, 0.3, 1, 3, 10, 30, 100])
def test_small_and_large_entries(variant, size, dtype):
    given = inputs(2, 2, 67, 149, 64, 17, size, dtype)
    assert near(attended(*given), *given)


def test_one_far_above_the_others_and_far_below(variant):
    query, key, weight, value = inputs(1, 1, 11, 200, 8, 5)
    for shift in (200.0, -200.0):
        bias = torch.zeros(1, 1, 11, 200)
        bias[..., ::7] = shift
        bias[:, :, 3, 150] = 2 * shift
        assert near(attended(query, key, weight, value, bias=bias), query, key, weight, value, bias=bias)


@dtypes
@pytest.mark.parametrize(
    "shape", [(0, 0, 3, 5, 7, 2), (2, 2, 0, 5, 7, 2), (2, 1, 3, 0, 7, 2), (2, 2, 3, 5, 0, 2), (2, 2, 3, 5, 7, 0)]
)
def test_nothing_at_all(variant, shape, dtype):
    query, key, weight, value = inputs(*shape, dtype=dtype)
    output, lse = attended(query, key, weight, value)
    wanted = plain(query.float(), key.float(), weight, value.float())
    rtol, atol = (2e-6, 1e-5) if dtype == torch.float32 else (1e-2, 1e-2)
    torch.testing.assert_close((output.float(), lse), wanted, rtol=rtol, atol=atol)
    assert output.dtype == dtype


def test_softcap(variant):
    given = inputs(2, 1, 37, 131, 23, 29, 3.0)
    assert near(attended(*given, softcap=0.7), *given, softcap=0.7)


@dtypes
@pytest.mark.parametrize("leading", [(1, 6), (2, 3), (6, 1)])
def test_added_and_kept(variant, leading, dtype):
    given = inputs(6, 3, 37, 131, 23, 29, dtype=dtype)
    bias, dropout_mask = torch.randn(*leading, 37, 131), (torch.rand(*leading, 37, 131) > 0.3).float()
    bias = bias.masked_fill(torch.rand(bias.shape) > 0.4, -math.inf)
    bias[0, 0, :, 40:] = -math.inf
    assert near(attended(*given, bias=bias, dropout_mask=dropout_mask), *given, bias=bias, dropout_mask=dropout_mask)


def test_given_for_all_heads_alike_and_in_any_order(variant):
    given = inputs(4, 4, 19, 131, 9, 5)
    for bias in (torch.randn(1, 1, 1, 131), torch.randn(2, 1, 19, 1), torch.randn(1, 2, 131, 19).mT):
        bias = bias.expand(2, 2, 19, 131)
        assert near(attended(*given, bias=bias), *given, bias=bias)


def test_rows_without_keys_are_empty(variant):
    given = inputs(1, 1, 20, 131, 9, 5)
    bias = torch.zeros(1, 1, 20, 131)
    bias[:, :, ::3] = -math.inf
    output, lse = attended(*given, bias=bias)
    assert torch.equal(output[:, ::3], torch.zeros(1, 7, 5))
    assert torch.equal(lse[:, ::3], torch.full((1, 7), -math.inf))
    assert near((output, lse), *given, bias=bias)


@pytest.mark.parametrize("size", [0.01, 1.0, 40.0])
def test_nan_stays_with_the_rows_that_meet_it(variant, size):
    query, key, weight, value = inputs(2, 2, 21, 150, 33, 5, size)
    clean = attended(query, key, weight, value)
    query[0, 1, 3], key[1, 77, 32] = math.nan, math.nan
    output, lse = attended(query, key, weight, value)
    spoilt = torch.zeros_like(lse, dtype=torch.bool)
    spoilt[0, 1], spoilt[1] = True, True
    assert output[spoilt].isnan().all()
    assert lse[spoilt].isnan().all()
    torch.testing.assert_close((output[~spoilt], lse[~spoilt]), (clean[0][~spoilt], clean[1][~spoilt]))


def test_nan_in_a_value_stays_in_its_column(variant):
    query, key, weight, value = inputs(1, 1, 21, 150, 33, 5)
    value[0, 149, 2] = math.nan
    output, lse = attended(query, key, weight, value)
    assert output.isnan().any(1).nonzero().tolist() == [[0, 2]]
    assert lse.isfinite().all()


def test_strips_without_pairs_are_not_looked_at(variant):
    query, key, weight, value = inputs(1, 1, 21, 192, 33, 5)
    rest = [*range(64), *range(128, 192)]
    expected = plain(query, key[:, rest], weight, value[:, rest])
    key[:, 64:128], value[:, 64:128] = math.nan, math.nan
    bias = torch.zeros(1, 1, 21, 192)
    bias[..., 64:128] = -math.inf
    torch.testing.assert_close(attended(query, key, weight, value, bias=bias), expected)


@dtypes
@pytest.mark.parametrize("rows", [2, 83])
def test_tiles_add_up(variant, rows, dtype):
    query, key, weight, value = given = inputs(4, 2, rows, 311, 23, 13, 3.0, dtype)
    bias = torch.randn(2, 2, rows, 311)
    result = AdditiveForward(AdditiveScores(query, key, weight), value)
    for top, bottom in ((0, 1), (1, 70), (70, rows)):
        for left, right in ((135, 311), (0, 64), (64, 135), (64, 64)):  # the last one has no columns
            tile = slice(top, bottom), slice(left, right)
            result.add(*tile, bias[:, :, *tile], more=left != right)
    assert near((result.output, result.lse), *given, bias=bias)


def test_tiles_of_16_bits_are_rounded_once(variant):
    """700 tiles of one key each: rounded after each of them, the output would be far off."""
    query, key, weight, value = given = inputs(1, 1, 3, 700, 8, 5, dtype=torch.bfloat16)
    result = AdditiveForward(AdditiveScores(query, key, weight), value)
    for column in range(700):
        result.add(columns=slice(column, column + 1), more=column < 699)
    truth = plain(query.double(), key.double(), weight.double(), value.double())[0]
    torch.testing.assert_close(result.output.double(), truth, rtol=2**-8, atol=2**-9 * truth.abs().amax().item())
    assert near((result.output, result.lse), *given)


@dtypes
def test_the_output_is_divided_by_the_probability(variant, dtype):
    query, key, weight, value = inputs(2, 2, 19, 131, 9, 5, dtype=dtype)
    tiles = AdditiveForward(AdditiveScores(query, key, weight), value / 4, keep_probability=0.25)
    for columns in (slice(0, 70), slice(70, 131)):
        tiles.add(columns=columns, more=columns.start == 0)
    assert near((tiles.output, tiles.lse), query, key, weight, value)


def test_rows_in_no_tile_are_empty():
    query, key, weight, value = inputs(1, 1, 9, 70, 7, 3)
    result = AdditiveForward(AdditiveScores(query, key, weight), value)
    result.add(slice(2, 5))
    assert torch.equal(
        result.lse == -math.inf, torch.tensor([[True, True, False, False, False, True, True, True, True]])
    )
    assert (result.output[result.lse == -math.inf] == 0).all()


def test_strided_values(variant):
    query, key, weight, _ = inputs(4, 2, 19, 131, 9, 5)
    for value in (
        torch.randn(131, 2, 80)[..., 7:72].transpose(0, 1),
        torch.randn(2, 64, 131).mT,
        torch.randn(1, 131, 1),
    ):
        value = value.expand(2, 131, -1)
        assert near(attended(query, key, weight, value), query, key, weight, value)


@pytest.mark.parametrize("shape", [(1, 1, 700, 311, 31, 17), (6, 3, 200, 90, 31, 64), (8, 4, 1, 900, 64, 8)])
def test_threads_change_nothing(shape, monkeypatch):
    given, each = inputs(*shape), []
    for count in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        each.append(attended(*given))
    for more in each[1:]:
        assert torch.equal(each[0][0], more[0])
        assert torch.equal(each[0][1], more[1])


def test_what_does_not_fit():
    query, key, weight, value = inputs(2, 2, 3, 5, 4, 7)
    prepared = AdditiveScores(query, key, weight)
    with pytest.raises(ShapeError, match=r"value has shape \(2, 4, 7\); it needs to be \(Hk, N, Dv\) with \(2, 5\)"):
        AdditiveForward(prepared, value[:, :4])
    for wrong in (value.double(), value.bfloat16()):
        with pytest.raises(
            DtypeError, match=r"value is torch\..*; native code takes query, key and value all as .* pass value"
        ):
            AdditiveForward(prepared, wrong)
    result = AdditiveForward(prepared, value)
    with pytest.raises(ShapeError, match=r"bias has shape \(2, 3, 5\); the tile needs .* with 2 heads and \(3, 5\)"):
        result.add(bias=torch.zeros(2, 3, 5))
    with pytest.raises(
        ShapeError, match=r"dropout_mask has shape \(1, 2, 3, 5\); the tile needs .* with 2 heads and \(1, 5\)"
    ):
        result.add(slice(0, 1), dropout_mask=torch.ones(1, 2, 3, 5))
    with pytest.raises(DtypeError, match="dropout_mask is torch.bool"):
        result.add(dropout_mask=torch.ones(1, 2, 3, 5, dtype=torch.bool))
    with pytest.raises(ShapeError, match="every 2th row or column is asked for"):
        result.add(slice(0, 3, 2))
