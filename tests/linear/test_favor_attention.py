"""Attention by FAVOR+ features in blocks: the same as by features of all positions, with gradients."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.linear import (
    FavorPlus,
    favor_attention,
    linear_attention,
    linear_attention_with_state,
    linear_plans,
)

DIM, VALUE_DIM = 5, 3


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(favor_attention, "BLOCK_FEATURES", 300)


def inputs(spread=1.0, heads=6, key_heads=2, queries=33, keys=70):
    torch.manual_seed(queries + keys)
    shapes = (2, heads, queries, DIM), (2, key_heads, keys, DIM), (2, key_heads, keys, VALUE_DIM)
    return [(spread * torch.randn(shape, dtype=torch.float64)).requires_grad_() for shape in shapes]


def whole(monkeypatch, tensors, **options):
    """The result of the path that computes all features at once."""
    with monkeypatch.context() as patch:
        patch.setattr(linear_plans, "takes_features_in_blocks", lambda *_: False)
        return regard.linear_attention(*tensors, **options)


def results(output, tensors):
    upstream = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(0))
    return output, *torch.autograd.grad(output, tensors, upstream)


MASKS = {"all": None, "padding": masks.padding([50, 0]), "keys": masks.where(keep=torch.arange(70) % 3 > 0)}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("spread", [0.1, 1.0, 6.0])
def test_blocks_are_the_whole(monkeypatch, mask, spread):
    tensors, features = inputs(spread), FavorPlus(DIM, 20, seed=1)
    options = {
        "feature_map": features,
        "mask": MASKS[mask] if mask != "keys" else masks.where(keep=(torch.arange(70) % 3 > 0)[None]),
    }
    found = results(regard.linear_attention(*tensors, **options), tensors)
    expected = results(whole(monkeypatch, tensors, **options), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("lengths", [(1, 1), (0, 4), (4, 0), (0, 0), (16, 17)])
def test_short_and_empty_sequences(monkeypatch, lengths):
    tensors, features = inputs(queries=lengths[0], keys=lengths[1]), FavorPlus(DIM, 20, seed=1)
    found = results(regard.linear_attention(*tensors, feature_map=features), tensors)
    expected = results(whole(monkeypatch, tensors, feature_map=features), tensors)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)


def test_second_derivatives():
    tensors = inputs(heads=2, key_heads=1, queries=3, keys=4)
    features = FavorPlus(DIM, 6, seed=1)
    assert torch.autograd.gradgradcheck(lambda *t: regard.linear_attention(*t, feature_map=features), tensors)


def test_logarithms_that_grow_along_the_keys_do_not_overflow():
    query, key, value = (tensor.detach().float() for tensor in inputs())
    rows = torch.linspace(0, 80, 70)[:, None]
    features = FavorPlus(DIM, 20, seed=1)
    found = regard.linear_attention(query, key * rows, value, feature_map=features)
    truth = regard.linear_attention(query.double(), (key * rows).double(), value.double(), feature_map=features)
    assert found.isfinite().all()
    torch.testing.assert_close(found.double(), truth, atol=1e-3, rtol=1e-3)


def test_a_nan_reaches_what_attends_to_it(monkeypatch):
    query, key, value = (tensor.detach() for tensor in inputs())
    key[0, 1, 60, 2], query[1, 0, 3, 0] = math.nan, math.inf
    options = {"feature_map": FavorPlus(DIM, 20, seed=1), "mask": masks.padding([70, 50])}
    found, expected = (
        regard.linear_attention(query, key, value, **options),
        whole(monkeypatch, (query, key, value), **options),
    )
    torch.testing.assert_close(found, expected, equal_nan=True)
    assert found.isnan().any()


def test_a_matrix_that_is_learned_has_a_gradient():
    tensors, features = inputs(), FavorPlus(DIM, 20, seed=1)
    learned = FavorPlus(DIM, 20, matrix=features.matrix.clone().requires_grad_())
    output = regard.linear_attention(*tensors, feature_map=learned)
    (gradient,) = torch.autograd.grad(output.square().sum(), learned.matrix)
    assert gradient.abs().sum() > 0
    torch.testing.assert_close(output, regard.linear_attention(*tensors, feature_map=features))


class TestKeysWhoseFeaturesAreFarApart:
    """Relative to the largest feature of a later key, those of the first ones are 0 in float32."""

    @staticmethod
    def inputs() -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(2, heads, 67, 8, generator=generator) for heads in (4, 2, 2))
        key[:, :, :3] *= 12.0  # the features of a key fall with its length
        key[:, :, 30:33] *= 9.0
        return [query, key, value]

    @pytest.mark.parametrize("keep", [None, masks.padding([67, 41])])
    @pytest.mark.parametrize("decay", [None, (2, 2, 67), (2, 2, 67, 32)])
    def test_rows_and_gradients_are_those_of_float64(self, keep, decay):
        features = FavorPlus(8, 32, seed=0)
        gate = None if decay is None else -torch.rand(decay, generator=torch.Generator().manual_seed(1))
        results = []
        for dtype in (torch.float32, torch.float64):
            tensors = [tensor.to(dtype).requires_grad_() for tensor in self.inputs()]
            decays = None if gate is None else gate.to(dtype)
            output = linear_attention(*tensors, feature_map=features, causal=True, mask=keep, decay=decays)
            results.append([output, *torch.autograd.grad(output.square().sum(), tensors)])
        first = self.inputs()[2][:, :, 0].repeat_interleave(2, 1)
        torch.testing.assert_close(results[0][0][:, :, 0].detach(), first, msg="the first row has one key")
        for found, exact in zip(*results, strict=True):
            assert (found.double() - exact).abs().max() < 2e-4 * exact.abs().max()

    def test_parts_and_steps_are_the_whole(self):
        query, key, value = self.inputs()
        options: dict[str, Any] = {"feature_map": FavorPlus(8, 32, seed=0), "causal": True}
        whole, last = linear_attention_with_state(query, key, value, **options)
        for parts in ([2, 31, 34], [1] * 67):
            state, outputs = None, []
            for q, k, v in zip(*(tensor.split(parts, 2) for tensor in (query, key, value)), strict=True):
                output, state = linear_attention_with_state(q, k, v, state=state, **options)
                outputs.append(output)
            torch.testing.assert_close(torch.cat(outputs, 2), whole, rtol=1e-4, atol=1e-5)
            assert state is not None
            torch.testing.assert_close(state.log_scale, last.log_scale)
            torch.testing.assert_close(state.sums, last.sums, rtol=1e-4, atol=1e-5)
