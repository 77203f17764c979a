"""Attention to listed keys: every backend against the formula in float64, and work in proportion to the lists."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.torch.gathered_rows import GatheredByTorch
from regard.kernels import KERNELS, gathered
from regard.lenses import Entropy, Received, Weights
from regard.masks import Mask
from regard.testing import assert_agrees, suite
from regard.testing.cases import AXES, Case, consistent, covering_array

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "gathered")
CHOSEN = ("chosen", "causal&chosen", "chosen-blocks")
OF_LISTS = {
    **AXES,
    "mask": CHOSEN,
    "score": ("default", "general"),
    "positions": ("tail",),
    "lengths": ("5x7", "7x5", "1x7", "0x7", "5x0", "67x131", "3x257"),
}
HEADS, KEY_HEADS = 6, 3


@pytest.fixture(params=["native", "torch"])
def by(request, monkeypatch) -> str:
    """The backend: what native code computes is computed by torch too."""
    if request.param == "torch":
        monkeypatch.setattr(gathered, "_maker", lambda problem: ("torch", GatheredByTorch()))
    return request.param


def test_cases_of_lists_agree_with_the_oracle(by, assert_all):
    among = [Case(**row) for row in covering_array(OF_LISTS, 2, consistent)]
    pairs = list(suite([KERNEL], among=among))
    assert len(pairs) > 90
    assert_all(assert_agrees, pairs)


def drawn(queries: int, keys: int, heads: int, length: int, rows: int = 1, columns: int = 1) -> Tensor:
    """Lists with duplicates and none, of a batch of 2; the first is empty."""
    generator = torch.Generator().manual_seed(queries + heads)
    shape = (2, heads, -(-queries // rows), length)
    indices = torch.randint(-1, -(-keys // columns), shape, generator=generator)
    indices[:, :, 0] = -1
    return indices


def inputs(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 1000 + keys)
    shapes = (2, HEADS, queries, 19), (2, KEY_HEADS, keys, 19), (2, KEY_HEADS, keys, 23)
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(kernel: str | None, tensors: list[Tensor], mask: Mask, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of all inputs."""
    torch.default_generator.manual_seed(3)
    output, lse = regard.attention_with_lse(*tensors, mask=mask, kernel=kernel, **options)
    weights = torch.arange(output.numel()).view(output.shape).double().sin().to(output.dtype)
    loss = (output * weights).sum() + 0.3 * lse.masked_fill(lse.isinf(), 0.0).sum()
    return [output, lse, *torch.autograd.grad(loss, tensors)]


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "distance": {"bias": biases.alibi(HEADS)},
    "pairs": {"bias": torch.randn(HEADS, 131, 149, generator=torch.Generator().manual_seed(1)).double()},
    "softcap": {"softcap": 5.0},
    "dropout": {"dropout_p": 0.3},
    "sinks": {"sinks": torch.linspace(-1, 1, HEADS)},
}
OTHERS: dict[str, Mask] = {
    "causal": masks.causal(),
    "padding": masks.padding(lengths=torch.tensor([100, 37])) & masks.window(before=61),
    "documents": masks.documents((torch.arange(149) * 7 // 5) % 3) & masks.causal(),
    "another": masks.chosen(drawn(131, 149, 1, 97)),
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("other", ["alone", *OTHERS])
@pytest.mark.parametrize("heads", [1, KEY_HEADS, HEADS])
def test_lists_of_all_heads_of_key_heads_and_of_each_head(by, heads, other, option):
    mask = masks.chosen(drawn(131, 149, heads, 29))
    mask = mask & OTHERS[other] if other in OTHERS else mask
    compare(mask, 131, 149, OPTIONS[option])


# Dims of whole vectors and not, several tiles of queries, lists longer than a tile, more keys than buckets.
@pytest.mark.parametrize(("queries", "keys", "length"), [(193, 211, 61), (37, 911, 700), (7, 20011, 997)])
@pytest.mark.parametrize("dims", [(64, 64), (128, 64), (64, 19), (3, 128)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lists_of_each_query_by_dims(queries, keys, length, dims, dtype):
    tensors = of_one_key_head(2, queries, keys, dims, dtype)
    mask = masks.chosen(drawn(queries, keys, 2, length)) & masks.window(before=keys // 2, after=keys // 3)
    compare_with_float64(tensors, mask)


# Rows are computed one at a time, half as many as sums have room for, or as many: 1, 4 and 8 with vectors of 16 lanes.
@pytest.mark.parametrize("heads", [1, 2, 3, 4, 5, 7, 8, 9, 13, 17])
@pytest.mark.parametrize("dims", [(64, 64), (112, 80), (19, 37)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_lists_that_so_many_heads_share(heads, dims, dtype):
    tensors = of_one_key_head(heads, 37, 53, dims, dtype)
    compare_with_float64(tensors, masks.chosen(drawn(37, 53, 1, 31)))
    compare_with_float64(tensors, masks.chosen(drawn(37, 53, 1, 31, rows=3), block=3) & masks.causal())


def of_one_key_head(heads: int, queries: int, keys: int, dims: tuple[int, int], dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries)
    shapes = (2, heads, queries, dims[0]), (2, 1, keys, dims[0]), (2, 1, keys, dims[1])
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def compare_with_float64(tensors: list[Tensor], mask: Mask) -> None:
    exact = results("reference", [tensor.detach().double().requires_grad_() for tensor in tensors], mask)
    budget = 2e-5 if tensors[0].dtype == torch.float32 else 4 * torch.finfo(tensors[0].dtype).eps
    for one, other in zip(results("gathered", tensors, mask), exact, strict=True):
        finite = other.masked_fill(other.isinf(), 0.0)
        assert one.isinf().equal(other.isinf())
        assert (one.double().masked_fill(one.isinf(), 0.0) - finite).abs().max() < budget * finite.abs().max().clamp(
            1.0
        )


@pytest.mark.parametrize("other", ["alone", "causal", "another"])
@pytest.mark.parametrize("heads", [KEY_HEADS, HEADS])
@pytest.mark.parametrize("size", [(5, 1), (1, 7), (16, 16), (131, 1)], ids=str)
def test_blocks(by, size, heads, other):
    mask = masks.blocks(drawn(131, 149, heads, 7, *size), size)
    compare(mask & OTHERS[other] if other in OTHERS else mask, 131, 149, {})


@pytest.mark.parametrize("other", ["alone", "causal", "padding"])
@pytest.mark.parametrize("heads", [1, KEY_HEADS, HEADS])
@pytest.mark.parametrize("size", [64, (128, 64)], ids=str)
def test_blocks_that_are_whole_tiles(size, heads, other):
    sizes = size if isinstance(size, tuple) else (size, size)
    mask = masks.blocks(drawn(193, 257, heads, 2, *sizes), size)
    compare(mask & OTHERS[other] if other in OTHERS else mask, 193, 257, {})
    compare(mask, 193, 257, OPTIONS["dropout"])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("heads", [KEY_HEADS, HEADS])
def test_numbers_of_16_bits(by, dtype, heads):
    tensors, mask = inputs(67, 131, dtype), masks.causal() & masks.chosen(drawn(67, 131, heads, 29))
    found = results("gathered", tensors, mask)
    exact = results("reference", [tensor.detach().double().requires_grad_() for tensor in tensors], mask)
    for one, other in zip(found, exact, strict=True):
        finite = other.masked_fill(other.isinf(), 0.0)
        assert (one.double().masked_fill(one.isinf(), 0.0) - finite).abs().max() < 4 * torch.finfo(dtype).eps * (
            finite.abs().max()
        )


def compare(mask: Mask, queries: int, keys: int, options: dict[str, Any]) -> None:
    """Float32 against the formula in float64: output, log-sum-exp and gradients."""
    tensors = inputs(queries, keys)
    narrow = {name: v.float() if isinstance(v, Tensor) else v for name, v in options.items()}
    wide = {name: v.double() if isinstance(v, Tensor) else v for name, v in options.items()}
    exact = results("reference", [tensor.detach().double().requires_grad_() for tensor in tensors], mask, **wide)
    for one, other in zip(results("gathered", tensors, mask, **narrow), exact, strict=True):
        torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


def test_gradients_of_biases(by):
    mask = masks.causal() & masks.chosen(drawn(37, 53, KEY_HEADS, 11))
    tensors = inputs(37, 53)
    table, pairs = torch.randn(HEADS, 9).requires_grad_(), torch.randn(1, HEADS, 37, 53).requires_grad_()
    found = {}
    for kernel, dtype in (("gathered", torch.float32), ("reference", torch.float64)):
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in (*tensors, table, pairs)]
        for name, bias in (
            ("table", biases.clipped(own[3], before=4, after=4)),
            ("sum", biases.clipped(own[3], before=4, after=4) + biases.tensor(own[4])),
        ):
            output = regard.attention(*own[:3], mask=mask, bias=bias, kernel=kernel)
            found[kernel, name] = torch.autograd.grad(output.sin().sum(), own[3 : 4 + (name == "sum")])
    for name in ("table", "sum"):
        for one, other in zip(found["gathered", name], found["reference", name], strict=True):
            torch.testing.assert_close(one.double(), other, atol=2e-5, rtol=2e-5)


def test_nan_that_is_not_chosen_reaches_nothing(by):
    indices = drawn(37, 53, KEY_HEADS, 11).masked_fill_(drawn(37, 53, KEY_HEADS, 11) == 17, 18)
    mask, tensors = masks.chosen(indices), inputs(37, 53)
    expected = results("gathered", tensors, mask)
    poisoned = [tensor.detach().clone() for tensor in tensors]
    poisoned[1][:, :, 17], poisoned[2][:, :, 17] = float("nan"), float("inf")
    found = results("gathered", [tensor.requires_grad_() for tensor in poisoned], mask)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_nan_that_is_chosen_reaches_its_rows_alone(by):
    query, key, value = (tensor.detach() for tensor in inputs(5, 7))
    mask = masks.chosen(torch.tensor([[0, 1], [3, 3], [6, -1], [-1, -1], [2, 3]]))
    key[:, :, 3] = float("nan")
    found = regard.attention(query, key, value, mask=mask, kernel="gathered")
    assert found.isnan().all(-1)[0, 0].tolist() == [False, True, False, False, True]
    assert not found[:, :, [0, 2, 3]].isnan().any()
    assert not found[:, :, 3].any()


def test_second_derivatives(by):
    tensors = [tensor[:1, :1, :5, :2].detach().double().requires_grad_() for tensor in inputs(11, 13)]
    mask = masks.chosen(torch.tensor([[0, 1], [3, 3], [4, -1], [-1, -1], [2, 3]]))
    assert torch.autograd.gradgradcheck(lambda *t: regard.attention(*t, mask=mask, kernel="gathered"), tensors)


def test_lenses_see_the_listed_pairs(by):
    query, key, value = (tensor.detach() for tensor in inputs(37, 53))
    indices = drawn(37, 53, KEY_HEADS, 11)
    found, expected = (
        regard.observe(query, key, value, Weights(), Entropy(), Received(), mask=masks.chosen(indices), kernel=kernel)
        for kernel in ("gathered", "reference")
    )
    for lens in (Weights(), Entropy(), Received()):
        torch.testing.assert_close(found[lens], expected[lens])
    at = indices.repeat_interleave(HEADS // KEY_HEADS, 1).clamp(min=0)
    listed = found[Weights()].gather(-1, at).masked_fill(indices.repeat_interleave(2, 1) < 0, 0.0)
    assert listed[:, :, 1:].sum(-1).min() > 0.999


@pytest.mark.usefixtures("two_threads")
def test_threads_change_nothing(by):
    mask, tensors = masks.chosen(drawn(131, 149, HEADS, 29)), inputs(131, 149)
    several = results("gathered", tensors, mask)
    torch.set_num_threads(1)
    for one, other in zip(results("gathered", tensors, mask), several, strict=True):
        assert one.equal(other)


def test_steps_of_decoding_are_the_rows_of_one_call(by):
    query, key, value = (tensor.detach() for tensor in inputs(53, 53))
    indices = drawn(53, 53, KEY_HEADS, 11)
    whole = regard.attention(query, key, value, mask=masks.causal() & masks.chosen(indices), kernel="gathered")
    for row in (0, 1, 30, 52):
        mask = masks.chosen(indices[:, :, row : row + 1].masked_fill(indices[:, :, row : row + 1] > row, -1))
        for kernel in ("gathered", None):
            step = regard.attention(
                query[:, :, row : row + 1], key[:, :, : row + 1], value[:, :, : row + 1], mask=mask, kernel=kernel
            )
            torch.testing.assert_close(step, whole[:, :, row : row + 1])


@pytest.mark.usefixtures("any_processor")
@pytest.mark.parametrize("key_heads", [1, 4])
def test_it_is_chosen_where_lists_are_short(key_heads):
    query, key = torch.zeros(1, 4, 2048, 64), torch.zeros(1, key_heads, 2048, 64)
    indices = torch.randint(2048, (1, key_heads, 2048, 64), generator=torch.Generator().manual_seed(0))
    plan = regard.explain(query, key, key, mask=masks.causal() & masks.chosen(indices))
    assert "-> gathered     chosen: takes the least time" in str(plan)


@pytest.mark.parametrize("kernel", [None, "gathered"])
def test_compiled_and_mapped_calls(kernel):
    """The mask is made within the function, where its indices have no values yet."""
    tensors, indices = tuple(inputs(37, 53)), drawn(37, 53, KEY_HEADS, 11)

    def call(query: Tensor, key: Tensor, value: Tensor, indices: Tensor) -> Tensor:
        return regard.attention(query, key, value, mask=masks.causal() & masks.chosen(indices), kernel=kernel)

    expected = call(tensors[0], tensors[1], tensors[2], indices)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)(tensors[0], tensors[1], tensors[2], indices)
    mapped = torch.func.vmap(lambda q, k, v: call(q[None], k[None], v[None], indices[:1])[0])(*tensors)
    torch.testing.assert_close(compiled, expected)
    torch.testing.assert_close(mapped[:1], expected[:1])
    upstream = expected.detach().cos()
    for one, other in zip(
        torch.autograd.grad(compiled, tensors, upstream), torch.autograd.grad(expected, tensors, upstream), strict=True
    ):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ({"mask": masks.causal()}, "it reads lists of keys: masks.chosen or masks.blocks"),
        ({"mask": masks.causal() | masks.chosen(torch.zeros(5, 1).long())}, "alone or joined to others by &"),
        ({"score": regard.scores.Additive(19, 19, 4)}, "dot products; this score is additive"),
        (
            {"key_positions": torch.arange(7).flip(0), "query_positions": torch.arange(5)},
            "it reads keys at consecutive pos",
        ),
    ],
)
def test_what_it_cannot_compute(call, reason):
    query, key, value = (tensor.detach() for tensor in inputs(5, 7))
    options: dict[str, Any] = {"mask": masks.chosen(torch.zeros(5, 1).long()), **call}
    assert reason in str(regard.explain(query, key, value, **options))
    with pytest.raises(regard.errors.KernelError, match="kernel 'gathered' cannot compute this"):
        regard.attention(query, key, value, kernel="gathered", **options)
