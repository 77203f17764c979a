"""The short kernel: which masks it takes, and that gradients, NaN and second derivatives are those of the others."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import biases, masks, native, normalizers
from regard.core.grid import Grid
from regard.errors import KernelError, MaskError
from regard.kernels import short
from regard.kernels.planning.choice import SHORT, UNVECTORISED, uncompared_kernel
from regard.kernels.validation import make_problem
from regard.masks.padding import Padding
from regard.tiles.row_spans import key_spans

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

QUERIES, KEYS = 11, 13


def tensors(dtype: torch.dtype = torch.float32, *, grad: bool = False) -> list[Tensor]:
    shapes = (2, 4, QUERIES, 16), (2, 2, KEYS, 16), (2, 2, KEYS, 8)
    return [torch.randn(shape, dtype=dtype, requires_grad=grad) for shape in shapes]


MASKS = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.window(before=3, after=2),
    "padding": masks.padding([4, 13]),
    "shared padding": masks.padding([5]),
    "nothing": masks.padding([0, 13]),
    "causal and padding": masks.causal() & masks.padding([4, 13]),
    "three": masks.causal() & masks.window(before=4) & masks.padding([9, 12]),
    "documents": masks.documents(torch.tensor([0] * 4 + [1] * 9)),
}


@pytest.mark.parametrize("name", MASKS)
def test_spans_are_the_pairs_of_the_mask(name):
    query, key, value = tensors()
    problem = regard.explain(query, key, value, mask=MASKS[name]).problem
    spans = key_spans(problem)
    if MASKS[name] is None:
        assert spans is None
        return
    assert spans is not None
    columns = torch.arange(KEYS)
    pairs = (columns >= spans[:, None, :, :1]) & (columns < spans[:, None, :, 1:])
    kept, shape = problem.keep(), problem.weights_shape
    assert kept is not None
    assert torch.equal(pairs.expand(shape), kept.expand(shape))


@pytest.mark.parametrize("positions", [range(5, 5 + QUERIES), range(-3, QUERIES - 3), range(QUERIES)])
def test_spans_at_other_positions(positions):
    query, key, value = tensors()
    keys = range(2, 2 + KEYS)
    options = {"mask": masks.causal() & masks.window(before=4), "query_positions": positions, "key_positions": keys}
    problem = regard.explain(query, key, value, **options).problem
    spans, columns = key_spans(problem), torch.arange(KEYS)
    assert spans is not None
    pairs = (columns >= spans[:, None, :, :1]) & (columns < spans[:, None, :, 1:])
    kept, shape = problem.keep(), problem.weights_shape
    assert kept is not None
    assert torch.equal(pairs.expand(shape), kept.expand(shape))
    output = regard.attention(query, key, value, kernel="short", **options)
    assert torch.allclose(output, regard.attention(query, key, value, kernel="reference", **options), atol=1e-5)


def test_a_changed_mask_is_read_anew():
    lengths = torch.tensor([4, 13])
    query, key, value = tensors()
    mask = Padding(lengths)
    before = regard.attention(query, key, value, mask=mask, kernel="short")
    mask.lengths[0] = 7
    after = regard.attention(query, key, value, mask=mask, kernel="short")
    assert not torch.equal(before[0], after[0])
    assert torch.allclose(after, regard.attention(query, key, value, mask=mask, kernel="reference"), atol=1e-5)


def odd_pairs(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return (q + 2 * k + h) % 3 != b % 2


PAIR_MASKS = {
    "strided": masks.strided(3),
    "or": masks.causal() | masks.window(2, 2),
    "where": masks.where(keep=torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(1)) < 0.5),
    "of queries": masks.where(keep=torch.arange(QUERIES)[:, None] % 3 > 0),
    "documents": masks.documents(torch.tensor([1] * 4 + [0] * 9)),
    "and": masks.padding([4, 13]) & masks.where(ignore=torch.eye(QUERIES, KEYS, dtype=torch.bool)),
    "function": masks.from_mod(odd_pairs, batch=2, heads=4),
}


class Wave(biases.Bias):
    """A bias whose numbers are no function of the distance, with a parameter."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def values(self, grid: Grid) -> Tensor:
        return self.weight * torch.sin((grid.query * grid.key).to(self.weight.dtype))

    def parameters(self) -> tuple[Tensor, ...]:
        return (self.weight,)

    def with_parameters(self, tensors: Sequence[Tensor]) -> "Wave":
        return Wave(*tensors)


