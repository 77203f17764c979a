"""The linear chain against all selections of keys, written out, and what bounds its memory."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks, normalizers
from regard.backends.torch import row_loop
from regard.errors import ConfigurationError, DtypeError, ShapeError

HEADS, KEY_HEADS = 4, 2


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).requires_grad_()


def by_selections(scores: Tensor, transitions: Tensor) -> Tensor:
    """Σ of p(z) over all selections z with key j, of the keys that are not masked; scores (heads, M, n)."""
    weights = torch.zeros_like(scores)
    for head, row in itertools.product(range(scores.shape[0]), range(scores.shape[1])):
        own, b = scores[head, row], transitions if transitions.ndim == 2 else transitions[head]
        keys = (own > -torch.inf).nonzero().flatten().tolist()
        masses = []
        for z in itertools.product((0, 1), repeat=len(keys)):
            terms = [own[key] for key, selected in zip(keys, z, strict=True) if selected]
            terms += [b[pair] for pair in itertools.pairwise(z)]
            masses.append((z, sum(terms, torch.zeros((), dtype=scores.dtype)).exp()))
        total = torch.stack([mass for _, mass in masses]).sum()
        for place, key in enumerate(keys):
            share = torch.stack([mass for z, mass in masses if z[place]]).sum() / total
            weights = weights.index_put(tuple(map(torch.tensor, (head, row, key))), share)
    return weights


@pytest.mark.parametrize("shape", [(2, 2), (HEADS, 2, 2)])
@pytest.mark.parametrize("kernel", ["tiled", "reference", None])
def test_it_is_the_marginal_of_all_selections_with_all_gradients(kernel, shape):
    query, key, value = leaves = [drawn(1, HEADS, 5, 8), drawn(1, KEY_HEADS, 7, 8), drawn(1, KEY_HEADS, 7, 3)]
    transitions = (2 * drawn(*shape)).detach().requires_grad_()
    keep = torch.rand(1, HEADS, 5, 7) > 0.3
    keep[:, :, 2] = False  # a query without keys
    keep[:, 0, 3, 1:] = False  # and one with one key, or none
    normalizer = normalizers.LinearChain(transitions)
    found = regard.attention(query, key, value, mask=keep, normalizer=normalizer, kernel=kernel)
    scores = (query @ key.repeat_interleave(2, 1).mT / 8**0.5).masked_fill(~keep, -torch.inf)
    expected = by_selections(scores[0], transitions).unsqueeze(0) @ value.repeat_interleave(2, 1)
    torch.testing.assert_close(found, expected)
    assert found[:, :, 2].eq(0).all()
    above = torch.randn_like(expected)
    both = (torch.autograd.grad(each, [*leaves, transitions], above, retain_graph=True) for each in (found, expected))
    torch.testing.assert_close(*both)


def test_without_transitions_each_key_is_on_its_own():
    query, key, value = drawn(2, HEADS, 37, 8), drawn(2, HEADS, 53, 8), drawn(2, HEADS, 53, 3)
    chain = normalizers.LinearChain(torch.full((2, 2), 0.7))
    options: dict[str, Any] = {"mask": masks.causal() & masks.padding([29, 53])}
    torch.testing.assert_close(
        regard.attention(query, key, value, normalizer=chain, **options),
        regard.attention(query, key, value, normalizer=normalizers.Sigmoid(0.0), **options),
    )


def test_neighbours_that_belong_together_are_selected_as_segments():
    """A score of 4 in the middle of keys of -0.5: its neighbours are selected with it, the farther the less."""
    scores = torch.full((1, 1, 61), -0.5, dtype=torch.float64)
    scores[..., 30] = 4.0
    weights = normalizers.LinearChain(torch.tensor([[1.5, 0.0], [0.0, 1.5]])).normalize(scores)[0][0, 0]
    assert weights[30] > 0.9
    assert (weights[30:45].diff() < 0).all()
    torch.testing.assert_close(weights, weights.flip(0))
    assert weights[29] > 1.1 * weights[10]  # of a key far from it


@pytest.mark.parametrize("scores_at_once", [1, HEADS * 131 * 3, 2**20])
def test_rows_at_once_of_any_number(scores_at_once, monkeypatch):
    monkeypatch.setattr(row_loop, "SCORES_AT_ONCE", scores_at_once)
    query, key, value = leaves = [drawn(2, HEADS, 67, 8), drawn(2, KEY_HEADS, 131, 8), drawn(2, KEY_HEADS, 131, 3)]
    transitions = drawn(HEADS, 2, 2)
    options: dict[str, Any] = {
        "mask": masks.window(before=40, after=9),
        "normalizer": normalizers.LinearChain(transitions),
    }
    asked, results = (lenses.Received(), lenses.TopK(3)), []
    for kernel in ("tiled", "reference"):
        seen = regard.observe(query, key, value, *asked, kernel=kernel, **options)
        gradients = torch.autograd.grad(seen.output.square().sum(), [*leaves, transitions])
        results.append([seen.output, seen.lse, seen[asked[0]], seen[asked[1]].weights, *gradients])
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("large", [1e3, 1e5])
def test_large_scores_and_transitions_neither_overflow_nor_lose_the_gradient(large):
    scores = torch.tensor([[[large, -large, 0.5, -0.25, large]]]).requires_grad_()
    transitions = torch.tensor([[0.0, -80.0], [-80.0, 0.0]]).requires_grad_()
    weights = normalizers.LinearChain(transitions).normalize(scores)[0]
    assert weights.isfinite().all()
    gradients = torch.autograd.grad(weights.sum(), (scores, transitions))
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(weights[..., [0, 1, 4]], torch.tensor([[[1.0, 0.0, 1.0]]]))


def test_memory_is_that_of_some_rows(monkeypatch, largest_storage):
    """No tensor of all pairs: 256² float32 numbers of 8 heads would be 2 MB, and of both directions 4 MB."""
    monkeypatch.setattr(row_loop, "SCORES_AT_ONCE", 2**14)
    n = 256
    query = torch.randn(1, 8, n, 4, requires_grad=True)
    normalizer = normalizers.LinearChain(torch.eye(2))
    with largest_storage:
        regard.attention(query, query, query, normalizer=normalizer, kernel="tiled").sum().backward()
    assert largest_storage.bytes < 9 * 2**14 * 4


@pytest.mark.parametrize(
    ("transitions", "error", "message"),
    [
        (torch.zeros(2), ShapeError, r"transitions is \(2,\); it needs \(2, 2\), .* or \(4, 2, 2\) for each head"),
        (torch.zeros(3, 2, 2), ShapeError, r"transitions is \(3, 2, 2\)"),
        (torch.zeros(2, 2, dtype=torch.int64), DtypeError, "transitions needs floating-point numbers"),
    ],
)
def test_transitions_that_do_not_fit_are_named(transitions, error, message):
    query = torch.randn(1, HEADS, 5, 8)
    with pytest.raises(error, match=message):
        regard.attention(query, query, query, normalizer=normalizers.LinearChain(transitions))


def test_it_has_no_sinks():
    query = torch.randn(1, HEADS, 5, 8)
    with pytest.raises(ConfigurationError, match="sinks has no meaning"):
        regard.attention(
            query, query, query, normalizer=normalizers.LinearChain(torch.eye(2)), sinks=torch.zeros(HEADS)
        )
