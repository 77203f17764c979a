"""Metrics against their formulas, and on heads with known weights."""

import math

import pytest
import torch

import regard
from regard import heads, lenses, masks
from regard.errors import ConfigurationError


def test_every_number_is_its_formula():
    weights = torch.randn(2, 3, 6, 8).softmax(-1)
    shown = heads.head_metrics(weights, local=2)
    far = (torch.arange(2, 8)[:, None] - torch.arange(8)).abs()
    entropy = -(weights * weights.log()).sum(-1)
    expected = heads.HeadMetrics(
        entropy=entropy.mean(-1),
        effective_keys=entropy.exp().mean(-1),
        distance=(weights * far).sum(-1).mean(-1),
        sink=weights[..., 0].mean(-1),
        top1=weights.amax(-1).mean(-1),
        local=(weights * (far <= 2)).sum(-1).mean(-1),
    )
    for name, ours, theirs in zip(shown._fields, shown, expected, strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_the_lens_shows_what_the_numbers_show():
    query, key = torch.randn(2, 4, 300, 8), torch.randn(2, 2, 300, 8)
    lens, whole = heads.Metrics(local=3), lenses.Weights()
    seen = regard.observe(query, key, key, lens, whole, mask=masks.causal())
    for ours, theirs in zip(seen[lens], heads.head_metrics(seen[whole], local=3), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_rows_of_nothing_count_for_nothing_and_nan_shows():
    weights = torch.tensor([[[0.0, 0.0], [0.5, 0.5]], [[0.0, 0.0], [0.0, 0.0]], [[math.nan, 0.0], [1.0, 0.0]]])
    shown = heads.head_metrics(weights)
    assert shown.effective_keys[0] == pytest.approx(2.0)
    assert shown.sink[0] == shown.top1[0] == 0.5
    assert shown.local[0] == 1.0
    for of_heads in shown:
        assert of_heads[1:].isnan().all()


def test_no_key_at_all():
    assert heads.head_metrics(torch.zeros(2, 3, 0)).sink.isnan().all()


@pytest.mark.parametrize("local", [-1, 2.5, True])
def test_local_is_a_whole_number(local):
    with pytest.raises(ConfigurationError, match="local"):
        heads.Metrics(local=local)