BIASES: dict[str, tuple[tuple[int, ...], Callable[[Tensor], biases.Bias]]] = {
    "alibi": ((4,), biases.alibi),
    "table": ((4, 8), lambda table: biases.relative(table, max_distance=6)),
    "clipped": ((1, 6), lambda table: biases.clipped(table, before=3, after=2)),
    "of heads": ((4, QUERIES, KEYS), biases.tensor),
    "of batches": ((2, 1, QUERIES, KEYS), biases.tensor),
    "of keys": ((2, 4, 1, KEYS), biases.tensor),
    "of queries": ((QUERIES, 1), biases.tensor),
    "sum": ((4, 8), lambda table: biases.relative(table, max_distance=6) + biases.tensor(torch.ones(QUERIES, KEYS))),
    "function": ((4,), lambda slope: biases.from_mod(lambda s, b, h, q, k: s + slope[h] * (q * k % 5), heads=4)),
}
"""The shape of the parameter, and the bias of it."""


def results(
    kernel: str, dtype: torch.dtype, learned: Tensor | None, make: Callable | None, **options: Any
) -> list[Tensor]:
    """Output and gradients of query, key, value and the parameter of a bias."""
    torch.manual_seed(0)
    held = [tensor.to(dtype).requires_grad_() for tensor in tensors()]
    if learned is not None and make is not None:
        held.append(learned.to(dtype).requires_grad_())
        options["bias"] = make(held[-1])
    output = regard.attention(*held[:3], kernel=kernel, **options)
    above = torch.randn(output.shape).to(dtype)
    return [output.detach(), *torch.autograd.grad(output, held, above)]


def agrees(learned: Tensor | None, make: Callable | None, **options: Any) -> None:
    """`short` is as near to the formula in float64 as the formula in float32, but for a factor.

    The gradient of a parameter is a sum over all pairs, up to KEYS positions apart, that nearly cancels: its error is
    that of gradients of scores, whose rounding errors add up as random numbers do.
    """
    exact = results("reference", torch.float64, learned, make, **options)
    plain = results("reference", torch.float32, learned, make, **options)
    found = results("short", torch.float32, learned, make, **options)
    scores = results("reference", torch.float64, torch.zeros(2, 4, QUERIES, KEYS), biases.tensor, **options)[4]
    eps = torch.finfo(torch.float32).eps
    for number, (mine, other, true) in enumerate(zip(found, plain, exact, strict=True)):
        budget = 5 * (other - true).abs().max() + 4 * eps * true.abs().max()
        budget += 5 * eps * KEYS * scores.norm() if number == 4 else 0.0
        assert (mine - true).abs().max() <= budget


@pytest.mark.parametrize("name", PAIR_MASKS)
def test_masks_whose_rows_are_no_spans(name):
    assert key_spans(regard.explain(*tensors(), mask=PAIR_MASKS[name]).problem) is None
    agrees(None, None, mask=PAIR_MASKS[name])
    agrees(torch.randn(4), biases.alibi, mask=PAIR_MASKS[name])
    agrees(torch.randn(4, QUERIES, KEYS), biases.tensor, mask=PAIR_MASKS[name])


@pytest.mark.parametrize("mask", [None, "causal and padding", "nothing"])
@pytest.mark.parametrize("name", BIASES)
def test_biases(name, mask):
    shape, make = BIASES[name]
    agrees(torch.randn(shape), make, mask=MASKS[mask] if mask else None)


def test_a_bias_of_a_class_that_is_no_dataclass():
    agrees(torch.tensor(0.7), Wave)


@pytest.mark.parametrize(
    "positions", [range(5, 5 + QUERIES), torch.arange(0, 2 * QUERIES, 2), torch.arange(QUERIES).flip(0)]
)
def test_biases_at_other_positions(positions):
    agrees(torch.randn(4), biases.alibi, query_positions=positions)


def test_a_bias_without_heads_and_over_more_axes():
    for shape in ((3, 7, 5), (2, 3, 4, 7, 5)):
        table = torch.randn(1 if len(shape) == 3 else 4, 8)
        found = []
        for kernel in ("short", "reference"):
            torch.manual_seed(0)
            query, key, value = (torch.randn(shape, requires_grad=True) for _ in range(3))
            learned = table.clone().requires_grad_()
            bias = biases.relative(learned, max_distance=6) + biases.tensor(
                torch.zeros(shape[0], *[1] * (len(shape) - 1))
            )
            output = regard.attention(query, key, value, bias=bias, kernel=kernel)
            found.append([output, *torch.autograd.grad(output.square().sum(), (query, key, value, learned))])
        for mine, other in zip(*found, strict=True):
            assert torch.allclose(mine, other, atol=1e-5)


