"""Native attention over few keys against the formula in float64, in each variant and dtype."""

import math

import pytest
import torch
from torch import Tensor

from regard.backends.cpu.library import DTYPES
from regard.backends.cpu.short_rows import LONGEST, ShortInC, _BiasGradient
from regard.core.batched_problem import Saved
from regard.core.finite import CheckedGradients, CheckedRows
from regard.core.row_weights import RowWeights
from regard.errors import DeviceError, DtypeError, ShapeError
from regard.tiles.pair_terms import PairTerms

pytestmark = pytest.mark.usefixtures("built")

SHORT, SCALE = ShortInC(), 0.3
WEIGHTS, CAPPED = RowWeights(SCALE), RowWeights(SCALE, softcap=0.7)
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


def attend(
    tensors: tuple[Tensor, ...],
    spans: Tensor | None = None,
    terms: PairTerms | None = None,
    weights: RowWeights = WEIGHTS,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp."""
    query, key, value = tensors
    rows = SHORT.forward(query, key, value, weights, spans, terms)
    assert rows is not None
    return rows


def differentiate(
    tensors: tuple[Tensor, ...],
    rows: tuple[Tensor, Tensor],
    above: Tensor,
    above_lse: Tensor | None = None,
    spans: Tensor | None = None,
    terms: PairTerms | None = None,
    weights: RowWeights = WEIGHTS,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key and value, and of a bias if there is one, by output and log-sum-exp."""
    (query, key, value), (output, lse) = tensors, rows
    above_lse = torch.zeros_like(lse) if above_lse is None else above_lse
    saved = Saved(output, lse, above, above_lse, needs_bias_grad=terms is not None and is_learned(terms))
    return SHORT.backward(query, key, value, weights, saved, spans, terms)


def attend_alone(
    tensors: tuple[Tensor, Tensor, Tensor], spans: Tensor | None = None, terms: PairTerms | None = None
) -> tuple[Tensor, bool, bool]:
    """The output without log-sum-exps, whether it is finite, and whether gradients without them are exact."""
    found = SHORT.prepare(WEIGHTS, spans, *tensors).forward(spans, *tensors, terms)
    assert found is not None
    return found


def is_learned(terms: PairTerms) -> bool:
    return terms.bias is not None or terms.along is not None


def by_formula(
    tensors: tuple[Tensor, ...],
    keep: Tensor,
    above: Tensor,
    above_lse: Tensor,
    rounded: Tensor,
    dtype: torch.dtype,
    terms: PairTerms | None = None,
    weights: RowWeights = WEIGHTS,
):
    """Output, log-sum-exp, the three gradients, and that of the terms' bias where there is one.

    Gradients are by the output as it was rounded: the sum of a row's gradients is taken from it.
    """
    query, key, value = held = [tensor.to(dtype).requires_grad_() for tensor in tensors]
    group = query.shape[1] // key.shape[1]
    scores = SCALE * (query @ key.repeat_interleave(group, 1).mT)
    if weights.softcap is not None:
        scores = weights.softcap * torch.tanh(scores / weights.softcap)
    if terms is not None and terms.bias is not None:
        held.append(terms.bias.to(dtype).requires_grad_())
        scores = scores + held[3]
        keep = keep & (terms.bias > -math.inf)  # as autograd has NaN for a row of -infinity alone
    elif terms is not None and terms.along is not None:
        held.append(terms.along.to(dtype).requires_grad_())
        scores = scores + held[3].unfold(-1, key.shape[2], 1).flip(-2)
    if terms is not None and terms.keep is not None:
        keep = keep & terms.keep
    scores = scores.masked_fill(~keep, -math.inf)
    lse = scores.logsumexp(-1)
    shares = torch.exp(scores - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    output, kept = shares @ value.repeat_interleave(group, 1), lse.isfinite()
    above = above.to(dtype)
    above_lse = above_lse.to(dtype) - ((rounded.to(dtype) - output.detach()) * above).sum(-1)
    total = (output * above).sum() + (lse[kept] * above_lse[kept]).sum()
    return [output.detach(), lse.detach(), *torch.autograd.grad(total, held)]


def agrees(
    tensors: tuple[Tensor, Tensor, Tensor],
    spans: Tensor | None,
    terms: PairTerms | None = None,
    weights: RowWeights = WEIGHTS,
) -> None:
    """The errors are at most some times those of the formula in float32, and roundings to the dtype."""
    query, key, value = tensors
    output, lse = attend(tensors, spans, terms, weights)
    above, above_lse = torch.randn(output.shape).to(value.dtype), torch.randn(lse.shape)
    keep = pairs_of(spans, query.shape[2], key.shape[2])
    empty = lse == -math.inf
    above_lse = above_lse.masked_fill(empty, 0.0)
    *gradients, of_bias = differentiate(tensors, (output, lse), above, above_lse, spans, terms, weights)
    true, plain = (
        by_formula(tensors, keep, above, above_lse, output, dtype, terms, weights)
        for dtype in (torch.float64, torch.float32)
    )
    assert torch.equal(empty, true[1] == -math.inf)
    found = [output, lse, *gradients]
    if of_bias is not None:
        found.append(of_bias.sum_to_size(true[5].shape))
    # All gradients come from the same weights: that of few numbers of a bias may be exact in the formula by chance.
    worst = max((other - one).abs().max() for one, other in zip(true[2:], plain[2:], strict=True))
    for number, (has, one, other) in enumerate(zip(found, true, plain, strict=True)):
        assert has.shape == one.shape
        one, other = (each.masked_fill(each == -math.inf, 0.0) for each in (one, other))
        error = (other - one).abs().max() if number < 5 else worst
        budget = 5 * error + 4 * torch.finfo(has.dtype).eps * one.abs().max().clamp(min=1.0)
        if number > 1:  # gradients of scores are differences with a row's sum, a product of two rows in float32
            budget += 4 * torch.finfo(torch.float32).eps * (above.double() * output.double()).abs().sum(-1).max()
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
    prepared = SHORT.prepare(WEIGHTS, spans, *tensors)
    output, finite, precise = attend_alone(tensors, spans)
    assert finite
    assert precise
    rows = attend(tensors, spans)
    assert torch.equal(output, rows[0])
    above = torch.randn(output.shape).to(dtype)
    gradients = prepared.backward(spans, *tensors, above)
    assert gradients is not None
    tolerance = 8 * torch.finfo(dtype).eps if dtype is not torch.float32 else 1e-5
    others = differentiate(tensors, rows, above, spans=spans)
    for has, one in zip(gradients[:3], others[:3], strict=True):
        assert (has - one).abs().max() <= tolerance * one.abs().max().clamp(min=1.0)


def terms_of(kind: str, sizes: tuple[int, ...]) -> PairTerms:
    """Numbers by distance, or over pairs with axes of 1; and which pairs exist, of which some rows have none."""
    batch, heads, _, queries, keys, *_ = sizes
    bias = along = keep = None
    if kind in ("by distance", "by distance and kept"):
        along = torch.randn(heads, queries + keys - 1)
    if kind == "by distance for all heads":
        along = torch.randn(1, queries + keys - 1)
    if kind in ("of heads", "of heads and kept"):
        bias = torch.randn(1, heads, queries, keys)
    if kind == "of batches":
        bias = torch.randn(batch, 1, queries, keys)
        bias[torch.rand(bias.shape) < 0.3] = -math.inf
    if kind == "of keys":
        bias = torch.randn(batch, heads, 1, keys)
    if kind == "of queries":
        bias = torch.randn(1, heads, queries, 1)
    if kind in ("kept", "by distance and kept", "of heads and kept"):
        keep = torch.rand(batch, 1, queries, keys) < 0.6
        keep[0, :, ::3] = False
    if kind == "kept for all":
        keep = torch.rand(1, heads, queries, keys) < 0.6
    return PairTerms.for_weights((batch, heads, queries, keys), bias, along, keep)


TERMS = (
    *(
        "by distance",
        "by distance for all heads",
        "by distance and kept",
        "of heads",
        "of heads and kept",
        "of batches",
    ),
    *("of keys", "of queries", "kept", "kept for all"),
)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("sizes", SIZES)
def test_with_terms(variant, sizes, kind, dtype):
    spans = spans_of("causal" if TERMS.index(kind) % 2 else "all", sizes)
    agrees(inputs(sizes, dtype), spans, terms_of(kind, sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "causal", "anywhere"])
@pytest.mark.parametrize("sizes", SIZES)
def test_with_a_softcap(variant, sizes, kind, dtype):
    agrees(inputs(sizes, dtype), spans_of(kind, sizes), None, CAPPED)
    agrees(inputs(sizes, dtype), spans_of(kind, sizes), terms_of("by distance and kept", sizes), CAPPED)


def with_sinks(
    tensors: tuple[Tensor, Tensor, Tensor], sinks: Tensor, keep: Tensor, above: Tensor, dtype: torch.dtype, cap: float
) -> list[Tensor]:
    """Output, gradients and log-sum-exp of the formula, with one more column that has no value.

    The gradients are those of query, key, value and sinks.
    """
    query, key, value, *_ = held = [tensor.to(dtype).requires_grad_() for tensor in (*tensors, sinks)]
    group = query.shape[1] // key.shape[1]
    scores = cap * torch.tanh(SCALE * (query @ key.repeat_interleave(group, 1).mT) / cap)
    scores = scores.masked_fill(~keep, -math.inf)
    column = held[3][:, None, None].expand(*scores.shape[:-1], 1)
    whole = torch.cat([scores, column], -1)
    output = whole.softmax(-1)[..., :-1] @ value.repeat_interleave(group, 1)
    gradients = torch.autograd.grad((output * above.to(dtype)).sum(), held)
    return [output.detach(), *gradients, whole.logsumexp(-1).detach()]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["all", "causal", "padded", "anywhere"])
@pytest.mark.parametrize("sizes", SIZES)
def test_sinks(variant, sizes, kind, dtype):
    """Of any size beside the scores, with a softcap; the gradient is the sum over rows that are many or few."""
    tensors, spans = inputs(sizes, dtype), spans_of(kind, sizes)
    sinks = 4.0 * torch.randn(sizes[1])
    terms = PairTerms.with_sinks(None, sinks)
    prepared = SHORT.prepare(CAPPED, spans, *tensors)
    found = prepared.forward(spans, *tensors, terms)
    assert found is not None
    output, finite, precise = found
    assert finite
    assert precise
    rows = attend(tensors, spans, terms, CAPPED)
    assert torch.equal(rows[0], output)
    above = torch.randn(output.shape).to(dtype)
    gradients = prepared.backward(spans, *tensors, above, terms)
    assert gradients is not None
    assert gradients[3] is None
    assert gradients[4] is not None
    keep = pairs_of(spans, sizes[3], sizes[4])
    true, plain = (with_sinks(tensors, sinks, keep, above, each, 0.7) for each in (torch.float64, torch.float32))
    plain_lse, lse = plain.pop(), true.pop()
    error, magnitude = (plain_lse - lse).abs().max(), lse.abs().max().clamp(min=1.0)
    assert (rows[1].double() - lse).abs().max() <= 5 * error + 4 * torch.finfo(torch.float32).eps * magnitude
    products = (above.double() * true[0]).abs().sum(-1)  # each of which a row's gradient takes from a sum
    for place, (has, one, other) in enumerate(zip((output, *gradients[:3], gradients[4]), true, plain, strict=True)):
        budget = 5 * (other - one).abs().max() + 4 * torch.finfo(has.dtype).eps * one.abs().max().clamp(min=1.0)
        if place:
            budget += (
                4 * torch.finfo(torch.float32).eps * (products.sum((0, 2)).max() if place == 4 else products.max())
            )
        if place and dtype is not torch.float32:  # weights and gradients of scores are rounded to pairs of bfloat16
            budget += 4 * torch.finfo(dtype).eps * one.abs().max()
        assert (has.double() - one).abs().max() <= budget


@pytest.mark.parametrize("sink", [-math.inf, -200.0, 200.0])
def test_sinks_far_from_the_scores(variant, sink):
    """Without any weight, or with all of it; rows without keys too."""
    sizes = (2, 2, 1, 7, 9, 16, 16)
    tensors, spans = inputs(sizes, torch.float32), spans_of("anywhere", sizes)
    terms = PairTerms.with_sinks(None, torch.full((2,), sink))
    prepared = SHORT.prepare(WEIGHTS, spans, *tensors)
    found, plain = (prepared.forward(spans, *tensors, each) for each in (terms, None))
    above = torch.randn(2, 2, 7, 16)
    gradients, others = (prepared.backward(spans, *tensors, above, each) for each in (terms, None))
    assert found is not None
    assert plain is not None
    assert gradients is not None
    assert others is not None
    assert gradients[4] is not None
    assert not gradients[4].any()
    for has, one in zip((found[0], *gradients[:3]), (plain[0], *others[:3]), strict=True):
        assert torch.equal(has, one if sink < 0 else torch.zeros_like(one))


@pytest.mark.parametrize("kind", TERMS)
def test_terms_without_log_sum_exps(variant, kind):
    sizes = (3, 4, 2, 25, 29, 19, 16)
    tensors, terms, spans = inputs(sizes, torch.float32), terms_of(kind, sizes), spans_of("padded", sizes)
    prepared = SHORT.prepare(WEIGHTS, spans, *tensors)
    output, finite, precise = attend_alone(tensors, spans, terms)
    rows = attend(tensors, spans, terms)
    assert finite
    assert precise
    assert torch.equal(output, rows[0])
    above = torch.randn(output.shape)
    gradients = prepared.backward(spans, *tensors, above, terms, of_bias=is_learned(terms))
    others = differentiate(tensors, rows, above, spans=spans, terms=terms)
    assert gradients is not None
    assert (gradients[3] is not None) == (others[3] is not None) == is_learned(terms)
    assert gradients[4] is None
    for has, one in zip(gradients[:4], others, strict=True):
        if has is None or one is None:
            continue
        assert (has - one).abs().max() <= 1e-5 * one.abs().max().clamp(min=1.0)


def test_terms_before_nan_in_memory(variant):
    """Of a row of numbers over pairs nothing is read beyond the last key, whatever stands there."""
    sizes = (1, 2, 2, 5, 13, 16, 16)
    tensors, fence = inputs(sizes, torch.float32), torch.full((1, 2, 5, 3), math.nan)
    bias = torch.cat([torch.randn(1, 2, 5, 13), fence], dim=3)[..., :13]
    agrees(tensors, None, PairTerms.for_weights((1, 2, 5, 13), bias, None, None))


def test_a_bias_of_many_batches_is_summed_in_parts(variant):
    """Several units for each head, the last of which has fewer batches; the same sums in every run."""
    sizes = (131, 2, 1, 7, 5, 8, 8)
    tensors, terms = inputs(sizes, torch.float32), terms_of("of heads", sizes)
    agrees(tensors, None, terms)
    rows = attend(tensors, None, terms)
    assert 1 < len(_BiasGradient.empty(terms, tensors[0], tensors[2]).parts) < 131
    first, *others = (differentiate(tensors, rows, rows[0], terms=terms)[3] for _ in range(3))
    assert first is not None
    assert all(other is not None and torch.equal(first, other) for other in others)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "sizes", [(1, 1, 1, 512, 509, 16, 16), (1, 6, 3, 301, 211, 40, 33), (1, 1, 1, 390, 77, 64, 96)]
)
def test_threads_share_the_rows_of_a_head(variant, sizes, dtype):
    """Fewer heads than threads: each takes some of the rows, and gradients of keys and values are summed."""
    for kind in ("all", "causal", "anywhere"):
        agrees(inputs(sizes, dtype), spans_of(kind, sizes))
    agrees(inputs(sizes, dtype), spans_of("causal", sizes), terms_of("by distance and kept", sizes))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("keys", range(1, 20))
