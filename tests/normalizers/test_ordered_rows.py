"""Normalizers whose rows follow from the row before, some rows at a time, against all rows at once in float64."""

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, lenses, masks, normalizers
from regard.backends.torch import row_loop
from regard.core.normalizer import Normalizer
from regard.errors import ConfigurationError

HEADS, KEY_HEADS, DIM = 4, 2, 8


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def inputs(queries: int, keys: int) -> list[Tensor]:
    return [drawn(2, HEADS, queries, DIM), drawn(2, KEY_HEADS, keys, DIM), drawn(2, KEY_HEADS, keys, 5)]


KINDS = {
    "monotonic": lambda bias: normalizers.Monotonic(bias),
    "mocha": lambda bias: normalizers.MoChA(bias, width=3),
}


def by_hand(normalizer: Normalizer, scores: Tensor, bias: Tensor) -> Tensor:
    """Raffel et al. 2017, Eq. 9 to 14, and Chiu and Raffel 2018, Eq. 14, one row and one key after the other."""
    stop = (scores + bias[:, None, None]).sigmoid()
    rows, before = [], torch.zeros_like(stop[..., 0, :])
    before[..., 0] = 1.0
    for i in range(stop.shape[-2]):
        reached, own = torch.zeros_like(before[..., 0]), []
        for j in range(stop.shape[-1]):
            going_on = 1 - stop[..., i, j - 1] if j else torch.zeros_like(reached)
            reached = reached * going_on + before[..., j]
            own.append(reached * stop[..., i, j])
        before = torch.stack(own, -1)
        rows.append(before)
    alignments = torch.stack(rows, -2)
    if not isinstance(normalizer, normalizers.MoChA):
        return alignments
    columns = []
    for j in range(scores.shape[-1]):
        parts = []
        for end in range(j, min(j + normalizer.width, scores.shape[-1])):
            chunk = scores[..., max(end - normalizer.width + 1, 0) : end + 1]
            share = chunk.softmax(-1).nan_to_num(0.0)[..., j - end - 1]
            parts.append(alignments[..., end] * share)
        columns.append(torch.stack(parts).sum(0))
    return torch.stack(columns, -1)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("kernel", ["tiled", "reference"])
def test_it_is_the_recurrence_with_all_gradients(name, kernel):
    query, key, value = leaves = inputs(13, 17)
    bias, slopes = drawn(HEADS), drawn(HEADS)
    keep = torch.rand(2, HEADS, 13, 17) > 0.3
    keep[..., 5, :], keep[..., 7] = False, False
    normalizer = KINDS[name](bias)
    found = regard.attention(
        query, key, value, mask=keep, normalizer=normalizer, bias=biases.alibi(slopes), softcap=3.0, kernel=kernel
    )
    scores = 3.0 * torch.tanh(query @ key.repeat_interleave(2, 1).mT / DIM**0.5 / 3.0)
    away = (torch.arange(4, 17)[:, None] - torch.arange(17)).abs()
    scores = (scores - slopes[:, None, None] * away).masked_fill(~keep, -torch.inf)
    expected = by_hand(normalizer, scores, bias) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected)
    above, leaves = torch.randn_like(expected), [*leaves, bias, slopes]
    gradients = (torch.autograd.grad(each, leaves, above) for each in (found, expected))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("scores_at_once", [1, 4 * 53 * 3, 2**20])
def test_blocks_of_rows_of_any_height(name, scores_at_once, monkeypatch):
    """One row at a time: 131 blocks, three levels of states."""
    monkeypatch.setattr(row_loop, "SCORES_AT_ONCE", scores_at_once)
    query, key, value = leaves = inputs(131, 53)
    bias = drawn(HEADS)
    normalizer, mask = KINDS[name](bias), masks.window(before=60, after=9)
    asked = lenses.Received(), lenses.TopK(3)
    options = {"mask": mask, "normalizer": normalizer, "query_positions": torch.arange(131)}
    results = []
    for kernel in ("tiled", "reference"):
        seen = regard.observe(query, key, value, *asked, kernel=kernel, **options)
        gradients = torch.autograd.grad(seen.output.square().sum(), [*leaves, bias])
        results.append([seen.output, seen.lse, *gradients])
    torch.testing.assert_close(*results)
    weights = lenses.Weights()
    whole = regard.observe(query, key, value, weights, **options)[weights]
    part = lenses.Weights(slice(9, 70, 7), slice(2, 30))
    some = regard.observe(query, key, value, part, **options)[part]
    torch.testing.assert_close(some, whole[..., 9:70:7, 2:30])
    torch.testing.assert_close(seen[asked[0]], whole.sum(-2))
    torch.testing.assert_close(seen[asked[1]].weights, whole.topk(3, -1).values)


@pytest.mark.parametrize("name", KINDS)
def test_a_row_of_nan_and_those_after_it(name):
    query, key, value = (tensor.detach() for tensor in inputs(13, 17))
    normalizer, keep = KINDS[name](0.0), torch.ones(13, 17, dtype=torch.bool)
    keep[:, 9] = False
    clean = regard.attention(query, key, value, mask=keep, normalizer=normalizer)
    hidden = key.clone()
    hidden[:, :, 9] = torch.nan
    for kernel in ("tiled", "reference", None):
        found = regard.attention(query, hidden, value, mask=keep, normalizer=normalizer, kernel=kernel)
        torch.testing.assert_close(found, clean)
    broken = query.clone()
    broken[:, :, 6] = torch.nan
    for kernel in ("tiled", "reference", None):
        found = regard.attention(broken, key, value, mask=keep, normalizer=normalizer, kernel=kernel)
        torch.testing.assert_close(found[:, :, :6], clean[:, :, :6])
        assert found[:, :, 6:].isnan().all()


@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0), (0, 0)])
def test_empty_sequences(queries, keys):
    query, key, value = leaves = inputs(queries, keys)
    found = regard.attention(
        query, key, value, normalizer=normalizers.Monotonic(), query_positions=range(queries), kernel="tiled"
    )
    assert found.shape == (2, HEADS, queries, 5)
    assert not found.any()
    assert all(not gradient.any() for gradient in torch.autograd.grad(found.sum(), leaves))


@pytest.mark.parametrize("name", KINDS)
def test_memory_is_that_of_some_rows(name, monkeypatch, largest_storage):
    """No tensor of all pairs: 512² float32 numbers of 8 heads would be 8.4 MB; at once are 0.5 MB of them."""
    monkeypatch.setattr(row_loop, "SCORES_AT_ONCE", 2**17)
    n = 512
    query = torch.randn(1, 8, n, 4, requires_grad=True)
    with largest_storage:
        output = regard.attention(query, query, query, normalizer=KINDS[name](-3.0), kernel="tiled")
        output.sum().backward()
    assert largest_storage.bytes < 4 * 2**17 * 4


def test_it_has_no_dropout_and_no_sinks():
    query, key, value = inputs(5, 7)
    with pytest.raises(ConfigurationError, match="dropout_p has no meaning"):
        regard.attention(query, key, value, normalizer=normalizers.Monotonic(), dropout_p=0.1)
    with pytest.raises(ConfigurationError, match="sinks has no meaning"):
        regard.attention(query, key, value, normalizer=normalizers.Monotonic(), sinks=torch.zeros(HEADS).double())
