"""Attention to listed keys in Triton, by its interpreter: held to the oracle, and to the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.backends.triton.triton_backend import TRITON
from regard.kernels import KERNELS, gathered
from regard.masks import Mask
from regard.testing import assert_agrees, suite
from regard.testing.cases import AXES, Case, consistent, covering_array

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, of NaN, where a device has none
]

KERNEL = next(kernel for kernel in KERNELS if kernel.name == "gathered")
OF_LISTS = {
    **AXES,
    "mask": ("chosen", "causal&chosen", "chosen-blocks"),
    "score": ("default", "general"),
    "positions": ("tail",),
    "lengths": ("5x7", "7x5", "1x7", "0x7", "5x0"),
}
BATCH, QUERIES, KEYS, HEADS, KEY_HEADS = 1, 11, 67, 4, 2


def test_the_agreement_suite():
    among = [Case(**row) for row in covering_array(OF_LISTS, 1, consistent)]
    pairs = list(suite([KERNEL], among=among))
    assert len(pairs) > 10
    for kernel, case in pairs:
        assert_agrees(kernel, case)


def drawn(heads: int, length: int, *, keys: int = KEYS, rows: int = 1, columns: int = 1) -> Tensor:
    """Lists with duplicates and none; the first is empty."""
    indices = torch.randint(-1, -(-keys // columns), (BATCH, heads, -(-QUERIES // rows), length))
    indices[:, :, 0] = -1
    return indices


def inputs(dtype: torch.dtype = torch.float32, dims: tuple[int, int] = (19, 23)) -> list[Tensor]:
    shapes = (BATCH, HEADS, QUERIES, dims[0]), (BATCH, KEY_HEADS, KEYS, dims[0]), (BATCH, KEY_HEADS, KEYS, dims[1])
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def results(kernel: str, tensors: list[Tensor], mask: Mask, **options: Any) -> list[Tensor]:
    """Output, log-sum-exp and the gradients of all inputs."""
    torch.default_generator.manual_seed(3)
    output, lse = regard.attention_with_lse(*tensors[:3], mask=mask, kernel=kernel, **options)
    weights = torch.arange(output.numel()).view(output.shape).double().sin().to(output.dtype)
    loss = (output * weights).sum() + 0.3 * lse.masked_fill(lse.isinf(), 0.0).sum()
    return [output, lse, *torch.autograd.grad(loss, tensors)]


def compare(mask: Mask, tensors: list[Tensor], **options: Any) -> None:
    """With the formula in float64, within what the same formula is off in the dtype of the inputs."""
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    found = results("gathered", tensors, mask, **options)
    eps = torch.finfo(tensors[0].dtype).eps
    for one, other in zip(found, results("reference", wide, mask, **options), strict=True):
        assert one.isinf().equal(other.isinf())
        other = other.masked_fill(other.isinf(), 0.0)
        difference = (one.double().masked_fill(one.isinf(), 0.0) - other).abs().max()
        assert difference <= 8 * eps * other.abs().max().clamp(min=1.0)


@pytest.fixture(autouse=True)
def by_triton():
    problem = regard.kernels.make_problem(*torch.zeros(3, 1, 1, 16), mask=masks.chosen(torch.zeros(1, 1).long()))
    assert gathered._maker(problem) == ("triton", TRITON.gathered)


OTHERS: dict[str, Mask] = {
    "causal": masks.causal(),
    "padding": masks.padding(lengths=torch.tensor([60])) & masks.window(before=31),
    "documents": masks.documents((torch.arange(KEYS) * 7 // 5) % 3) & masks.causal(),
}


@pytest.mark.parametrize(
    ("heads", "other", "options"),
    [
        (1, "alone", {}),
        (KEY_HEADS, "causal", {"softcap": 3.0}),
        (HEADS, "padding", {"sinks": torch.linspace(-1, 1, HEADS)}),
        (KEY_HEADS, "documents", {"dropout_p": 0.3}),
        (1, "padding", {"bias": biases.alibi(HEADS), "dropout_p": 0.3}),
    ],
)
def test_lists_of_all_heads_of_key_heads_and_of_each_head(heads, other, options):
    mask = masks.chosen(drawn(heads, 29))
    compare(mask & OTHERS[other] if other in OTHERS else mask, inputs(), **options)


@pytest.mark.parametrize(
    ("size", "heads", "other", "dims"),
    [
        ((1, 16), KEY_HEADS, "causal", (16, 64)),
        ((3, 5), KEY_HEADS, "alone", (64, 16)),
        ((11, 1), 1, "causal", (1, 3)),
        ((32, 4), HEADS, "documents", (19, 23)),
    ],
)
def test_blocks_of_queries_and_keys(size, heads, other, dims):
    mask = masks.blocks(drawn(heads, 9, rows=size[0], columns=size[1]), size)
    compare(mask & OTHERS[other] if other in OTHERS else mask, inputs(dims=dims))


def test_one_list_for_all_queries():
    """More rows than a program has; lists longer than a tile of keys."""
    indices = torch.randint(-1, KEYS, (BATCH, 1, 1, 90))
    compare(masks.chosen(indices) & masks.causal(), inputs())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits(dtype):
    compare(masks.chosen(drawn(KEY_HEADS, 29)) & masks.causal(), inputs(dtype, (32, 16)))


def test_gradients_of_biases():
    mask = masks.causal() & masks.chosen(drawn(KEY_HEADS, 11))
    found, tensors = {}, [*inputs(), torch.randn(HEADS, 9), torch.randn(1, HEADS, QUERIES, KEYS)]
    for kernel, dtype in (("gathered", torch.float32), ("reference", torch.float64)):
        own = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        bias = biases.clipped(own[3], before=4, after=4) + biases.tensor(own[4])
        output = regard.attention(*own[:3], mask=mask, bias=bias, kernel=kernel)
        found[kernel] = torch.autograd.grad(output.sin().sum(), own)
    for one, other in zip(found["gathered"], found["reference"], strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_nan_that_is_not_attended_to_reaches_nothing():
    """Listed for no row, or for rows whose span ends before it: these share a list with one that has it."""
    listed = torch.tensor([3, 11, 40, 66]).expand(BATCH, KEY_HEADS, 1, 4)
    mask, tensors = masks.chosen(listed) & masks.causal(), inputs()
    rows = torch.arange(QUERIES) + KEYS - QUERIES >= 66
    expected = results("gathered", tensors, mask)
    poisoned = [tensor.detach().clone() for tensor in tensors]
    poisoned[1][:, :, 17], poisoned[2][:, :, 17] = float("nan"), float("inf")
    poisoned[2][:, :, 66, 1] = float("nan")
    found = results("gathered", [tensor.requires_grad_() for tensor in poisoned], mask)
    assert torch.equal(found[0].isnan()[0, 0].any(-1), rows)
    assert found[0][:, :, ~rows].equal(expected[0][:, :, ~rows])
    assert torch.equal(found[1], expected[1])
    assert all(gradient.isfinite().all() for gradient in found[2:])
    torch.testing.assert_close(found[2][:, :, ~rows], expected[2][:, :, ~rows])


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_what_is_not_finite_in_a_key_reaches_the_rows_that_score_it(bad):
    """Of infinity a score may be -inf: such a pair has weight 0, and no part in gradients."""
    query, key, value = (tensor.detach() for tensor in inputs())
    indices = drawn(KEY_HEADS, 11)
    clean, indices[..., 3] = key.clone(), 17  # in each list
    key[:, :, 17, 2] = bad
    rows, keep = ~(query[..., 2] * bad < 0), torch.ones(BATCH, HEADS, QUERIES, KEYS, dtype=torch.bool)
    keep[..., 17] = False
    weights = torch.randn(BATCH, HEADS, QUERIES, 23)
    found = gradients("gathered", (query, key, value), masks.chosen(indices), weights)
    assert torch.equal(found[0].isfinite().all(-1), ~rows)
    left = weights.masked_fill(rows[..., None], 0.0)
    of_heads = masks.chosen(indices.repeat_interleave(HEADS // KEY_HEADS, 1)) & masks.where(keep=keep)
    expected = gradients("reference", (query, clean, value), of_heads, left)
    assert torch.allclose(found[0][~rows], expected[0][~rows], atol=1e-5)
    for one, other in zip(found[1:], expected[1:], strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def gradients(kernel: str, tensors: tuple[Tensor, ...], mask: Mask, above: Tensor) -> list[Tensor]:
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    output = regard.attention(*leaves, mask=mask, kernel=kernel)
    return [output.detach(), *torch.autograd.grad(output, leaves, above)]


def test_weights_beside_large_scores():
    """Rows whose best keys tie at a score of 10⁶, where float32 would round the log-sum-exp by 0.06."""
    tensors = [torch.zeros_like(tensor) for tensor in inputs(dims=(16, 16))]
    tensors[0][..., 0] = 1024.0
    tensors[1][..., 0] = torch.randint(0, 3, (BATCH, KEY_HEADS, KEYS)) * 1024.0
    tensors[2] = torch.randn(BATCH, KEY_HEADS, KEYS, 16)
    compare_values(masks.chosen(drawn(KEY_HEADS, 29)), [tensor.requires_grad_() for tensor in tensors])


def compare_values(mask: Mask, tensors: list[Tensor]) -> None:
    """Output and the gradient of the values, which have the weights as factors."""
    above = torch.randn(BATCH, HEADS, QUERIES, 16)
    found = []
    for kernel, dtype in (("gathered", torch.float32), ("reference", torch.float64)):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in tensors]
        output = regard.attention(*leaves, mask=mask, scale=1.0, kernel=kernel)
        found.append((output, torch.autograd.grad(output, leaves, above.to(dtype))[2]))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, atol=1e-5, rtol=1e-5)


def test_work_is_priced_as_that_of_a_flash_kernel():
    """Of lists that more rows share, fewer numbers of keys are read."""
    query, key, value = (tensor.detach() for tensor in inputs())
    packed = []
    for heads in (KEY_HEADS, HEADS):
        problem = regard.kernels.make_problem(query, key, value, mask=masks.chosen(drawn(heads, 29)))
        cost = KERNEL.cost(problem)
        assert cost.flash["triton"].pairs == HEADS * QUERIES * 29
        packed.append(cost.flash["triton"].packed)
    assert packed[1] == HEADS // KEY_HEADS * packed[0]


def test_large_heads_are_another_backends():
    """Of heads that the code in Triton has no room for, torch's operators."""
    query, key, value = torch.randn(1, 1, 5, 300), torch.randn(1, 1, 7, 300), torch.randn(1, 1, 7, 8)
    mask = masks.chosen(torch.tensor([[0, 1], [3, 3], [6, -1], [-1, -1], [2, 3]]))
    problem = regard.kernels.make_problem(query, key, value, mask=mask)
    assert TRITON.gathered.why_not(problem) == ["its code in Triton takes head dims from 1 to 256; these are 300 and 8"]
    assert gathered._maker(problem)[0] == "torch"
    found, expected = (
        regard.attention(query, key, value, mask=mask, kernel=kernel) for kernel in ("gathered", "reference")
    )
    torch.testing.assert_close(found, expected)