def test_few_rows_read_no_key_beyond_the_last(variant, keys, dtype):
    """Keys and values stand before NaN in memory, which a row of a vector that is read too far would meet."""
    query, key, value = inputs((1, 2, 2, 2, keys, 40, 56), dtype)
    fenced = [torch.cat([tensor, torch.full_like(tensor[:, :, :1], math.nan)], dim=2) for tensor in (key, value)]
    key, value = (tensor[:, :, :keys] for tensor in fenced)
    agrees((query, key, value), None)
    rows = attend((query, key, value))
    gradients = differentiate((query, key, value), rows, torch.randn_like(rows[0]))
    assert isinstance(rows, CheckedRows)
    assert isinstance(gradients, CheckedGradients)


def test_a_log_sum_exp_of_more_keys(variant):
    """Gradients of some of the keys of a softmax, as a ring has them: output and log-sum-exp are those of all keys."""
    query, key, value = inputs((2, 2, 2, 9, 21, 16, 16), torch.float32)
    rows = attend((query, key, value))
    above = torch.randn_like(rows[0])
    _, whole_key, whole_value, _ = differentiate((query, key, value), rows, above)
    first, rest = slice(0, 8), slice(8, 21)
    for part in (first, rest):
        _, grad_key, grad_value, _ = differentiate((query, key[:, :, part], value[:, :, part]), rows, above)
        assert torch.allclose(grad_key, whole_key[:, :, part], atol=1e-5)
        assert torch.allclose(grad_value, whole_value[:, :, part], atol=1e-5)


