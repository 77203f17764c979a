"""The gradients of attention by additive scores, all of them natively, beside autograd of the formula."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.additive_tiles import AdditiveBackward, AdditiveForward, AdditiveScores
from regard.backends.cpu.library import DTYPES
from regard.errors import DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)

Tensors = tuple[Tensor, ...]


def plain(
    query: Tensor,
    key: Tensor,
    weight: Tensor,
    value: Tensor,
    softcap: float | None = None,
    bias: Tensor | None = None,
    dropout_mask: Tensor | None = None,
    keep_probability: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp by the formula, in the dtype of the query; 0 for rows without pairs."""
    key, value = (tensor.repeat_interleave(query.shape[0] // key.shape[0], 0) for tensor in (key, value))
    scores = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3)) @ weight
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.flatten(0, 1).to(scores.dtype)
    none = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(none, 0.0)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.unsqueeze(-1)).masked_fill(none, 0.0)
    if dropout_mask is not None:
        weights = weights * dropout_mask.flatten(0, 1).to(scores.dtype) / keep_probability
    return weights @ value, lse.masked_fill(none.squeeze(-1), math.inf)


def by_autograd(given: Tensors, upstream: Tensors, dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """Output and lse, and the gradients of all tensors and of the bias, in a dtype."""
    leaves = [tensor.to(dtype).requires_grad_() for tensor in given]
    bias = options.pop("bias", None)
    if bias is not None:
        leaves.append(bias := bias.to(dtype).requires_grad_())
    output, lse = plain(leaves[0], leaves[1], leaves[2], leaves[3], bias=bias, **options)
    rows = lse.isfinite()
    total = (output * upstream[0].to(dtype)).sum() + (lse * upstream[1].to(dtype))[rows].sum()
    return [output.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


def natively(given: Tensors, upstream: Tensors, *, split: bool = False, **options: Any) -> list[Tensor]:
    query, key, weight, value = given
    scores = AdditiveScores(query, key, weight)
    pairs = {name: options.pop(name) for name in ("bias", "dropout_mask") if options.get(name) is not None}
    forward = AdditiveForward(scores, value, **options)
    forward.add(**pairs)
    lse = forward.lse.masked_fill(forward.lse == -math.inf, math.inf)
    grad_lse = upstream[1].masked_fill(lse == math.inf, 0.0)
    work = AdditiveBackward(scores, value, forward.output, lse, upstream[0], grad_lse, **options)
    rows, columns = query.shape[1], key.shape[1]
    of_bias = torch.zeros(len(query), rows, columns)
    cuts = ((0, rows // 2), (rows // 2, rows)) if split else ((0, rows),)
    for top, bottom in cuts:
        for left, right in ((0, 70), (70, columns)) if split else ((0, columns),):
            tile = slice(top, bottom), slice(left, right)
            own = {name: tensor[:, :, *tile] for name, tensor in pairs.items()}
            gradient = work.add(*tile, **own, wants_bias_gradient="bias" in pairs)
            if gradient is not None:
                of_bias[:, *tile] = gradient
    found = [forward.output, lse, *work.result()]
    return [*found, of_bias.view_as(pairs["bias"])] if "bias" in pairs else found


def near(given: Tensors, upstream: Tensors, **options: Any) -> bool:
    """At most five times as far from the truth as autograd in float32, and a rounding of the largest number.

    Of 16 bits, the output is rounded, and so are weights where they are multiplied in pairs: half a unit in the last
    place of the largest number, or of 1, which is the size of all entries.
    """
    split = options.pop("split", False)
    has = natively(given, upstream, split=split, **dict(options))
    truths, usuals = (by_autograd(given, upstream, dtype, **dict(options)) for dtype in (torch.float64, torch.float32))
    dtype = given[0].dtype
    for at, (ours, usual, truth) in enumerate(zip(has, usuals, truths, strict=True)):
        assert ours.shape == truth.shape
        assert ours.dtype == (dtype if at == 0 else torch.float32)
        some = truth.isfinite()
        assert torch.equal(ours[~some].double(), truth[~some])
        largest = truth[some].abs().amax() if some.any() else 0.0
        allowed = 5 * (usual - truth)[some].abs().amax() if some.any() else 0.0
        allowed = allowed + 5 * torch.finfo(torch.float32).eps * largest
        if dtype != torch.float32 and at != 1:
            allowed = allowed + torch.finfo(dtype).eps / 2 * (largest + 1)
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
    dtype: torch.dtype = torch.float32,
    size: float = 1.0,
) -> tuple[Tensors, Tensors]:
    query, key = size * torch.randn(heads, rows, features), size * torch.randn(key_heads, columns, features)
    weight = torch.randn(features) / math.sqrt(max(features, 1))
    value, upstream = torch.randn(key_heads, columns, dim), torch.randn(heads, rows, dim)
    given = query.to(dtype), key.to(dtype), weight, value.to(dtype)
    return given, (upstream.to(dtype), torch.randn(heads, rows))


SIZES = [
    *[(2, 2, 37, 131, 23, 29), (1, 1, 1, 1, 1, 1), (3, 3, 5, 64, 16, 32), (1, 1, 3, 257, 67, 7), (7, 7, 1, 61, 19, 5)],
    *[(1, 1, 2, 129, 128, 128), (2, 2, 11, 7, 5, 3), (6, 2, 19, 67, 33, 64), (4, 1, 1, 67, 9, 13)],
]


@dtypes
@pytest.mark.parametrize("shape", SIZES)
def test_gradients(variant, shape, dtype):
    assert near(*inputs(*shape, dtype=dtype))


@dtypes
@pytest.mark.parametrize("size", [0.01, 0.3, 10.0])
def test_small_and_large_entries(variant, size, dtype):
    assert near(*inputs(2, 1, 37, 149, 64, 17, dtype, size))


@dtypes
@pytest.mark.parametrize("leading", [(1, 6), (2, 3)])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_mask_bias_dropout_and_softcap_over_tiles(variant, leading, softcap, dtype):
    given, upstream = inputs(6, 3, 37, 131, 23, 29, dtype)
    dropout_mask = (torch.rand(*leading, 37, 131) > 0.3).float()
    bias = torch.randn(*leading, 37, 131).masked_fill(torch.rand(*leading, 37, 131) > 0.6, -math.inf)
    bias[0, 0, ::3] = -math.inf  # rows without pairs
    bias[:, :, :, 64:128] = -math.inf  # a strip without pairs
    options = {"bias": bias, "dropout_mask": dropout_mask, "keep_probability": 0.7, "softcap": softcap}
    assert near(given, upstream, **options, split=True)


@pytest.mark.parametrize("shape", [(2, 2, 0, 5, 7, 2), (2, 1, 3, 0, 7, 2), (2, 2, 3, 5, 0, 2), (2, 2, 3, 5, 7, 0)])
@dtypes
def test_nothing_at_all(variant, shape, dtype):
    given, upstream = inputs(*shape, dtype=dtype)
    has = natively(given, upstream)[2:]
    assert [tensor.shape for tensor in has] == [tensor.shape for tensor in given]
    assert all(bool(tensor.isfinite().all()) for tensor in has)
    if shape[4] == 0:  # equal weights of all keys
        expected = upstream[0].float().sum(1, keepdim=True).expand(2, 5, 2) / 5
        torch.testing.assert_close(has[3], expected, rtol=1e-2, atol=1e-2)


@dtypes
def test_rows_without_a_part_read_nothing(variant, dtype):
    """Where lse is +inf a row has no weights, whatever its scores are."""
    given, upstream = inputs(1, 1, 11, 70, 8, 5, dtype)
    scores = AdditiveScores(*given[:3])
    output, lse = torch.zeros(1, 11, 5, dtype=dtype), torch.full((1, 11), math.inf)
    work = AdditiveBackward(scores, given[3], output, lse, upstream[0], torch.zeros(1, 11))
    work.add()
    assert all(bool((gradient == 0).all()) for gradient in work.result())


def test_strided_rows(variant):
    given, upstream = inputs(4, 2, 19, 131, 9, 5)
    wide = torch.randn(131, 2, 80)[..., 7:12].transpose(0, 1)
    assert near((*given[:3], wide), (torch.randn(4, 5, 19).mT, upstream[1]))
    assert near((*given[:3], wide), (torch.randn(1, 1, 5).expand(4, 19, 5), upstream[1]))


@dtypes
@pytest.mark.parametrize("shape", [(1, 1, 311, 131, 31, 17), (6, 3, 90, 70, 31, 64), (8, 4, 1, 500, 64, 8)])
def test_threads_change_the_last_bits_alone(shape, dtype, monkeypatch):
    given, upstream = inputs(*shape, dtype=dtype)
    for count in (1, 2, 3, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=count: count)
        assert near(given, upstream)


def test_what_does_not_fit():
    (query, key, weight, value), (upstream, grad_lse) = inputs(2, 2, 3, 5, 4, 7)
    scores, lse = AdditiveScores(query, key, weight), torch.zeros(2, 3)
    with pytest.raises(ShapeError, match=r"grad_output has shape \(2, 2, 7\); it needs to be \(2, 3, 7\)"):
        AdditiveBackward(scores, value, upstream, lse, upstream[:, :2], grad_lse)
    with pytest.raises(DtypeError, match=r"output is torch.bfloat16; native code takes query, key and value all as"):
        AdditiveBackward(scores, value, upstream.bfloat16(), lse, upstream, grad_lse)
    with pytest.raises(DtypeError, match=r"lse is torch.float64"):
        AdditiveBackward(scores, value, upstream, lse.double(), upstream, grad_lse)
    work = AdditiveBackward(scores, value, upstream, lse, upstream, grad_lse)
    with pytest.raises(ShapeError, match=r"bias has shape \(1, 2, 3, 4\); the tile needs"):
        work.add(bias=torch.zeros(1, 2, 3, 4))
