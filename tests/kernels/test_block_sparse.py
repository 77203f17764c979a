"""The spans kernel: which rectangles it calls, that nothing else is touched, and how they are merged."""

from dataclasses import replace

import pytest
import torch

import regard
from regard import biases, masks
from regard.backends.torch.dense_block import Rectangle
from regard.errors import ShapeError
from regard.kernels.block_sparse import BlockSparseKernel
from regard.kernels.reference import ReferenceKernel

Called = list[tuple[int, int, bool]]


@pytest.fixture
def rectangles(monkeypatch) -> Called:
    """Rows, columns, and whether there is a mask or bias, of each rectangle that is computed."""
    seen: Called = []
    original = Rectangle.forward

    def forward(self: Rectangle):
        seen.append((self.query.shape[-2], self.key.shape[-2], self.added is not None))
        return original(self)

    monkeypatch.setattr(Rectangle, "forward", forward)
    return seen


def tensors(m: int, n: int) -> list[torch.Tensor]:
    return [torch.randn(1, 2, length, 8).requires_grad_() for length in (m, n, n)]


def run(kernel: BlockSparseKernel | ReferenceKernel, m: int, n: int, **options) -> list[torch.Tensor]:
    given = tensors(m, n)
    with torch.no_grad():
        for index, tensor in enumerate(given):
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(index)))
    result = kernel.run(regard.explain(*given, **options).problem)
    return [result.output.detach(), *torch.autograd.grad(result.output.sin().sum(), given)]


def agrees(kernel: BlockSparseKernel, m: int, n: int, **options) -> None:
    expected = run(ReferenceKernel(), m, n, **options)
    torch.testing.assert_close(run(kernel, m, n, **options), expected, atol=2e-6, rtol=1e-5)


def test_full_spans_need_no_mask(rectangles):
    agrees(BlockSparseKernel((4, 4), 4), 8, 8, mask=masks.where(keep=torch.arange(8) < 4))
    assert rectangles == [(4, 4, False)] * 2


def test_only_what_the_mask_leaves_is_computed(rectangles):
    agrees(BlockSparseKernel((4, 4), 100), 16, 16, mask=masks.causal() & masks.window(before=4))
    assert rectangles == [(4, 4, True), (4, 8, True), (4, 12, True), (4, 12, True)][:1] + [(4, 8, True)] * 3


def test_full_and_masked_spans_are_merged(rectangles):
    agrees(BlockSparseKernel((4, 4), 8), 16, 16, mask=masks.causal() & masks.where(keep=torch.ones(16, 16).bool()))
    assert rectangles == [(4, 4, True), (4, 8, True), (4, 8, False), (4, 4, True), (4, 12, False), (4, 4, True)]


def test_square_causal_is_one_call(rectangles):
    agrees(BlockSparseKernel(), 70, 70, mask=masks.causal())
    assert rectangles == [(70, 70, False)]


@pytest.mark.parametrize("m", [3, 16, 20])
def test_causal_of_other_shapes_is_not(m, rectangles):
    agrees(BlockSparseKernel((4, 4), 4), m, 17, mask=masks.causal())
    assert len(rectangles) > 1


def test_rows_without_keys_are_not_computed(rectangles):
    agrees(BlockSparseKernel((4, 4), 4), 8, 8, mask=~masks.where(keep=torch.ones(8, 8).bool()))
    assert rectangles == []


@pytest.mark.parametrize(
    "bias", [biases.alibi(2), torch.randn(2, 13, 19), torch.randn(19)], ids=["alibi", "pairs", "row"]
)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.window(3, 4), masks.padding(lengths=[11])], ids=repr)
def test_biases(bias, mask):
    agrees(BlockSparseKernel((4, 4), 4), 13, 19, mask=mask, bias=bias)


def test_nan_outside_of_the_spans_is_never_read():
    query, key, value = (tensor.detach() for tensor in tensors(8, 8))
    key[:, :, 4:], value[:, :, 4:] = torch.nan, torch.nan
    query.requires_grad_()
    problem = regard.explain(query, key, value, mask=masks.where(keep=torch.arange(8) < 4)).problem
    output = BlockSparseKernel((4, 4), 4).run(problem).output
    assert output.isfinite().all()
    assert torch.autograd.grad(output.sum(), query)[0].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_of_half_precision_are_merged_in_float32(dtype):
    """Many spans of one row: merged in half precision, the error would grow with their number."""
    query, key = torch.zeros(1, 1, 1, 8, dtype=dtype), torch.zeros(1, 1, 512, 8, dtype=dtype)
    value = torch.ones(1, 1, 512, 8, dtype=dtype)
    mask = masks.where(keep=(torch.arange(512) // 2) % 2 == 0)
    result = BlockSparseKernel((1, 2), 1).run(regard.explain(query, key, value, mask=mask).problem)
    assert (result.output == 1).all()


def test_the_log_sum_exp_of_rows_without_keys():
    query = torch.randn(1, 1, 8, 8)
    mask = masks.where(keep=torch.arange(8)[:, None] >= torch.tensor([9] * 4 + [5] * 4))
    for block in ((4, 4), (8, 8), (3, 5)):
        problem = regard.explain(query, query, query, mask=mask).problem
        lse = BlockSparseKernel(block, 1).run(replace(problem, wants_lse=True)).lse
        assert lse is not None
        assert (lse[0, 0] == -torch.inf).tolist() == [True] * 5 + [False] * 3


def test_a_bias_of_other_heads_is_refused():
    query = torch.zeros(1, 3, 80, 8)
    with pytest.raises(ShapeError, match=r"bias alibi\(<float32 \(4,\)>\) has the shape \(4, 80, 80\), which does not"):
        regard.attention(query, query, query, bias=regard.biases.alibi(4), kernel="block_sparse")
