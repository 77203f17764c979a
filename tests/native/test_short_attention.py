"""Native attention over few keys against the formula in float64, in each variant and dtype."""

import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.library import DTYPES
from regard.backends.cpu.short_rows import (
    LONGEST,
    FiniteShortGradients,
    attend_laid_out,
    attend_short,
    attend_short_backward,
    differentiate_laid_out,
    layout_of,
)
from regard.core.finite import FiniteRows
from regard.errors import DeviceError, DtypeError, ShapeError

pytestmark = pytest.mark.usefixtures("built")

SCALE = 0.3
SIZES = [  # batch, heads, key heads, queries, keys, dim, value dim
    (2, 4, 2, 25, 25, 64, 64),
    (1, 1, 1, 1, 1, 1, 1),
    (3, 2, 1, 7, 13, 5, 3),
    (1, 2, 2, 100, LONGEST, 16, 40),
    (2, 3, 3, 512, 37, 24, 64),
    (1, 2, 1, 300, 131, 33, 17),
    (2, 2, 2, 17, 16, 16, 32),
    # Few rows of a key head, of which keys are multiplied as they are, with more terms than a vector has.
    (3, 4, 4, 1, 37, 67, 40),
    (2, 6, 3, 2, 19, 40, 72),
    (2, 2, 2, 4, 83, 64, 64),
    (1, 3, 3, 3, 2, 96, 96),
    (1, 2, 2, 2, LONGEST, 13, 16),
    (1, 1, 1, 5, 37, 64, 64),
]


def inputs(sizes: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    batch, heads, shared, queries, keys, dim, value_dim = sizes
    shapes = (heads, queries, dim), (shared, keys, dim), (shared, keys, value_dim)
    query, key, value = (torch.randn(batch, *shape).to(dtype) for shape in shapes)
    return query, key, value


def spans_of(kind: str, sizes: tuple[int, ...]) -> Tensor | None:
    """Causal with padding, or spans that begin anywhere; some are empty."""
    batch, _, _, queries, keys, *_ = sizes
    if kind == "all":
        return None
    first = torch.zeros(batch, queries, dtype=torch.int32)
    last = (torch.arange(queries) + 1 + keys - queries).clamp(0, keys).expand(batch, -1).int()
    if kind == "padded":
        last = torch.minimum(last, torch.randint(0, keys + 1, (batch, 1)).int())
    if kind == "anywhere":
        first = torch.randint(0, keys + 1, (1, queries)).int()
        last = (first + torch.randint(0, 20, (1, queries)).int()).clamp(max=keys)
    return torch.stack([first, last], dim=-1).contiguous()


def pairs_of(spans: Tensor | None, queries: int, keys: int) -> Tensor:
    if spans is None:
        return torch.ones(1, 1, queries, keys, dtype=torch.bool)
    column = torch.arange(keys)
    return ((column >= spans[..., :1]) & (column < spans[..., 1:]))[:, None]


def by_formula(tensors: tuple[Tensor, ...], keep: Tensor, above: Tensor, above_lse: Tensor, dtype: torch.dtype):
    """Output, log-sum-exp and the three gradients."""
    query, key, value = held = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    group = query.shape[1] // key.shape[1]
    scores = SCALE * (query @ key.repeat_interleave(group, 1).mT)
    scores = scores.masked_fill(~keep, -math.inf)
    lse = scores.logsumexp(-1)
    weights = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    output, kept = weights @ value.repeat_interleave(group, 1), lse.isfinite()
    total = (output * above.to(dtype)).sum() + (lse[kept] * above_lse.to(dtype)[kept]).sum()
    return [output.detach(), lse.detach(), *torch.autograd.grad(total, held)]


def agrees(tensors: tuple[Tensor, Tensor, Tensor], spans: Tensor | None) -> None:
    """The errors are at most some times those of the formula in float32, and roundings to the dtype."""
    query, key, value = tensors
    output, lse = attend_short(*tensors, SCALE, spans)
    above, above_lse = torch.randn(output.shape).to(value.dtype), torch.randn(lse.shape)
    keep = pairs_of(spans, query.shape[2], key.shape[2])
    empty = lse == -math.inf
    gradients = attend_short_backward(*tensors, SCALE, spans, lse, above, above_lse.masked_fill(empty, 0.0))
    true, plain = (by_formula(tensors, keep, above, above_lse, dtype) for dtype in (torch.float64, torch.float32))
    assert torch.equal(empty, true[1] == -math.inf)
    for has, one, other in zip((output, lse, *gradients), true, plain, strict=True):
        assert has.shape == one.shape
        one, other = (each.masked_fill(each == -math.inf, 0.0) for each in (one, other))
        budget = 5 * (other - one).abs().max() + 4 * torch.finfo(has.dtype).eps * one.abs().max().clamp(min=1.0)
        assert (has.double().masked_fill(has == -math.inf, 0.0) - one).abs().max() <= budget
    assert all(each.dtype == value.dtype for each in (output, *gradients))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "causal", "padded", "anywhere"])
