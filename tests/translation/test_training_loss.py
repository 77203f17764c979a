import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy

from regard.translation import training_loss as loss_module
from regard.translation.batches import EncodedText, IdSequences, collate
from regard.translation.build_model import build_model
from regard.translation.settings import RecurrentSettings, TransformerSettings
from regard.translation.training_loss import projected_cross_entropy, smoothed_cross_entropy, training_loss
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


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.9])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("rows_at_once", [1, 4, 99])
def test_a_few_logits_at_a_time_are_all_of_them(
    smoothing: float, biased: bool, rows_at_once: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(loss_module, "LOGITS_AT_ONCE", rows_at_once * 7)
    features = torch.randn(11, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(7, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(7, dtype=torch.float64, requires_grad=True) if biased else None
    target, inputs = torch.randint(1, 7, (11,)), [features, weight, *([] if bias is None else [bias])]
    expected = smoothed_cross_entropy(torch.nn.functional.linear(features, weight, bias), target, smoothing)
    given = projected_cross_entropy(features, weight, bias, target, smoothing)
    torch.testing.assert_close(given, expected)
    assert not given[1].requires_grad
    for one, other in zip(*(torch.autograd.grad(loss / 3, inputs) for loss, _ in (given, expected)), strict=True):
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        torch.testing.assert_close(projected_cross_entropy(features, weight, bias, target, smoothing), expected)


def test_a_few_logits_at_a_time_under_autocast_are_as_near_as_all_of_them():
    features = torch.randn(11, 16, requires_grad=True)
    weight = torch.randn(70, 16, requires_grad=True)
    target = torch.randint(1, 70, (11,))
    exact, _ = projected_cross_entropy(features, weight, None, target, 0.1)
    expected = torch.autograd.grad(exact, (features, weight))
    with torch.autocast("cpu", torch.bfloat16):
        loss, entropy = projected_cross_entropy(features, weight, None, target, 0.1)
    assert loss.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0.0)
    for gradient, near in zip(torch.autograd.grad(loss, (features, weight)), expected, strict=True):
        assert gradient.dtype == torch.float32
        assert 0 < (gradient - near).norm() < 0.02 * near.norm()


def test_no_rows_cost_nothing():
    weight = torch.randn(7, 5, requires_grad=True)
    loss, entropy = projected_cross_entropy(torch.empty(0, 5), weight, None, torch.empty(0, dtype=torch.int64), 0.1)
    loss.backward()
    assert loss.item() == entropy.item() == 0.0
    assert weight.grad is not None
    assert not weight.grad.any()


def test_a_model_that_shows_its_output_layer_has_the_loss_of_its_logits():
    torch.manual_seed(1)
    settings = TransformerSettings(dim=8, num_heads=2, hidden_dim=8, encoder_layers=1, decoder_layers=1)
    ids = IdSequences.pack([[4, 5, 6], [7], [5, 5]])
    for model in (build_model(settings, 9, 9), build_model(RecurrentSettings(embedding_dim=4, hidden_dim=6), 9, 9)):
        batch = collate(EncodedText(ids, ids), np.arange(3))
        logits = model.eval()(batch.source, batch.source_lengths, batch.target_input)
        expected = smoothed_cross_entropy(logits, batch.target_output, 0.1)
        torch.testing.assert_close(training_loss(model, batch, 0.1), expected)
