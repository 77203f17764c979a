"""Decays and rules of layers: their formulas in float64, and what they refuse."""

import math

import pytest
import torch

from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.linear import DeltaRule, FeatureDecay, FixedDecay, HeadDecay, SumRule

LOGITS = torch.tensor([-40.0, -1.5, 0.0, 3.0, 40.0], dtype=torch.float64)


@pytest.mark.parametrize("temperature", [16.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_learned_decays_are_logarithms_of_gates(dtype, temperature):
    by_hand = torch.tensor([-math.log1p(math.exp(-x)) / temperature for x in LOGITS.tolist()], dtype=torch.float64)
    expected = torch.promote_types(dtype, torch.float32)
    of_features = FeatureDecay(temperature)(LOGITS.to(dtype).expand(2, 3, 4, 5))
    of_heads = HeadDecay(temperature)(LOGITS.to(dtype)[:, None].expand(2, 3, 5, 1))
    for found, shape in ((of_features, (2, 3, 4, 5)), (of_heads, (2, 3, 5))):
        assert found.shape == shape
        assert found.dtype == expected, "half precision is widened before the logarithm"
        torch.testing.assert_close(found[0, 0].flatten()[-5:].double(), by_hand, rtol=1e-6, atol=1e-12)


def test_beta_is_the_share_of_each_head():
    logits = torch.randn(2, 7, 3, dtype=torch.float64)
    torch.testing.assert_close(DeltaRule().beta(logits), 1 / (1 + (-logits).exp().transpose(1, 2)))


def test_rules_are_values():
    assert SumRule() == SumRule(normalize=True) != SumRule(normalize=False)
    assert DeltaRule() == DeltaRule()
    assert not DeltaRule().normalize
    assert HeadDecay() == HeadDecay(16.0) != HeadDecay(8.0)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: FixedDecay([-0.1]), DtypeError, "logarithms needs a floating-point tensor; it is a list"),  # type: ignore[arg-type]
        (lambda: FixedDecay(torch.tensor([-1])), DtypeError, "needs a floating-point tensor; it is torch.int64"),
        (lambda: FixedDecay(torch.zeros(2, 1)), ShapeError, r"has the shape \(2, 1\); it needs one for each key head"),
        (lambda: FixedDecay(torch.tensor([-1.0, 0.5])), ConfigurationError, "values up to 0.5; each is the logarithm"),
        (lambda: FixedDecay(torch.tensor([torch.nan, -1.0])), ConfigurationError, "values up to nan"),
        (lambda: HeadDecay(0.0), ConfigurationError, "temperature is 0.0; it needs a finite number above 0"),
        (lambda: FeatureDecay(math.inf), ConfigurationError, "temperature is inf; it needs a finite number above 0"),
        (lambda: FeatureDecay("16"), ConfigurationError, "temperature is '16'; it needs"),  # type: ignore[arg-type]
    ],
)
def test_bad_decays(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_decay_of_no_memory_is_taken():
    assert FixedDecay(torch.tensor([-torch.inf, 0.0])).logarithms.tolist() == [-math.inf, 0.0]
    assert FixedDecay(torch.zeros(3, device="meta")).logarithms.is_meta
