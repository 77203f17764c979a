"""Lenses on a tensor of weights against the same lenses on queries and keys."""

import math
from typing import Any

import pytest
import torch

import regard
from regard import heads, lenses, masks
from regard.errors import ConfigurationError, DtypeError, ShapeError
from regard.heads import dense_weights

EVERY = (lenses.Entropy(), lenses.Received(), lenses.Distance(), lenses.TopK(3), lenses.Pooled(3), lenses.Mass([0] * 9))


def flat(shown):
    return shown if isinstance(shown, tuple) else (shown,)


@pytest.mark.parametrize("tile", [dense_weights.MAX_TILE_WEIGHTS, 40])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0])])
def test_what_is_there_looks_like_what_is_computed(monkeypatch, tile, sinks):
    monkeypatch.setattr(dense_weights, "MAX_TILE_WEIGHTS", tile)
    query, key = torch.randn(2, 3, 7, 4), torch.randn(2, 3, 9, 4)
    whole = lenses.Weights()
    places: dict[str, Any] = {"query_positions": torch.arange(7) * 2, "key_positions": torch.arange(9)}
    seen = regard.observe(query, key, key, whole, *EVERY, mask=masks.causal(), sinks=sinks, **places)
    shown = heads.observe_weights(seen[whole], *EVERY, **places)
    for lens in EVERY:
        for ours, theirs in zip(flat(shown[lens]), flat(seen[lens]), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_rows_of_nothing_and_of_nan():
    weights = torch.tensor([[[1.0, 0.0], [0.0, 0.0], [math.nan, 0.5]], [[0.5, 0.5], [0.2, 0.8], [0.0, 1.0]]])
    entropy, top = lenses.Entropy(), lenses.TopK(1)
    shown = heads.observe_weights(weights, entropy, top)
    torch.testing.assert_close(shown[entropy][0], torch.tensor([0.0, 0.0, math.nan]), equal_nan=True)
    assert shown[top].columns[0].squeeze(-1).tolist() == [0, -1, -1]
    assert shown[entropy][1].isfinite().all()


LEADING = {
    **dict.fromkeys(EVERY, 1),
    lenses.Pooled((2, 3), "max"): 1,
    lenses.Distance((3,)): 1,
    lenses.Weights(): 1,
    heads.Metrics(): 1,
    heads.JensenShannon(): 1,
}


@pytest.mark.parametrize("lens", LEADING, ids=lambda lens: repr(lens)[:24])
@pytest.mark.parametrize("number", [1, 4])
def test_three_axes_are_the_heads_of_one_sequence(lens, number):
    """The same results as for a batch of one, without its axis."""
    weights = torch.randn(number, 7, 9).softmax(-1)
    mask = masks.padding(lengths=[8])
    batch, one = (
        heads.observe_weights(weights[None], lens, mask=mask)[lens],
        heads.observe_weights(weights, lens, mask=mask)[lens],
    )
    assert type(one) is type(batch)
    for whole, part in zip(flat(batch), flat(one), strict=True):
        if whole.ndim == 1:  # the edges of bins have no heads
            assert part.equal(whole)
            continue
        assert whole.shape[:2] == (1, number)
        assert part.equal(whole[0])


def test_three_axes_are_not_added_up():
    weights = torch.eye(5).repeat(2, 1, 1)
    weights[1] = torch.tensor([1.0, 0, 0, 0, 0])
    tokens = ["the", "cat", "sat", "on", "mats"]
    lens = heads.Roles(tokens)
    shown = heads.observe_weights(weights, lens)[lens].holding()
    assert [[finding.name for finding in found] for found in shown] == [["self"], ["sink"]]
    assert shown == heads.find_roles(weights, tokens)


def test_weights_as_they_are_are_the_whole_lens():
    weights = torch.rand(3, 4, 5)
    weights[1, 2, 3] = math.nan
    expected = weights.clone()
    expected[1, 2] = math.nan
    torch.testing.assert_close(
        heads.observe_weights(weights, lenses.Weights())[lenses.Weights()], expected, equal_nan=True
    )


@pytest.mark.parametrize("lens", [lenses.Weights(slice(0, 2)), lenses.Alignment()])
def test_lenses_that_compute_weights_are_refused(lens):
    with pytest.raises(ConfigurationError, match="computes weights from queries and keys: observe_weights"):
        heads.observe_weights(torch.eye(3), lens)
    with pytest.raises(ConfigurationError, match="observe needs lenses"):
        heads.observe_weights(torch.eye(3), "entropy")  # type: ignore[arg-type]


def test_weights_are_numbers_of_at_least_0():
    with pytest.raises(
        DtypeError, match="weights need to be a torch.Tensor of floating-point numbers; they are of torch"
    ):
        heads.observe_weights(torch.eye(3).long(), lenses.Entropy())
    with pytest.raises(DtypeError, match="they are a list"):
        heads.observe_weights([[1.0]], lenses.Entropy())  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"weights have the shape \(3,\); they need \(..., heads, queries, keys\)"):
        heads.observe_weights(torch.ones(3), lenses.Entropy())
    with pytest.raises(ShapeError, match="numbers of at least 0, as a softmax gives them; the least is -0.25"):
        heads.observe_weights(torch.tensor([[-0.25, 1.25]]), lenses.Entropy())
