import math
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import regard
from regard import biases, masks
from regard.kernels import sdpa
from regard.kernels.planning import choice
from regard.kernels.validation import AttentionOptions


@pytest.fixture
def calls(monkeypatch) -> list[dict]:
    """What torch's operator is called with."""
    seen: list[dict] = []
    original = sdpa.scaled_dot_product_attention

    def spy(query, key, value, attn_mask, dropout_p, is_causal, **rest):
        seen.append({"shape": tuple(query.shape), "mask": attn_mask, "causal": is_causal, **rest})
        return original(query, key, value, attn_mask, dropout_p, is_causal, **rest)

    monkeypatch.setattr(sdpa, "scaled_dot_product_attention", spy)
    return seen


def test_a_square_causal_mask_stays_a_word(calls):
    query = torch.randn(2, 3, 5, 4)
    regard.attention(query, query, query, mask=masks.causal(), kernel="sdpa")
    assert calls[0]["causal"]
    assert calls[0]["mask"] is None


@pytest.mark.parametrize(
    "options",
    [
        {"query_positions": torch.arange(5) + 1},
        {"key_positions": torch.arange(5).flip(0)},
        {"bias": torch.zeros(5, 5)},
        {"mask": masks.causal() & masks.causal()},
    ],
)
def test_anything_more_is_spelled_out(calls, options):
    query = torch.randn(2, 3, 5, 4)
    regard.attention(query, query, query, **{"mask": masks.causal(), **options}, kernel="sdpa")
    assert not calls[0]["causal"]
    assert calls[0]["mask"] is not None


@pytest.mark.parametrize("mask", [None, masks.causal()])
@pytest.mark.parametrize("leading", [(2,), (2, 3)])
def test_a_bias_for_each_head_has_the_axes_with_which_torch_keeps_no_weights(calls, mask, leading):
    query = torch.randn(*leading, 4, 5, 8)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        regard.attention(query, query, query, mask=mask, bias=biases.alibi(4), kernel="sdpa")
    assert calls[0]["mask"].shape == (1, 4, 5, 5)


def test_keys_of_a_group_are_not_repeated(calls):
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    regard.attention(query, key, key, kernel="sdpa")
    assert calls[0]["enable_gqa"]


def test_leading_dims_become_one_batch(calls):
    query = torch.randn(2, 3, 4, 5, 8)
    regard.attention(query, query, query, kernel="sdpa")
    assert calls[0]["shape"] == (6, 4, 5, 8)


@pytest.mark.parametrize("shape", [(5, 7), (4, 5, 7), (3, 4, 5, 7), (2, 3, 4, 5, 7), (2, 1, 1, 1, 7), (3, 1, 1, 7)])
def test_masks_and_biases_of_any_shape_in_five_dims(shape):
    query, key = torch.randn(2, 3, 4, 5, 8), torch.randn(2, 3, 4, 7, 8)
    calls: list[AttentionOptions] = [{"mask": torch.rand(shape) < 0.6}, {"bias": torch.randn(shape)}]
    for options in calls:
        expected = regard.attention(query, key, key, kernel="reference", **options)
        torch.testing.assert_close(regard.attention(query, key, key, kernel="sdpa", **options), expected)


def test_no_keys_and_a_query_of_nan():
    query, key = torch.full((1, 2, 3, 4), math.nan), torch.zeros(1, 2, 0, 4)
    for kernel in ("sdpa", "tiled"):
        assert regard.attention(query, key, key, kernel=kernel).eq(0).all()


def test_cost():
    def cost(**options: Any) -> float:
        query = torch.zeros(1, 2, 5, 8)
        return sdpa.SdpaKernel().cost(regard.explain(query, query, query, **options).problem).bytes

    assert cost() == cost(mask=masks.causal()) == 0
    assert cost(bias=torch.zeros(5, 5)) == 2 * 5 * 5 * 4
    assert 0 < cost(mask=torch.ones(5, 5).bool()) <= 2 * 5 * 5 * 5


@pytest.mark.parametrize("key_heads", [1, 2])
def test_one_causal_query_attends_to_all_keys(calls, key_heads):
    query, key = torch.randn(1, 2, 1, 4), torch.randn(1, key_heads, 7, 4)
    with_mask = regard.attention(query, key, key, mask=masks.causal(), kernel="sdpa")
    assert calls[0]["mask"] is None
    assert torch.equal(with_mask, regard.attention(query, key, key, kernel="sdpa"))
    earlier = regard.attention(query, key, key, mask=masks.causal(), query_positions=range(3, 4), kernel="sdpa")
    assert calls[-1]["mask"] is not None
    first = regard.attention(query, key[:, :, :4], key[:, :, :4], kernel="sdpa")
    torch.testing.assert_close(earlier, first)


