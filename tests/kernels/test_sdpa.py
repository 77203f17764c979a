import math
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.kernels import sdpa
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
    for kernel in ("sdpa", "reference"):
        assert regard.attention(query, key, key, kernel=kernel).eq(0).all()


def test_cost():
    def cost(**options: Any) -> float:
        query = torch.zeros(1, 2, 5, 8)
        return sdpa.SdpaKernel().cost(regard.explain(query, query, query, **options).problem).bytes

    assert cost() == cost(mask=masks.causal()) == 0
    assert cost(bias=torch.zeros(5, 5)) == 2 * 5 * 5 * 4
    assert 0 < cost(mask=torch.ones(5, 5).bool()) <= 2 * 5 * 5 * 5