def test_scores_of_minus_infinity(variant):
    """A row whose only score is -infinity has no weight: output 0 and log-sum-exp -infinity."""
    query, key, value = torch.ones(1, 1, 2, 4), torch.full((1, 1, 1, 4), -math.inf), torch.ones(1, 1, 1, 4)
    output, lse = attend((query, key, value))
    assert not output.any()
    assert lse.eq(-math.inf).all()


@pytest.mark.parametrize("queries", range(1, 19))
def test_all_numbers_of_rows(variant, queries):
    """Each number of rows at once has code of its own."""
    agrees(inputs((1, 2, 2, queries, 19, 8, 8), torch.float32), spans_of("causal", (1, 2, 2, queries, 19)))


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 3, 3), (2, 0, 3), (2, 3, 0)])
def test_without_entries(batch, queries, keys):
    query, key, value = inputs((batch, 2, 1, queries, keys, 4, 4), torch.float32)
    output, lse = attend((query, key, value))
    assert torch.equal(output, torch.zeros(batch, 2, queries, 4))
    assert torch.equal(lse, torch.full((batch, 2, queries), -math.inf))
    for gradient in differentiate((query, key, value), (output, lse), output)[:3]:
        assert not gradient.any()


def test_any_strides():
    """As projections leave them: (batch, length, heads, dim); and a last axis that is not contiguous."""
    query, key, value = (
        tensor.transpose(1, 2).contiguous() for tensor in inputs((2, 3, 3, 9, 9, 16, 16), torch.float32)
    )
    transposed = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    agrees(transposed, None)
    gradients = SHORT.prepare(WEIGHTS, None, *transposed).backward(None, *transposed, torch.ones(2, 3, 9, 16))
    assert gradients is not None
    assert [each.stride() for each in gradients[:3]] == [each.stride() for each in transposed]
    strided = [torch.randn(2, 3, 9, 16, 2)[..., 0] for _ in range(3)]
    agrees((strided[0], strided[1], strided[2]), None)


