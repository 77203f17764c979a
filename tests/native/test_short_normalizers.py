"""Whole rows of other normalizers than softmax in C: scores that are hard for each, sums of rows, and gradients."""

import pytest
import torch
from torch import Tensor

import regard
from regard import masks, native, normalizers
from regard.core.normalizer import Normalizer

pytestmark = pytest.mark.skipif(not native.available(), reason="there is no native code")


def of_scores(scores: Tensor, normalizer: Normalizer, kernel: str, **options) -> Tensor:
    """The weights of scores (1, 1, M, N): queries are rows of them, keys and values ones and zeros."""
    each = torch.eye(scores.shape[-1], dtype=scores.dtype)[None, None]
    return regard.attention(scores, each, each, scale=1.0, normalizer=normalizer, kernel=kernel, **options)


HARD = {
    "near 0": (torch.tensor([1e-6, -3e-5, 2e-4, -1e-3, 0.0, 5e-7, 0.1]), [normalizers.Softpick()]),
    "all below 0": (torch.tensor([-1.0, -2.0, -0.5, -8.0]), [normalizers.Softpick(), normalizers.ReLU(2)]),
    "large": (torch.tensor([3e19, 1e19, -5e19, 2e19]), [normalizers.ReLU(), normalizers.ReLU(2)]),
    "small": (torch.tensor([3e-20, 1e-20, -5e-21, 2e-20]), [normalizers.ReLU(), normalizers.ReLU(2)]),
    "far apart": (torch.tensor([60.0, 100.0, -70.0, 99.0]), [normalizers.Softpick(), normalizers.TopScores(2)]),
    "sure": (torch.tensor([-40.0, 30.0, -90.0, 5.0, 120.0, -3.0]), [normalizers.StickBreaking()]),
}


@pytest.mark.parametrize("case", HARD)
def test_hard_scores_are_those_of_the_formula(case):
    scores, kinds = HARD[case]
    for normalizer in kinds:
        expected = of_scores(scores.double().view(1, 1, 1, -1), normalizer, "reference")
        found = of_scores(scores.view(1, 1, 1, -1), normalizer, "short")
        torch.testing.assert_close(found.double(), expected, rtol=2e-6, atol=1e-16)  # of the formula in float64


@pytest.mark.parametrize("k", [1, 3, 7, 40])
@pytest.mark.parametrize("keys", [3, 16, 37, 131])
def test_exactly_k_keys_have_weight_of_equal_scores_too(k, keys):
    scores = torch.randint(3, (1, 2, 19, keys), generator=torch.Generator().manual_seed(keys)).float()
    each = torch.eye(keys).expand(1, 2, -1, -1)
    weights = regard.attention(scores, each, each, scale=1.0, normalizer=normalizers.TopScores(k), kernel="short")
    assert (weights > 0).sum(-1).unique().tolist() == [min(k, keys)]
    least = scores.sort(-1, descending=True).values[..., min(k, keys) - 1, None]
    assert bool(((weights > 0) <= (scores >= least)).all())
    expected = torch.where(weights > 0, scores, -torch.inf).softmax(-1)
    torch.testing.assert_close(weights, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel", ["short", None])
def test_hard_weights_are_those_of_the_formula_and_gradients_those_of_softmax(kernel, dtype):
    torch.manual_seed(4)
    drawn, found, number = torch.randn(3, 2, 3, 53, 8).to(dtype), [], []
    for own, way in ((dtype, kernel), (torch.float64, "reference")):
        leaves = [each.to(own).requires_grad_() for each in drawn]
        options = {"mask": masks.causal(), "normalizer": normalizers.Hard(), "kernel": way}
        output = regard.attention(*leaves, **options)
        found.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
        query, key, value = leaves
        number.append(regard.observe(query, key, value, mask=masks.causal(), normalizer=normalizers.Hard()).lse)
    allowed = 2e-5 if dtype == torch.float32 else 0.1
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=allowed, atol=allowed)
    torch.testing.assert_close(number[0].double(), number[1].double(), rtol=1e-3, atol=allowed)


