"""Reductions by the C code against those over tiles, and which lenses use which."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, native
from regard.attention import Observation
from regard.backends.cpu.flash_tiles import FlashProblem
from regard.backends.cpu.library import DTYPES
from regard.backends.cpu.reduce_tiles import reduce_weights
from regard.heads import Metrics
from regard.kernels import lens_pass
from regard.lenses import topk
from regard.lenses.forms import ColumnSums, DistanceSums, EntropySums, LargestWeights, WeightForm
from regard.tiles import mask_tiles

pytestmark = pytest.mark.skipif(not native.available(), reason=str(native.why_not()))

SEGMENTS = torch.tensor([0, 0, 2, 2, 2, -1, 3]).repeat_interleave(29)[:197]
REDUCED = (
    lenses.Entropy(),
    lenses.Received(),
    lenses.Pooled((5, 7)),
    lenses.Pooled((191, 3), "sum"),
    lenses.Pooled((4, 101), "max"),
    lenses.Mass(SEGMENTS),
    lenses.TopK(1),
    lenses.TopK(50),
    lenses.Distance(),
    lenses.Distance((3, 17)),
)
TILED = (lenses.TopK(topk.MOST_NATIVE + 1), lenses.Mass(torch.arange(197) % 3), lenses.Mass(SEGMENTS.expand(2, 197)))

PROBLEMS: dict[str, dict[str, Any]] = {
    "no mask": {},
    "causal": {"mask": masks.causal()},
    "batches that differ": {"mask": masks.padding(lengths=[20, 190]) & masks.window(30, 2)},
    "heads that differ": {"mask": torch.rand(6, 193, 197, generator=torch.Generator().manual_seed(1)) < 0.3},
    "a bias by distance": {"bias": biases.alibi(6), "softcap": 3.0},
    "positions": {"mask": masks.causal(), "query_positions": torch.arange(193) * 2, "key_positions": torch.arange(197)},
    "a sink": {"sinks": torch.ones(6)},
    "dropout": {"dropout_p": 0.5, "mask": masks.causal()},
}


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.randn(2, 6, 193, 8).to(dtype), torch.randn(2, 3, 197, 8).to(dtype)


def shown(seen: Observation, lens: lenses.Lens) -> list[Tensor]:
    found = seen[lens]
    return list(found) if isinstance(found, tuple) else [found]


def assert_alike(one: Observation, other: Observation, wanted: tuple[lenses.Lens, ...], rows: int) -> None:
    for lens in wanted:
        for has, also in zip(shown(one, lens), shown(other, lens), strict=True):
            if has.is_floating_point():
                torch.testing.assert_close(has, also, rtol=1e-4, atol=2e-6 * rows, equal_nan=True)
            else:
                assert has.eq(also).float().mean() > 0.99  # equal weights may come in any order


@pytest.mark.covering(strength=1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PROBLEMS)
def test_tiles_and_native_code_show_the_same(name, dtype, monkeypatch):
    monkeypatch.setattr(mask_tiles, "MAX_WASTED_PAIRS", 0)  # batches that differ are visited apart, however small
    query, key = tensors(dtype)
    wanted = (*REDUCED, *TILED)
    seen = regard.observe(query, key, key, *wanted, **PROBLEMS[name])
    monkeypatch.setattr(lens_pass, "pass_over", lambda problem: None)
    assert_alike(seen, regard.observe(query, key, key, *wanted, **PROBLEMS[name]), wanted, 193)


@pytest.mark.parametrize("lens", REDUCED, ids=repr)
def test_what_native_code_reduces_has_no_tiles(lens, monkeypatch):
    def never(*_: object, **__: object) -> None:
        raise AssertionError("tiles were asked for")

    monkeypatch.setattr(lens_pass, "_tiles", never)
    query, key = tensors(torch.float32)
    for options in PROBLEMS.values():
        regard.observe(query, key, key, lens, **options)


@pytest.mark.parametrize("lens", TILED, ids=repr)
def test_what_native_code_has_no_word_for_has_tiles(lens, monkeypatch):
    monkeypatch.setattr("regard.backends.cpu.weight_pass.reduce_weights", None)
    query, key = tensors(torch.float32)
    regard.observe(query, key, key, lens)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float64, {}),
        (torch.float32, {"bias": torch.zeros(193, 197)}),
        (torch.float32, {"score": regard.scores.Additive(8, 8, 4)}),
    ],
    ids=["float64", "a bias of pairs", "additive"],
)
def test_problems_that_native_code_cannot_weigh_have_tiles(dtype, options, monkeypatch):
    monkeypatch.setattr("regard.backends.cpu.weight_pass.reduce_weights", None)
    query, key = tensors(dtype)
    entropy = lenses.Entropy()
    with torch.no_grad():
        assert regard.observe(query, key, key, entropy, **options)[entropy].isfinite().all()


def test_a_lens_made_of_others_goes_natively_too(monkeypatch):
    query, key = tensors(torch.float32)
    lens, kinds = Metrics(), []
    reduce = reduce_weights

    def watched(problem: FlashProblem, lse: Tensor, asked: list[WeightForm]) -> None:
        kinds.extend(type(each) for each in asked)
        reduce(problem, lse, asked)

    monkeypatch.setattr("regard.backends.cpu.weight_pass.reduce_weights", watched)
    seen = regard.observe(query, key, key, lens, mask=masks.causal())
    assert kinds == [EntropySums, DistanceSums, ColumnSums, LargestWeights]
    monkeypatch.setattr(lens_pass, "pass_over", lambda problem: None)
    assert_alike(seen, regard.observe(query, key, key, lens, mask=masks.causal()), (lens,), 193)


def test_rows_that_attend_to_nan_show_it_and_masked_nan_does_not():
    query, key = tensors(torch.float32)
    value = key.clone()
    key[0, 0, 120] = math.nan
    entropy, received, topk = lenses.Entropy(), lenses.Received(), lenses.TopK(3)
    pooled, largest = lenses.Pooled((193, 2)), lenses.Pooled((193, 2), "max")
    wanted = (entropy, received, topk, pooled, largest)
    seen = regard.observe(query, key, value, *wanted, mask=masks.causal())
    broken = torch.zeros(2, 6, 193, dtype=torch.bool)
    broken[0, :2, 116:] = True  # queries are the last 193 of 197
    assert seen[entropy].isnan().equal(broken)
    assert seen[received].isnan().equal(broken.any(-1, keepdim=True).expand(-1, -1, 197))
    assert seen[topk].weights.isnan().equal(broken[..., None].expand(-1, -1, -1, 3))
    assert seen[pooled].isnan().equal(broken[..., None].expand(-1, -1, -1, 2))
    assert seen[largest].isnan().equal(broken[..., None].expand(-1, -1, -1, 2))
    clean = regard.observe(query, value, value, *wanted, mask=masks.causal())
    torch.testing.assert_close(seen[entropy][~broken], clean[entropy][~broken])
    torch.testing.assert_close(seen[received][:, 2:], clean[received][:, 2:])
    without = masks.causal() & masks.where(keep=torch.arange(197) != 120)
    poisoned = regard.observe(query, key, value, *wanted, mask=without)
    whole = regard.observe(query, value, value, *wanted, mask=without)
    for lens in wanted:
        for has, also in zip(shown(poisoned, lens), shown(whole, lens), strict=True):
            assert torch.equal(has, also)