@pytest.mark.parametrize("name", ["where", "function", "strided"])
def test_nan_behind_a_mask_over_pairs_reaches_nothing(name):
    query, key, value = tensors(grad=True)
    with torch.no_grad():
        key[0, :, 12], value[0, :, 3] = math.inf, math.nan
    learned = torch.randn(4, QUERIES, KEYS, requires_grad=True)
    above = torch.randn(2, 4, QUERIES, 8)
    output, wanted = (
        regard.attention(query, key, value, mask=PAIR_MASKS[name], bias=learned, kernel=kernel)
        for kernel in ("short", "reference")
    )
    assert torch.allclose(output, wanted, atol=1e-5, equal_nan=True)
    gradients, others = (
        torch.autograd.grad(each, (query, key, value, learned), above.masked_fill(wanted.isnan(), 0.0))
        for each in (output, wanted)
    )
    for mine, other in zip(gradients, others, strict=True):
        assert torch.allclose(mine, other, atol=1e-5, equal_nan=True)


def test_a_tensor_bias_that_is_written_to_before_the_gradient_is_an_error():
    query, key, value = tensors(grad=True)
    bias, keep = torch.randn(4, QUERIES, KEYS), torch.ones(QUERIES, KEYS, dtype=torch.bool)
    for changed in (bias, keep):
        output = regard.attention(query, key, value, bias=bias, mask=masks.where(keep=keep), kernel="short")
        changed.copy_(changed.clone())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            output.sum().backward()


def test_second_derivatives_of_a_bias():
    query, key, value = tensors(grad=True)
    learned = torch.randn(4, 8, requires_grad=True)
    found = []
    for kernel in ("short", "reference"):
        output = regard.attention(query, key, value, bias=biases.relative(learned, max_distance=6), kernel=kernel)
        first = torch.autograd.grad(output.square().sum(), (query, learned), create_graph=True)
        total = first[0].square().sum() + first[1].square().sum()
        found.append(torch.autograd.grad(total, (query, key, value, learned)))
    for mine, other in zip(*found, strict=True):
        assert torch.allclose(mine, other, atol=1e-3, rtol=1e-3)


def test_small_problems_with_a_bias_or_any_mask_are_not_compared():
    query, key, value = tensors()
    expected = None if native.variant_in_use() == UNVECTORISED else SHORT
    features: tuple[dict[str, Any], ...] = (
        {"mask": PAIR_MASKS["where"]},
        {"bias": biases.alibi(4)},
        {"bias": torch.zeros(4, QUERIES, KEYS)},
    )
    for options in features:
        assert uncompared_kernel(make_problem(query, key, value, **options)) is expected


def test_features_are_refused():
    query, key, value = tensors()
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"dropout_p": 0.1}, "its code has no dropout"),
        ({"sinks": torch.zeros(4), "normalizer": normalizers.Softpick()}, "its code has sinks of softmax alone"),
    )
    for options, why in refused:
        with pytest.raises(KernelError, match=why):
            regard.attention(query, key, value, kernel="short", **options)
    with pytest.raises(KernelError, match="at most 512 keys"):
        regard.attention(query, key.repeat(1, 1, 40, 1), value.repeat(1, 1, 40, 1), kernel="short")
    with pytest.raises(KernelError, match=r"its code reads float32, bfloat16 or float16; this is float64"):
        regard.attention(query.double(), key.double(), value.double(), kernel="short")


def test_a_mask_that_does_not_fit_is_refused_as_elsewhere():
    query, key, value = tensors()
    with pytest.raises(MaskError, match="padding"):
        regard.attention(query, key, value, mask=masks.padding([3, 4, 5]))
    with pytest.raises(MaskError, match="documents"):
        regard.attention(query, key, value, mask=masks.documents(torch.tensor([0, 0, 1])))


@pytest.mark.parametrize("name", [name for name, mask in MASKS.items() if mask is not None])
def test_nan_behind_the_mask_reaches_nothing(name):
    """Poison in keys and values that some rows do not attend to: outputs and gradients of these rows are right."""
    query, key, value = tensors(grad=True)
    with torch.no_grad():
        key[0, :, 12], value[0, :, 3] = math.inf, math.nan
    above = torch.randn(2, 4, QUERIES, 8)
    output = regard.attention(query, key, value, mask=MASKS[name], kernel="short")
    wanted = regard.attention(query, key, value, mask=MASKS[name], kernel="reference")
    assert torch.equal(output.isnan(), wanted.isnan())
    assert torch.allclose(output, wanted, atol=1e-5, equal_nan=True)
    gradients, others = (
        torch.autograd.grad(each, (query, key, value), above.masked_fill(wanted.isnan(), 0.0))
        for each in (output, wanted)
    )
    for mine, other in zip(gradients, others, strict=True):
        assert torch.allclose(mine, other, atol=1e-5, equal_nan=True)