@pytest.mark.parametrize("kernel", ["short", None])
def test_hard_rows_without_keys_give_no_value_a_gradient(kernel):
    leaves = [torch.randn(1, 2, length, 8, requires_grad=True) for length in (3, 7, 7)]
    keep = torch.tensor([[False] * 7, [True, False] * 3 + [False], [False] * 7])
    for _ in range(2):
        options = {"mask": masks.where(keep=keep), "normalizer": normalizers.Hard(), "kernel": kernel}
        output = regard.attention(*leaves, **options)
        assert not output[:, :, ::2].any()
        found = torch.autograd.grad(output[:, :, ::2].sum(), leaves)
        assert not any(each.any() for each in found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_softmax_off_by_one_is_the_formula_also_where_its_like_came_before(spread, dtype):
    torch.manual_seed(5)
    drawn = (spread * torch.randn(3, 2, 3, 53, 8)).to(dtype)
    keep, above = masks.causal().dense(53, 53), torch.randn(2, 3, 53, 8)
    exact = [each.double().requires_grad_() for each in drawn]
    scores = (exact[0] @ exact[1].mT / 8**0.5).masked_fill(~keep, -torch.inf)
    expected = torch.nn.functional.pad(scores, (0, 1)).softmax(-1)[..., :-1] @ exact[2]
    gradients = torch.autograd.grad(expected, exact, above.double())
    allowed = (2e-5 if dtype == torch.float32 else 0.05) * spread**2
    for _ in range(3):
        leaves = [each.clone().requires_grad_() for each in drawn]
        output = regard.attention(*leaves, mask=masks.causal(), normalizer=normalizers.Softmax1())
        found = torch.autograd.grad(output, leaves, above.to(dtype))
        with torch.no_grad():
            plain = regard.attention(*drawn, mask=masks.causal(), normalizer=normalizers.Softmax1())
        for ours, theirs in zip([output, plain, *found], [expected, expected, *gradients], strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=allowed, atol=allowed)


@pytest.mark.parametrize("normalizer", [normalizers.ReLU(), normalizers.ReLU(2), normalizers.Softpick()], ids=repr)
def test_gradients_through_the_log_sum_exp(normalizer):
    torch.manual_seed(0)
    drawn, found = torch.randn(3, 2, 3, 37, 8), []
    for kernel, dtype in (("short", torch.float32), ("reference", torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in drawn]
        output, lse = regard.attention_with_lse(
            *leaves, mask=masks.window(after=2), normalizer=normalizer, kernel=kernel
        )
        finite = lse.masked_fill(lse == -torch.inf, 0.0)
        total = output.square().sum() + (finite * torch.arange(37)).sum()
        found.append([output, lse, *torch.autograd.grad(total, leaves)])
    for ours, exact in zip(*found, strict=True):
        torch.testing.assert_close(
            ours.double(), exact, rtol=2e-5, atol=2e-5 * exact.detach()[exact.isfinite()].abs().max().item()
        )


def test_what_keys_leave_of_a_row_is_known_where_no_float_is_that_small():
    scores = torch.full((1, 1, 2, 200), 3.0)
    scores[..., 1, :], each = -300.0, torch.eye(200)[None, None]
    seen = regard.observe(scores, each, each, scale=1.0, normalizer=normalizers.StickBreaking())
    expected = torch.tensor([[[-200 * (3.0 + torch.tensor(-3.0).exp().log1p()), 0.0]]])
    torch.testing.assert_close(seen.lse, expected, atol=1e-30, rtol=2e-6)


@pytest.mark.parametrize(
    "normalizer",
    [
        *(normalizers.ReLU(), normalizers.Softpick(), normalizers.StickBreaking(), normalizers.TopScores(3)),
        normalizers.Hard(),
    ],
    ids=repr,
)
def test_rows_without_keys_and_hidden_infinity_are_0(normalizer):
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 23, 8).unbind()
    keep = torch.rand(1, 1, 23, 23) > 0.5
    keep[..., 3, :] = False
    keep[..., 7] = False
    key[..., 7, :], value[..., 7, :] = torch.nan, torch.inf
    results = []
    for kernel, dtype in (("short", torch.float32), ("reference", torch.float64)):
        leaves = [each.to(dtype).requires_grad_() for each in (query, key, value)]
        output = regard.attention(*leaves, mask=keep, normalizer=normalizer, kernel=kernel)
        results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    for ours, exact in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)
    assert not results[0][0][..., 3, :].any()
