"""`regard.observe`, and what the Weights lens shows."""

import math

import pytest
import torch

import regard
from regard import lenses, masks, scores
from regard.errors import ConfigurationError


def tensors(m: int = 4, n: int = 6) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(2, 6, m, 5), torch.randn(2, 3, n, 5), torch.randn(2, 3, n, 7)


def naive(query: torch.Tensor, key: torch.Tensor, keep: torch.Tensor | None = None) -> torch.Tensor:
    logits = query @ key.repeat_interleave(2, -3).mT / math.sqrt(5)
    return logits.softmax(-1) if keep is None else logits.masked_fill(~keep, -math.inf).softmax(-1).nan_to_num()


def test_the_weights_are_the_softmax():
    query, key, value = tensors()
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights)
    torch.testing.assert_close(seen[weights], naive(query, key))
    torch.testing.assert_close(seen[weights] @ value.repeat_interleave(2, -3), seen.output)
    output, lse = regard.attention_with_lse(query, key, value)
    assert seen.output.equal(output)
    assert seen.lse.equal(lse)


def test_masked_weights_are_zero():
    query, key, value = tensors(5, 3)
    keep = masks.causal().dense(5, 3)
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal())
    torch.testing.assert_close(seen[weights], naive(query, key, keep))
    assert seen[weights][..., :2, :].eq(0).all()
    assert seen[weights].masked_select(~keep).eq(0).all()


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        (slice(1, 3), slice(None)),
        (slice(None), slice(2, 5)),
        (slice(0, 1), slice(5, 6)),
        (slice(-2, None), slice(None, -3)),
        (slice(None, None, 2), slice(1, None, 2)),
        (slice(2, 2), slice(None)),
    ],
)
def test_a_rectangle_is_a_part_of_the_whole(rows, columns):
    query, key, value = tensors()
    whole, part = lenses.Weights(), lenses.Weights(rows, columns)
    seen = regard.observe(
        query, key, value, whole, part, mask=masks.causal() & masks.padding(lengths=[6, 3]), bias=torch.randn(6, 1, 6)
    )
    torch.testing.assert_close(seen[part], seen[whole][..., rows, columns])


def test_every_score_can_be_observed():
    query, key, value = tensors()
    for score in (scores.General(5, 5), scores.Additive(5, 5, 3), scores.Location(5, 6)):
        weights = lenses.Weights()
        seen = regard.observe(query, key, value, weights, score=score)
        torch.testing.assert_close(seen[weights].sum(-1), torch.ones(2, 6, 4))
        torch.testing.assert_close(seen[weights] @ value.repeat_interleave(2, -3), seen.output)


def test_a_sink_takes_its_share():
    query, key, value = tensors()
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, sinks=torch.zeros(6))
    torch.testing.assert_close(1 - seen[weights].sum(-1), (-seen.lse).exp())


def test_weights_are_those_before_dropout():
    query, key, value = tensors()
    weights = lenses.Weights()
    torch.testing.assert_close(regard.observe(query, key, value, weights, dropout_p=0.5)[weights], naive(query, key))


def test_gradients_flow_through_the_weights_and_not_from_masked_nan():
    query, key, value = (tensor.double().requires_grad_() for tensor in tensors())
    weights, mask = lenses.Weights(), masks.padding(lengths=[4, 5])

    def gradient(key: torch.Tensor) -> tuple[torch.Tensor, ...]:
        shown = regard.observe(query, key, value, weights, mask=mask)[weights]
        return torch.autograd.grad(shown.square().sum(), (query, key))

    bad = key.detach().clone()
    bad[..., 5:, :] = math.nan
    for poisoned, clean in zip(gradient(bad.requires_grad_()), gradient(key), strict=True):
        assert poisoned.equal(clean)


def test_rows_that_see_nan_show_it():
    query, key, value = tensors(6, 6)
    key[:, :, 3] = math.nan
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, mask=masks.causal())
    assert seen[weights][..., 3:, :].isnan().all()
    torch.testing.assert_close(seen[weights][..., :3, :].sum(-1), torch.ones(2, 6, 3))


def test_without_lenses():
    assert regard.observe(*tensors()).shown == {}


def test_equal_lenses_are_one():
    assert lenses.Weights(slice(1, 2)) == lenses.Weights(slice(1, 2))
    assert len({lenses.Weights(slice(1, 2)), lenses.Weights(slice(1, 2)), lenses.Weights()}) == 2
    seen = regard.observe(*tensors(), lenses.Weights(slice(1, 2)))
    assert seen[lenses.Weights(slice(1, 2))].shape == (2, 6, 1, 6)


def test_a_lens_that_was_not_given():
    with pytest.raises(KeyError):
        regard.observe(*tensors())[lenses.Weights()]


def test_slices_only():
    with pytest.raises(ConfigurationError, match=r"Weights needs rows as a slice, such as slice\(0, 5\); it is 3"):
        lenses.Weights(3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="Weights needs columns as a slice"):
        lenses.Weights(columns=[1])  # type: ignore[arg-type]
