"""Tensors on the CPU are computed there, whatever device `torch.set_default_device` has named for new tensors."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, scores
from regard.kernels.planning.choice import KERNELS

ELSEWHERE = torch.device("meta")  # it has no numbers: what is made there by mistake fails, or is empty

MASKS = {
    "all": None,
    "causal": masks.causal(),
    "window": masks.causal() & masks.window(5),
    "strided": masks.causal() & (masks.window(4) | masks.strided(4)),
    "padding": masks.padding(torch.tensor([13, 40])),
    "documents": masks.causal() & masks.documents(torch.arange(40) // 7),
}


def compute(kernel: str | None, **options) -> list[Tensor]:
    """The output and the gradients."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 2, 40, 16, device="cpu", requires_grad=True) for _ in range(3))
    output = regard.attention(query, key, value, kernel=kernel, **options)
    return [output.detach(), *torch.autograd.grad(output.sum(), (query, key, value))]


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kernel", [None, *(kernel.name for kernel in KERNELS if kernel.name != "flex")])
def test_another_default_device_changes_nothing(kernel, mask):
    score = scores.Additive(16, 16, 8) if kernel == "additive" else None
    options = {"mask": MASKS[mask], "score": score}
    try:
        expected = compute(kernel, **options)
    except regard.errors.KernelError:
        pytest.skip("the kernel does not compute this mask")
    with ELSEWHERE:
        found = compute(kernel, **options)
    for one, other in zip(found, expected, strict=True):
        assert one.is_cpu
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("mask", MASKS)
def test_lenses_and_biases_too(mask):
    looks = (lenses.Weights(), lenses.Entropy(), lenses.TopK(3), lenses.Distance(), lenses.Received())
    query, key, value, bias = *(torch.randn(2, 2, 40, 16) for _ in range(3)), biases.alibi(2)

    def look() -> list[Tensor]:
        seen = regard.observe(query, key, value, *looks, mask=MASKS[mask], bias=bias)
        return [seen.output, seen.lse, seen[looks[0]], seen[looks[1]]]

    expected = look()
    with ELSEWHERE:
        found = look()
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_too(causal):
    query, key, value = (torch.randn(2, 2, 40, 16) for _ in range(3))
    expected = regard.linear_attention(query, key, value, causal=causal)
    with ELSEWHERE:
        torch.testing.assert_close(regard.linear_attention(query, key, value, causal=causal), expected)