class TestNonfinite:
    def test_what_is_written_is_checked(self, variant):
        query, key, value = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        assert isinstance(attend((query, key, value)), CheckedRows)
        for tensor in (query, key, value):
            entry = tensor[0, 0, 5, 3].item()
            tensor[0, 0, 5, 3] = math.nan
            assert not isinstance(attend((query, key, value)), CheckedRows)
            tensor[0, 0, 5, 3] = entry

    def test_large_scores_are_not_precise(self, variant):
        query, key, value = inputs((1, 1, 1, 20, 9, 16, 16), torch.float32)
        query[0, 0, 17] = 1e5
        key[0, 0, 4] = 1.0
        prepared = SHORT.prepare(WEIGHTS, None, query, key, value)
        output, finite, precise = attend_alone((query, key, value))
        assert finite
        assert not precise
        assert prepared.backward(None, query, key, value, output) is None

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_a_key_of_nan_shows_in_the_log_sum_exp(self, variant, dtype):
        query, key, value = inputs((1, 2, 2, 5, 7, 11, 3), dtype)
        key[0, 0, 3, 2] = math.nan
        output, lse = attend((query, key, value))
        assert lse[0, 0].isnan().all()
        assert output[0, 0].isnan().all()
        assert lse[0, 1].isfinite().all()

    def test_rows_without_nan_are_right(self, variant):
        query, key, value = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        spans = torch.tensor([[0, 4]] * 5 + [[0, 9]] * 4, dtype=torch.int32)[None]
        clean, _ = attend((query, key, value), spans)
        query[0, 0, 2] = math.nan
        output, lse = attend((query, key, value), spans)
        assert output[0, 0, 2].isnan().all()
        assert lse.isnan().nonzero().tolist() == [[0, 0, 2]]
        assert torch.equal(output[0, 0, [0, 1, 3, 4]], clean[0, 0, [0, 1, 3, 4]])

    def test_gradients_are_checked(self, variant):
        tensors = inputs((1, 1, 1, 9, 9, 16, 16), torch.float32)
        rows = attend(tensors)
        above = rows[0].clone()
        gradients = differentiate(tensors, rows, above)
        assert isinstance(gradients, CheckedGradients)
        above[0, 0, 3, 3] = math.inf
        gradients = differentiate(tensors, rows, above)
        assert not isinstance(gradients, CheckedGradients)