def evaluations(monkeypatch: pytest.MonkeyPatch, kind: type[masks.Mask]) -> list[None]:
    """One entry for each evaluation of masks of a class, from now on."""
    found, original = [], kind.keep
    monkeypatch.setattr(kind, "keep", lambda mask, grid: found.append(None) or original(mask, grid))
    return found


def test_a_small_mask_is_evaluated_once(monkeypatch):
    mask, query = masks.window(before=3, after=2), torch.randn(1, 2, 11, 4)
    found = evaluations(monkeypatch, type(mask))
    first = regard.attention(query, query, query, mask=mask, kernel="sdpa")
    once = len(found)
    assert once
    again = regard.attention(query, query, query, mask=masks.window(before=3, after=2), kernel="sdpa")
    assert len(found) == once
    assert torch.equal(first, again)


def test_what_is_written_into_a_small_mask_counts():
    query = torch.randn(1, 1, 5, 4)
    keep = torch.ones(5, 5, dtype=torch.bool)
    for mask in (masks.where(keep=keep), masks.from_mod(lambda b, h, q, k: keep[q, k])):
        keep.fill_(True)
        regard.attention(query, query, query, mask=mask, kernel="sdpa")
        keep.copy_(torch.eye(5, dtype=torch.bool))
        torch.testing.assert_close(regard.attention(query, query, query, mask=mask, kernel="sdpa"), query)


def test_a_mask_memoized_in_inference_mode_serves_a_gradient():
    mask, query = masks.window(before=2, after=3), torch.randn(1, 2, 9, 4, requires_grad=True)
    bias = torch.zeros(9, 9, requires_grad=True)
    with torch.inference_mode():
        regard.attention(query, query, query, mask=mask, kernel="sdpa")
    regard.attention(query, query, query, mask=mask, kernel="sdpa").sum().backward()
    regard.attention(query, query, query, mask=mask, bias=bias, kernel="sdpa").sum().backward()
    assert query.grad is not None
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("options", [{}, {"mask": masks.causal()}], ids=["all pairs", "causal"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.usefixtures("any_processor")
def test_small_plain_problems_are_not_compared(monkeypatch, options, grad):
    def refuse(problem):
        raise AssertionError("the times of kernels were compared")

    monkeypatch.setattr(choice, "rounded_signature", refuse)
    query = torch.randn(1, 2, 16, 8, requires_grad=grad)
    regard.attention(query, query, query, **options)


@pytest.mark.parametrize("keys", [3, 16, 63])
@pytest.mark.parametrize("tensor", [0, 1, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_nan_among_few_keys_in_training(keys, tensor, causal):
    """A row that attends to NaN is NaN and gives no gradient; the other rows give theirs."""
    clean = [torch.randn(1, 1, keys, 4) for _ in range(3)]
    row = keys - 1 if causal or tensor == 0 else 0  # the last row alone attends to it, where any does not
    clean[tensor][..., row, 0] = float("nan")
    mask, results = masks.causal() if causal else None, []
    for kernel in ("sdpa", "tiled"):
        inputs = [each.clone().requires_grad_() for each in clean]
        output = regard.attention(*inputs, mask=mask, kernel=kernel)
        results.append((output.detach(), *torch.autograd.grad(output.nansum(), inputs)))
    bad = results[0][0].isnan().any(-1).view(-1)
    assert bad.tolist() == ([False] * (keys - 1) + [True] if causal or tensor == 0 else [True] * keys)
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True)


@pytest.mark.parametrize("key_heads", [6, 2])
@pytest.mark.parametrize(("dtype", "rows"), [(torch.bfloat16, 2), (torch.float32, 1)])
def test_torch_gets_a_single_row_of_bfloat16_twice(calls, dtype, rows, key_heads):
    """It takes up to ten times as long for one row as for two."""
    query, key = torch.randn(2, 6, 1, 16).to(dtype), torch.randn(2, key_heads, 300, 16).to(dtype)
    output = regard.attention(query, key, key, kernel="sdpa")
    assert calls[0]["shape"] == (2, 6, rows, 16)
    assert output.shape == (2, 6, 1, 16)
    expected = regard.attention(query.float(), key.float(), key.float(), kernel="reference")
    assert (output.float() - expected).abs().max() < (2e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("kernel", ["block_sparse", "decode"])
def test_a_single_row_of_bfloat16_has_its_log_sum_exp(kernel):
    query, key = torch.randn(2, 6, 1, 16).bfloat16(), torch.randn(2, 6, 300, 16).bfloat16()
    window = masks.causal() & masks.window(before=200)
    output, lse = regard.attention_with_lse(query, key, key, mask=window, kernel=kernel)
    expected, sums = regard.attention_with_lse(query.float(), key.float(), key.float(), mask=window, kernel="reference")
    assert output.shape == (2, 6, 1, 16)
    assert (output.float() - expected).abs().max() < 2e-2
    assert (lse - sums).abs().max() < 2e-2
