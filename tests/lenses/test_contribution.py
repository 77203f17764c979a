"""Contributions of keys, ‖α_ij v_j W_h‖, against the products written out in float64; and which code adds them up."""

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, native
from regard.errors import ConfigurationError, ShapeError
from regard.heads import norm_weighted
from regard.kernels import lens_pass
from regard.lenses import Contribution, Mass, Pooled, Received, TopK, Weights

BATCH, HEADS, SHARED, QUERIES, KEYS = 2, 6, 3, 131, 149
SEGMENTS = torch.arange(KEYS) // 40
LENSES = {
    "weights": Weights(),
    "a rectangle": Weights(slice(3, 40), slice(10, 149, 7)),
    "received": Received(),
    "top": TopK(5),
    "mean": Pooled((5, 7)),
    "largest": Pooled((4, 101), "max"),
    "mass": Mass(SEGMENTS),
}
PROBLEMS = {
    "no mask": {},
    "causal": {"mask": masks.causal()},
    "batches that differ": {"mask": masks.padding(lengths=[20, 140]) & masks.window(30, 2)},
    "heads that differ": {"mask": torch.rand(6, 131, 149, generator=torch.Generator().manual_seed(1)) < 0.3},
    "key heads that differ": {"mask": torch.rand(3, 131, 149, generator=torch.Generator().manual_seed(1)) < 0.3},
    "a bias by distance": {"bias": biases.alibi(6)},
    "a bias of pairs": {"bias": torch.randn(131, 149, generator=torch.Generator().manual_seed(1))},
    "softcap": {"softcap": 3.0},
    "a sink": {"sinks": torch.ones(6)},
    "a scale": {"scale": 0.02},
    "rows that attend to nothing": {"mask": masks.causal() & masks.window(before=2) & masks.padding(lengths=[50, 50])},
    "a normalizer": {"normalizer": regard.normalizers.Sigmoid()},
}


def tensors(dtype: torch.dtype) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
    draw = torch.Generator().manual_seed(7)
    sizes = (BATCH, HEADS, QUERIES, 8), (BATCH, SHARED, KEYS, 8), (BATCH, SHARED, KEYS, 5), (17, HEADS * 5)
    query, key, value, weight = (torch.randn(size, generator=draw, dtype=torch.float64) for size in sizes)
    value[:, :, 11] = 0.0  # a key that adds nothing
    return (query.to(dtype), key.to(dtype), value.to(dtype)), weight.to(dtype)