class TestErrors:
    def test_dtypes(self):
        query, key, value = inputs((1, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(DtypeError, match="native code takes all as float32, bfloat16 or float16"):
            attend((query, key.bfloat16(), value))

    def test_shapes(self):
        query, key, value = inputs((1, 2, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(
            ShapeError, match=r"they need \(1, 1, 3, 4\) and \(1, 1, 3, 4\), with key heads that divide"
        ):
            attend((query, key[..., :3], value))
        with pytest.raises(ShapeError, match="query has shape .*; it needs four axes"):
            attend((query[0], key, value))

    def test_too_many_keys(self):
        query, key, value = inputs((1, 1, 1, 3, LONGEST + 1, 4, 4), torch.float32)
        with pytest.raises(ShapeError, match=f"at most {LONGEST} keys"):
            attend((query, key, value))

    def test_spans(self):
        tensors = inputs((2, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(
            ShapeError, match=r"spans is torch.int64 \(1, 3, 2\); it needs torch.int32 \(2, 3, 2\), or 1"
        ):
            attend(tensors, torch.zeros(1, 3, 2, dtype=torch.int64))

    def test_terms(self):
        shape = (2, 3, 5, 7)
        with pytest.raises(
            ShapeError, match=r"bias is torch.float32 \(2, 2, 5, 7\); it needs torch.float32 \(2, 3, 5, 7"
        ):
            PairTerms.for_weights(shape, torch.zeros(2, 2, 5, 7), None, None)
        with pytest.raises(ShapeError, match=r"keep is torch.float32 .* it needs torch.bool \(2, 3, 5, 7\), or 1 in"):
            PairTerms.for_weights(shape, None, None, torch.zeros(2, 3, 5, 7))
        with pytest.raises(ShapeError, match=r"along is torch.float32 \(3, 12\); it needs torch.float32 \(3, 11\)"):
            PairTerms.for_weights(shape, None, torch.zeros(3, 12), None)

    def test_devices(self):
        query, key, value = inputs((1, 1, 1, 3, 3, 4, 4), torch.float32)
        with pytest.raises(DeviceError, match="key is on meta; native code runs on the CPU"):
            attend((query, key.to("meta"), value))


@pytest.mark.parametrize("dtype", DTYPES)
def test_keys_behind_all_spans_are_not_read(variant, dtype):
    """Keys and values that no row of a sequence attends to are NaN: neither results nor gradients are."""
    sizes = (3, 4, 2, 25, 61, 40, 33)
    query, key, value = inputs(sizes, dtype)
    lengths = torch.tensor([61, 17, 0])
    last = torch.minimum((torch.arange(25) + 37).expand(3, -1), lengths[:, None])
    spans = torch.stack([torch.zeros_like(last), last], dim=-1).int().contiguous()
    agrees((query.clone(), key.clone(), value.clone()), spans)
    for number, length in enumerate((61, 32, 0)):  # whole vectors of the longest kind are multiplied
        key[number, :, length:], value[number, :, length:] = math.nan, math.nan
    output, lse = attend((query, key, value), spans)
    assert output.isfinite().all()
    gradients = differentiate((query, key, value), (output, lse), torch.randn_like(output), spans=spans)
    assert isinstance(gradients, CheckedGradients)
