import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.translation.loss import smoothed_cross_entropy
from regard.translation.vocabulary import PAD


def example(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    logits = torch.randn(3, 5, 7, dtype=torch.float64).mul(3).to(dtype).requires_grad_()
    target = torch.randint(1, 7, (3, 5))
    target[0, 3:] = target[2, 1:] = PAD
    return logits, target


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
def test_it_is_torchs_cross_entropy(smoothing: float):
    logits, target = example()
    options = {"ignore_index": PAD, "reduction": "sum"}
    expected = cross_entropy(logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, **options)
    (expected_gradient,) = torch.autograd.grad(expected / 3, logits)
    loss, entropy = smoothed_cross_entropy(logits, target, smoothing)
    (gradient,) = torch.autograd.grad(loss / 3, logits)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(entropy, cross_entropy(logits.flatten(0, 1), target.flatten(), **options))
    torch.testing.assert_close(gradient, expected_gradient)
    assert not entropy.requires_grad


def test_half_precision_is_summed_in_single_precision():
    logits, target = example(torch.bfloat16)
    loss, entropy = smoothed_cross_entropy(logits, target, 0.1)
    loss.backward()
    assert loss.dtype == entropy.dtype == torch.float32
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    double, _ = smoothed_cross_entropy(logits.double(), target, 0.1)
    torch.testing.assert_close(loss.double(), double, rtol=1e-6, atol=1e-6)


def test_a_second_backward_is_refused_rather_than_wrong():
    logits, target = example()
    loss, _ = smoothed_cross_entropy(logits, target, 0.1)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_padding_alone_costs_nothing():
    logits = torch.full((2, 3, 5), float("-inf")).index_fill(-1, torch.tensor([PAD]), 0.0).requires_grad_()
    loss, entropy = smoothed_cross_entropy(logits, torch.zeros(2, 3, dtype=torch.int64), 0.0)
    loss.backward()
    assert loss.item() == entropy.item() == 0.0
    assert logits.grad is not None
    assert torch.equal(logits.grad, torch.zeros(2, 3, 5))
