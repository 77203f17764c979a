"""The product of two batches of rows, whose result is large: by oneDNN or torch, with its derivatives."""

import pytest
import torch

from regard.core import large_product as module
from regard.core.large_product import large_product


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("by_onednn", [True, False])
@pytest.mark.parametrize(
    ("left", "right"), [((2, 3, 1500, 16), (3, 300, 16)), ((2500, 16), (900, 16)), ((1, 3, 1300, 16), (1, 600, 16))]
)
def test_result_and_gradients_are_those_of_the_product(left, right, by_onednn, monkeypatch):
    if not by_onednn:
        monkeypatch.setattr(module, "uses_onednn", lambda *_: False)
    ours = drawn(*left).requires_grad_(), drawn(*right, seed=1).requires_grad_()
    exact = [each.detach().double().requires_grad_() for each in ours]
    monkeypatch.setattr(module, "LARGE_BYTES", 1)
    product, expected = large_product(*ours), exact[0] @ exact[1].mT
    assert type(product.grad_fn).__name__ == "_LargeProductBackward"
    upstream = drawn(*expected.shape, seed=2)
    found = torch.autograd.grad(product, ours, upstream)
    for mine, theirs in zip(
        (product, *found), (expected, *torch.autograd.grad(expected, exact, upstream.double())), strict=True
    ):
        assert (mine - theirs).abs().max() <= 1e-5 * theirs.abs().max()


def test_second_derivatives(monkeypatch):
    monkeypatch.setattr(module, "LARGE_BYTES", 1)
    inputs = [drawn(2, 5, 3).double().requires_grad_(), drawn(2, 4, 3, seed=1).double().requires_grad_()]
    assert torch.autograd.gradgradcheck(large_product, inputs)


def test_small_products_and_transforms_are_torchs():
    left, right = drawn(5, 3).requires_grad_(), drawn(4, 3)
    assert type(large_product(left, right).grad_fn).__name__ == "MmBackward0"
    mapped = torch.func.vmap(large_product, in_dims=(0, None))(drawn(2, 5, 3), right)
    torch.testing.assert_close(mapped, drawn(2, 5, 3) @ right.mT)


def test_onednn_gets_contiguous_rows(monkeypatch):
    multiplied = []
    monkeypatch.setattr(module, "LARGE_BYTES", 1)
    monkeypatch.setattr(module, "uses_onednn", lambda *_: True)
    monkeypatch.setattr(module, "batched_linear", lambda x, weight: multiplied.append((x, weight)) or x @ weight.T)
    left = drawn(2, 1500, 3, 16).transpose(1, 2).requires_grad_()  # heads of a projection
    right = drawn(300, 3, 16).transpose(0, 1)
    product = large_product(left, right)
    product.sum().backward()
    assert multiplied
    assert all(x.is_contiguous() and (w.is_contiguous() or w.mT.is_contiguous()) for x, w in multiplied)
    torch.testing.assert_close(product, left @ right.mT)