@pytest.mark.parametrize("sizes", SIZES)
def test_agrees_with_the_formula(variant, sizes, kind, dtype):
    agrees(inputs(sizes, dtype), spans_of(kind, sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "causal", "padded", "anywhere"])
@pytest.mark.parametrize("sizes", SIZES)
def test_without_log_sum_exps(variant, sizes, kind, dtype):
    """Softmax computed again backward: the gradients by log-sum-exps, but for their rounding."""
    tensors, spans = inputs(sizes, dtype), spans_of(kind, sizes)
    layout = layout_of(SCALE, spans, *tensors)
    output, finite, precise = attend_laid_out(layout, spans, *tensors)
    assert finite
    assert precise
    expected, lse = attend_short(*tensors, SCALE, spans)
    assert torch.equal(output, expected)
    above = torch.randn(output.shape).to(dtype)
    gradients = differentiate_laid_out(layout, spans, *tensors, above)
    assert gradients is not None
    tolerance = 8 * torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
    for has, one in zip(gradients, attend_short_backward(*tensors, SCALE, spans, lse, above, None), strict=True):
        assert (has - one).abs().max() <= tolerance * one.abs().max().clamp(min=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", range(1, 20))
def test_few_rows_read_no_key_beyond_the_last(variant, keys, dtype):
    """Keys and values stand before NaN in memory, which a row of a vector that is read too far would meet."""
    query, key, value = inputs((1, 2, 2, 2, keys, 40, 56), dtype)
    fenced = [torch.cat([tensor, torch.full_like(tensor[:, :, :1], math.nan)], dim=2) for tensor in (key, value)]
    key, value = (tensor[:, :, :keys] for tensor in fenced)
    agrees((query, key, value), None)
    rows = attend_short(query, key, value, SCALE)
    above = torch.randn_like(rows[0])
    gradients = attend_short_backward(query, key, value, SCALE, None, rows[1], above, None)
    assert isinstance(rows, FiniteRows)
    assert isinstance(gradients, FiniteShortGradients)


def test_a_log_sum_exp_of_more_keys(variant):
    """Gradients of some of the keys of a softmax, as a ring has them: output and log-sum-exp are those of all keys."""
    query, key, value = inputs((2, 2, 2, 9, 21, 16, 16), torch.float32)
    output, lse = attend_short(query, key, value, SCALE)
    above = torch.randn_like(output)
    _, whole_key, whole_value = attend_short_backward(query, key, value, SCALE, None, lse, above, None)
    first, rest = slice(0, 8), slice(8, 21)
    for part in (first, rest):
        of_part = query, key[:, :, part], value[:, :, part], SCALE, None, lse, above, None, output
        _, grad_key, grad_value = attend_short_backward(*of_part)
        assert torch.allclose(grad_key, whole_key[:, :, part], atol=1e-5)
        assert torch.allclose(grad_value, whole_value[:, :, part], atol=1e-5)


def test_scores_of_minus_infinity(variant):
    """A row whose only score is -infinity has no weight: output 0 and log-sum-exp -infinity."""
    query, key, value = torch.ones(1, 1, 2, 4), torch.full((1, 1, 1, 4), -math.inf), torch.ones(1, 1, 1, 4)
    output, lse = attend_short(query, key, value, SCALE)
    assert not output.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("queries", range(1, 19))
def test_all_numbers_of_rows(variant, queries):
    """Each number of rows at once has code of its own."""
    agrees(inputs((1, 2, 2, queries, 19, 8, 8), torch.float32), spans_of("causal", (1, 2, 2, queries, 19)))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_without_entries(batch, queries, keys):
    query, key, value = inputs((batch, 2, 1, queries, keys, 4, 4), torch.float32)
    output, lse = attend_short(query, key, value, SCALE)
    assert torch.equal(output, torch.zeros(batch, 2, queries, 4))
    assert torch.equal(lse, torch.full((batch, 2, queries), -math.inf))
    for gradient in attend_short_backward(query, key, value, SCALE, None, lse, output, None):
        assert not gradient.any()


def test_any_strides():
    """As projections leave them: (batch, length, heads, dim); and a last axis that is not contiguous."""
    query, key, value = (
        tensor.transpose(1, 2).contiguous() for tensor in inputs((2, 3, 3, 9, 9, 16, 16), torch.float32)
    )
    transposed = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    agrees(transposed, None)
    layout = layout_of(SCALE, None, *transposed)
    gradients = differentiate_laid_out(layout, None, *transposed, torch.ones(2, 3, 9, 16))
    assert gradients is not None
    assert [each.stride() for each in gradients] == [each.stride() for each in transposed]
    strided = [torch.randn(2, 3, 9, 16, 2)[..., 0] for _ in range(3)]
    agrees((strided[0], strided[1], strided[2]), None)


class TestNonfinite:
    def test_what_is_written_is_checked(self, variant):
        query, key, value = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        assert isinstance(attend_short(query, key, value, SCALE), FiniteRows)
        for tensor in (query, key, value):
            entry = tensor[0, 0, 5, 3].item()
            tensor[0, 0, 5, 3] = math.nan
            assert not isinstance(attend_short(query, key, value, SCALE), FiniteRows)
            tensor[0, 0, 5, 3] = entry

    def test_large_scores_are_not_precise(self, variant):
        query, key, value = inputs((1, 1, 1, 20, 9, 16, 16), torch.float32)
        query[0, 0, 17] = 1e5
        key[0, 0, 4] = 1.0
        layout = layout_of(SCALE, None, query, key, value)
        output, finite, precise = attend_laid_out(layout, None, query, key, value)
        assert finite
        assert not precise
        assert differentiate_laid_out(layout, None, query, key, value, output) is None

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_key_of_nan_shows_in_the_log_sum_exp(self, variant, dtype):
        query, key, value = inputs((1, 2, 2, 5, 7, 11, 3), dtype)
        key[0, 0, 3, 2] = math.nan
        output, lse = attend_short(query, key, value, SCALE)
        assert lse[0, 0].isnan().all()
        assert output[0, 0].isnan().all()
        assert lse[0, 1].isfinite().all()

    def test_rows_without_nan_are_right(self, variant):
        query, key, value = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        spans = torch.tensor([[0, 4]] * 5 + [[0, 9]] * 4, dtype=torch.int32)[None]
        clean, _ = attend_short(query, key, value, SCALE, spans)
        query[0, 0, 2] = math.nan
        output, lse = attend_short(query, key, value, SCALE, spans)
        assert output[0, 0, 2].isnan().all()
        assert lse.isnan().nonzero().tolist() == [[0, 0, 2]]
        assert torch.equal(output[0, 0, [0, 1, 3, 4]], clean[0, 0, [0, 1, 3, 4]])

    def test_gradients_are_checked(self, variant):
        tensors = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        above, lse = attend_short(*tensors, SCALE)
        gradients = attend_short_backward(*tensors, SCALE, None, lse, above, None)
        assert isinstance(gradients, FiniteShortGradients)
        above[0, 0, 3, 3] = math.inf
        gradients = attend_short_backward(*tensors, SCALE, None, lse, above, None)
        assert not isinstance(gradients, FiniteShortGradients)


class TestErrors:
    def test_dtypes(self):
        query, key, value = inputs((1, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(DtypeError, match="native code takes all as float32, bfloat16 or float16"):
            attend_short(query, key.bfloat16(), value, SCALE)

    def test_shapes(self):
        query, key, value = inputs((1, 2, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(
            ShapeError, match=r"they need \(1, 1, 3, 4\) and \(1, 1, 3, 4\), with key heads that divide"
        ):
            attend_short(query, key[..., :3], value, SCALE)
        with pytest.raises(ShapeError, match="query has shape .*; it needs four axes"):
            attend_short(query[0], key, value, SCALE)

    def test_too_many_keys(self):
        query, key, value = inputs((1, 1, 1, 3, LONGEST + 1, 4, 4), torch.float32)
        with pytest.raises(ShapeError, match=f"at most {LONGEST} keys"):
            attend_short(query, key, value, SCALE)

    def test_spans(self):
        tensors = inputs((2, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(
            ShapeError, match=r"spans is torch.int64 \(1, 3, 2\); it needs torch.int32 \(2, 3, 2\), or 1"
        ):
            attend_short(*tensors, SCALE, torch.zeros(1, 3, 2, dtype=torch.int64))

    def test_devices(self):
        query, key, value = inputs((1, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(DeviceError, match="key is on meta; native code runs on the CPU"):
            attend_short(query, key.to("meta"), value, SCALE)