def contributions(given, weight, **options):
    """α_ij · ‖v_j W_h‖ with v_j W_h in memory, from weights in float64."""
    query, key, value = (of.double() for of in given)
    whole = Weights()
    seen = regard.observe(query, key, value, whole, kernel="reference", **options)[whole]
    parts = weight.double().T.unflatten(0, (HEADS, 5))
    return seen * (value.repeat_interleave(HEADS // SHARED, 1) @ parts).norm(dim=-1).unsqueeze(-2)


def reduced(lens, all_of):
    """What a lens shows of a tensor over all pairs."""
    match lens:
        case Weights():
            return all_of[..., lens.rows, lens.columns]
        case Received():
            return all_of.sum(-2)
        case TopK():
            return all_of.topk(lens.k).values
        case Mass():
            own = torch.nn.functional.one_hot(SEGMENTS).double()
            return own[KEYS - QUERIES :].T @ all_of @ own
        case Pooled():
            rows, columns = (
                [n * cell // cells for cell in range(cells + 1)]
                for n, cells in zip(all_of.shape[-2:], lens._both(), strict=True)
            )
            how = torch.amax if lens.reduce == "max" else torch.mean
            return torch.stack(
                [
                    torch.stack([how(all_of[..., a:b, c:d], (-2, -1)) for c, d in pairwise(columns)], -1)
                    for a, b in pairwise(rows)
                ],
                -2,
            )


@pytest.mark.parametrize("native_code", [True, False], ids=["native", "tiles"])
@pytest.mark.parametrize("options", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_contributions_are_norms_of_weighted_transformed_values(options, native_code, monkeypatch):
    if not native_code:
        monkeypatch.setattr(lens_pass, "pass_over", lambda problem: None)
    given, weight = tensors(torch.float32)
    wanted = {name: Contribution(lens, weight) for name, lens in LENSES.items()}
    seen = regard.observe(*given, *wanted.values(), **options)
    truth = contributions(given, weight, **options)
    for name, lens in wanted.items():
        found = seen[lens].weights if name == "top" else seen[lens]
        expected = reduced(lens.lens, truth)
        terms = QUERIES if name in ("received", "mass") else 1
        torch.testing.assert_close(
            found.double(), expected, rtol=2e-5, atol=1e-6 * terms, msg=lambda text, n=name: f"{n}: {text}"
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_of_other_dtypes_too(dtype):
    given, weight = tensors(dtype)
    lens = Contribution(TopK(3), weight)
    found = regard.observe(*given, lens, mask=masks.causal())[lens].weights
    expected = contributions(given, weight, mask=masks.causal()).topk(3).values
    tolerance = (
        1e-9 if dtype == torch.float64 else 1e-4
    )  # of half precision q, k, v and W are as given: sums are float32
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)


def test_the_largest_contribution_is_not_that_of_the_largest_weight():
    given, weight = tensors(torch.float32)
    given[2][:, :, 20] *= 500
    lens, plain = Contribution(TopK(1), weight), TopK(1)
    seen = regard.observe(*given, lens, plain)
    assert seen[lens].columns.eq(20).float().mean() > 0.9
    assert seen[plain].columns.eq(20).float().mean() < 0.2


def test_without_heads():
    query, key, value = torch.randn(5, 8), torch.randn(7, 8), torch.randn(7, 3)
    weight = torch.randn(4, 3)
    lens, whole = Contribution(Weights(), weight), Weights()
    seen = regard.observe(query, key, value, lens, whole)
    torch.testing.assert_close(seen[lens], seen[whole] * (value @ weight.T).norm(dim=-1))


def test_norm_weighted_is_the_same_of_given_weights():
    given, weight = tensors(torch.float32)
    lens, whole = Contribution(Weights(), weight), Weights()
    seen = regard.observe(*given, lens, whole)
    torch.testing.assert_close(seen[lens], norm_weighted(seen[whole], given[2], weight))


def test_nan_behind_a_mask_stays_there():
    given, weight = tensors(torch.float32)
    for of, number in zip(given[1:], (math.inf, math.nan), strict=True):
        of[:, :, -1] = number
    wanted = [Contribution(lens, weight) for lens in LENSES.values()]
    seen = regard.observe(*given, *wanted, mask=masks.causal() & ~masks.global_tokens([KEYS - 1]))
    for lens in wanted:
        found = seen[lens].weights if isinstance(lens.lens, TopK) else seen[lens]
        assert found.isfinite().all(), lens.lens
    rows = regard.observe(*given, wanted[3], mask=masks.causal())[wanted[3]].weights
    assert rows[:, :, -1].isnan().all()
    assert rows[:, :, :-1].isfinite().all()


@pytest.mark.skipif(not native.available(), reason=str(native.why_not()))
@pytest.mark.parametrize("name", ["top", "mean", "largest", "mass", "received"])
def test_native_code_adds_them_up_without_tiles(name, monkeypatch):
    def never(*_, **__):
        raise AssertionError("tiles were asked for")

    monkeypatch.setattr(lens_pass, "_tiles", never)
    given, weight = tensors(torch.float32)
    lens = Contribution(LENSES[name], weight)
    for options in ({}, PROBLEMS["causal"], PROBLEMS["a bias by distance"], PROBLEMS["a sink"]):
        regard.observe(*given, lens, **options)


@pytest.mark.parametrize("wrong", [lenses.Entropy(), lenses.Distance(), lenses.MaxLogit(), 3, Weights])
def test_lenses_that_are_not_linear_are_refused(wrong):
    with pytest.raises(
        ConfigurationError, match="Contribution needs one of the lenses Weights, TopK, Pooled, Received and"
    ):
        Contribution(wrong, torch.ones(2, 2))


def test_an_output_weight_that_does_not_fit():
    given, _ = tensors(torch.float32)
    with pytest.raises(ShapeError, match=r"of 3 heads of 5; the weights have 6: it needs \(dim, 30\)"):
        regard.observe(*given, Contribution(TopK(1), torch.ones(2, 15)))
    with pytest.raises(ShapeError, match="needs 3 heads of 5, or a multiple of them"):
        regard.observe(*given, Contribution(TopK(1), torch.ones(2, 16)))
