"""The rows of monotonic attention in C, against the recurrence in float64, number by number."""

import pytest
import torch
from torch import Tensor

import regard
from regard import native, normalizers
from regard.backends.cpu.monotonic_rows import MonotonicRowsInC

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")


def recurrence(stop: Tensor, before: Tensor) -> Tensor:
    """w_ij = p_ij q_ij with q_ij = (1 - p_i,j-1) q_i,j-1 + w_i-1,j; differentiable."""
    rows = []
    for row in stop.unbind(-2):
        reached = []
        for j in range(stop.shape[-1]):
            passed = (1 - row[..., j - 1]) * reached[-1] if j else 0.0
            reached.append(passed + before[..., j])
        before = row * torch.stack(reached, -1)
        rows.append(before)
    return torch.stack(rows, -2)


def test_rows_and_gradients_are_those_of_the_recurrence():
    torch.manual_seed(0)
    code, stop, before = MonotonicRowsInC(), torch.rand(2, 3, 11, 37), torch.rand(2, 3, 37)
    of_alignments, of_last = torch.randn(2, 3, 11, 37), torch.randn(2, 3, 37)
    wide = [tensor.double().requires_grad_() for tensor in (stop, before)]
    truth = recurrence(*wide)
    expected = torch.autograd.grad(
        truth, wide, of_alignments.double() + torch.nn.functional.pad(of_last.double().unsqueeze(-2), (0, 0, 10, 0))
    )
    alignments, reached = code.forward(stop, before)
    found = code.backward(stop, reached, of_alignments, of_last)
    torch.testing.assert_close(alignments.double(), truth, rtol=1e-5, atol=1e-6)
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), wanted, rtol=1e-4, atol=1e-4)


def test_rows_of_any_strides():
    torch.manual_seed(0)
    code, stop, before = MonotonicRowsInC(), torch.rand(11, 37, 2).permute(2, 0, 1), torch.rand(37, 2).mT
    for own, dense in zip(
        code.forward(stop, before), code.forward(stop.contiguous(), before.contiguous()), strict=True
    ):
        assert torch.equal(own, dense)


@pytest.mark.parametrize("normalizer", [normalizers.Monotonic(-1.0), normalizers.MoChA(-1.0, width=3)])
def test_attention_with_gradients_takes_them(normalizer, monkeypatch):
    taken, backward = [], MonotonicRowsInC.backward
    monkeypatch.setattr(MonotonicRowsInC, "backward", lambda *given: (taken.append(1), backward(*given))[1])
    leaves = [torch.randn(1, 2, 37, 8).requires_grad_() for _ in range(3)]
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    found, expected = (
        torch.autograd.grad(regard.attention(*each, normalizer=normalizer).square().sum(), each)
        for each in (leaves, wide)
    )
    assert taken == [1]
    for own, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(own.double(), wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_derivatives_of_other_kinds_are_left_to_torch():
    scores = torch.randn(2, 5, 7)

    def output(shift):
        return normalizers.Monotonic().normalize(scores + shift)[0].square().sum()

    (expected,) = torch.autograd.grad(output(leaf := torch.zeros((), requires_grad=True)), leaf)
    forward = torch.func.jvp(output, (torch.zeros(()),), (torch.ones(()),))[1]
    torch.testing.assert_close(forward, expected)
    torch.testing.assert_close(torch.func.grad(output)(torch.zeros(())), expected)
    for row in torch.vmap(output)(torch.zeros(3)):
        torch.testing.assert_close(row, output(torch.zeros(())))