def test_large_scores_have_the_gradients_of_float64():
    """Log-sum-exps above 2¹⁴, which float32 rounds: these rows are computed as for all kernels."""
    query, key, value = tensors(grad=True)
    with torch.no_grad():
        query[0, 0, 5] *= 1e6
    loss = regard.attention(query, key, value, kernel="short").square().sum()
    found = torch.autograd.grad(loss, (query, key, value))
    exact = [tensor.detach().double().requires_grad_() for tensor in (query, key, value)]
    loss = regard.attention(*exact, kernel="reference").square().sum()
    for mine, other in zip(found, torch.autograd.grad(loss, exact), strict=True):
        assert (mine - other).abs().max() <= 1e-4 * other.abs().max()


def test_only_what_needs_a_gradient_gets_one():
    query, key, value = tensors()
    value.requires_grad_()
    regard.attention(query, key, value).sum().backward()
    assert query.grad is None
    assert key.grad is None
    assert value.grad is not None


def test_second_derivatives():
    query, key, value = tensors(grad=True)
    for kernel in ("short", "reference"):
        output = regard.attention(query, key, value, mask=MASKS["causal and padding"], kernel=kernel)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        second = torch.autograd.grad(first.square().sum(), (query, key, value))
        if kernel == "short":
            mine = second
    for one, other in zip(mine, second, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_sinks_and_log_sum_exp():
    query, key, value = tensors(grad=True)
    sinks = torch.randn(4, requires_grad=True)
    found = []
    for kernel in ("short", "reference"):
        output, lse = regard.attention_with_lse(query, key, value, sinks=sinks, kernel=kernel)
        found.append([output, lse, *torch.autograd.grad(output.sum() + lse.square().sum(), (query, key, value, sinks))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-4)


def test_small_problems_are_not_compared():
    query, key, value = tensors()
    assert regard.explain(query, key, value, mask=MASKS["padding"]).kernel.name == "short"
    assert regard.explain(nn.Parameter(query), key, value).kernel.name == "short"
    long = torch.zeros(1, 1, 1, 8).expand(1, 8, 4096, 8)
    assert regard.explain(long, long, long).kernel.name != "short"


def test_a_mode_that_intercepts_operations_sees_torch_s_operator():
    query = torch.randn(1, 2, 8, 16)
    with FlopCounterMode(display=False):
        assert regard.explain(query, query, query).kernel.name == "sdpa"


@pytest.mark.parametrize("kernel", ["short", None])
@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_a_bias_of_no_pairs_has_a_gradient_of_zeros(queries, keys, learned, kernel):
    query, key, value = (torch.randn(2, 4, length, 8, requires_grad=True) for length in (queries, keys, keys))
    slopes = torch.randn(4, requires_grad=learned)
    leaves = [query, key, value, *([slopes] if learned else [])]
    for _ in range(2):
        output = regard.attention(query, key, value, bias=biases.alibi(slopes), kernel=kernel)
        assert not output.any()
        assert not any(each.any() for each in torch.autograd.grad(output.sum(), leaves))


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("size", [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max])
def test_rows_whose_bias_is_the_smallest_or_largest_number(size, learned):
    """In units of log₂ e it is infinite; the row has equal weights, as in float64."""
    query, key, value = (torch.randn(1, 2, 13, 8, generator=torch.Generator().manual_seed(at)) for at in range(3))
    bias = torch.zeros(13, 13)
    bias[5] = size
    query.requires_grad_(learned)
    output = regard.attention(query, key, value, bias=bias, kernel="short")
    torch.testing.assert_close(output[:, :, 5], value.mean(2), rtol=1e-5, atol=1e-6)
    rest = [row for row in range(13) if row != 5]
    plain = regard.attention(query.double(), key.double(), value.double(), kernel="reference")
    torch.testing.assert_close(output[:, :, rest].double(), plain[:, :, rest], rtol=1e-5, atol=1e-6)


def test_nobody_reads_spans_alone_where_no_backend_has_short_rows(monkeypatch):
    """As without native code, where the choice asks for it before it asks who computes a problem."""
    query, key = torch.randn(2, 8, 1, 64), torch.randn(2, 8, 256, 64)
    problem = regard.explain(query, key, key, mask=masks.causal() & masks.window(before=9)).problem
    monkeypatch.setattr(short, "BACKENDS", ())
    assert not SHORT.reads_spans_alone(problem)
