"""Sigmoid attention in Triton, by its interpreter: held to its oracle, and to the formula in float64."""

import pytest
import torch

import regard
from regard import biases, masks, normalizers
from regard.kernels.flash import FlashKernel
from regard.testing import Case, assert_agrees, suite

from ..normalizers.oracles import ORACLES

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.interpreted,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # NumPy's, where exponentials of large numbers are infinite
]

LONGER = (
    Case(mask="causal", bias="relative", variant="softcap", layout="multiquery", lengths="67x131"),
    Case(mask="keep", bias="pairs", layout="3d", lengths="67x131", dropout="dropout", poison="masked"),
    Case(mask="documents", layout="2d", lengths="37x67", dtype="bfloat16", poison="value"),
)


def test_the_agreement_suite():
    oracle = ORACLES["sigmoid"]
    # Infinity in a query or key may be a score of -inf, which counts for nothing; here rows that attend to it are NaN.
    pairs = suite([FlashKernel()], strength=1, oracle=oracle)
    found = [(kernel, case) for kernel, case in pairs if case.poison not in ("query", "key")]
    assert len(found) > 10
    for kernel, case in found:
        assert_agrees(kernel, case, oracle=oracle)


@pytest.mark.parametrize("case", LONGER, ids=lambda case: case.id)
def test_several_tiles(case):
    assert_agrees(FlashKernel(), case, oracle=ORACLES["sigmoid"])


@pytest.mark.parametrize("shape", [(), (4,)])
@pytest.mark.parametrize("dropout_p", [0.0, 0.25])
def test_the_gradient_of_its_bias(shape, dropout_p):
    query, key, value = torch.randn(2, 4, 67, 16), torch.randn(2, 2, 131, 16), torch.randn(2, 2, 131, 24)
    above, bias, table = torch.randn(2, 4, 67, 24), torch.randn(shape) - 2.0, torch.randn(4, 32)
    results = []
    for kernel, dtype in (("cpu_flash", torch.float32), ("reference", torch.float64), ("reference", torch.float32)):
        leaves = [each.to(dtype, copy=True).requires_grad_() for each in (query, key, value, bias, table)]
        options = {"mask": masks.causal(), "softcap": 5.0, "dropout_p": dropout_p, "kernel": kernel}
        options |= {"normalizer": normalizers.Sigmoid(leaves[3]), "bias": biases.relative(leaves[4])}
        torch.manual_seed(5)
        output = regard.attention(*leaves[:3], **options)
        results.append([output.detach(), *torch.autograd.grad(output, leaves, above.to(dtype))])
    for ours, exact, plain in zip(*results, strict=True):
        budget = 8 * (plain - exact).abs().max() + 2.0**-22 * exact.abs().max()
        assert (ours - exact).abs().max() <= budget
    assert results[0][4].abs().max() > 0.1


def test_nan_and_infinity_reach_the_rows_that_attend_to_them():
    query, key, value = (torch.randn(1, 2, 67, 16) for _ in range(3))
    key[0, 0, 40], key[0, 1, 50, 3], value[0, 0, 60] = torch.nan, torch.inf, torch.inf
    leaves = [each.requires_grad_() for each in (query, key, value)]
    output = regard.attention(*leaves, mask=masks.causal(), normalizer=normalizers.Sigmoid(-1.0), kernel="cpu_flash")
    finite = output.isfinite().all(-1)[0]
    assert finite[0, :40].all()
    assert not finite[0, 40:].any()
    assert finite[1, :50].all()
    assert not finite[1, 50:].any()
    gradients = torch.autograd.grad(output, leaves, torch.randn_like(output))
    assert all(gradient.isfinite().all() for gradient in gradients)
    assert (gradients[0][0, 0, 40:] == 0).all()
    assert (gradients[1][0, 0, 40:] == 0).all()


def test_parts_of_the_keys_are_added():
    query, key, value = torch.randn(2, 37, 16), torch.randn(2, 67, 16), torch.randn(2, 67, 16)
    options = {"normalizer": normalizers.Sigmoid(-2.0), "kernel": "cpu_flash"}
    whole = regard.attention(query[None], key[None], value[None], **options)
    parts = [
        regard.attention(query[None], key[None, :, s], value[None, :, s], **options) for s in (slice(29), slice(29, 67))
    ]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-6)
