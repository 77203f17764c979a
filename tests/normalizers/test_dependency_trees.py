"""Dependency trees: against the sum over every tree, written out, and what a call of attention has of them."""

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks, normalizers
from regard.errors import ConfigurationError, KernelError, ShapeError
from regard.explorer import Atlas, record

single = pytest.mark.parametrize("single_root", [False, True])


def is_tree(parents: tuple[int, ...], rootless: set[int], single_root: bool) -> bool:
    """Whether all ways lead to a root, which is its own parent, or to a token without a parent."""
    roots = [token for token, parent in enumerate(parents) if parent == token and token not in rootless]
    for token in range(len(parents)):
        for _ in parents:
            token = parents[token]
        if parents[token] != token:
            return False
    return len(roots) == 1 or not single_root


def by_trees(scores: Tensor, single_root: bool) -> Tensor:
    """The share of all trees in which i has the parent j, of scores (N, N)."""
    size = len(scores)
    rootless = {i for i in range(size) if bool((scores[i] == -torch.inf).all())}
    parents = [j for j in range(size) if not (single_root and j in rootless)]
    choices = [[i] if i in rootless else parents for i in range(size)]
    trees = [parents for parents in itertools.product(*choices) if is_tree(parents, rootless, single_root)]
    masses = torch.stack(
        [torch.stack([scores[i, j] for i, j in enumerate(tree) if i not in rootless]).sum() for tree in trees]
    ).softmax(0)
    weights = torch.zeros_like(scores)
    for mass, tree in zip(masses, trees, strict=True):
        chosen = torch.zeros_like(scores)
        for i, j in enumerate(tree):
            if i not in rootless:
                chosen[i, j] = 1.0
        weights = weights + mass * chosen
    return weights


@single
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_weights_and_gradients_are_those_of_every_tree(size, single_root):
    scores = (2 * torch.randn(2, 3, size, size, dtype=torch.float64)).requires_grad_()
    found, sums = normalizers.DependencyTrees(single_root).normalize(scores)
    expected = torch.stack([by_trees(each, single_root) for each in scores.flatten(0, 1)]).view_as(scores)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(sums))
    assert not sums.any()
    above = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(each, scores, above) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-11)


def test_masked_pairs_are_in_no_tree_and_a_token_that_attends_to_nothing_has_no_parent():
    scores = torch.randn(1, 1, 5, 5, dtype=torch.float64)
    scores[..., 1, 3] = scores[..., 0, 0] = scores[..., 4, 2] = scores[..., 2, :] = -torch.inf
    found, sums = normalizers.DependencyTrees().normalize(scores)
    torch.testing.assert_close(found[0, 0], by_trees(scores[0, 0], False), rtol=1e-9, atol=1e-12)
    assert sums[0, 0].tolist() == [0.0, 0.0, -torch.inf, 0.0, 0.0]
    assert not found[0, 0, 2].any()
    assert not found[scores == -torch.inf].any()


@single
def test_scores_that_prefer_cycles_and_large_ones(single_root):
    """Of two tokens that are each other's parents 15 nats above roots, float32 would lose the roots."""
    scores = torch.randn(1, 1, 4, 4)
    scores[..., 0, 1] += 15
    scores[..., 1, 0] += 15
    exact = by_trees(scores[0, 0].double(), single_root)
    found = normalizers.DependencyTrees(single_root).normalize(scores)[0][0, 0]
    assert found.dtype is torch.float32
    assert (found - exact).abs().max() < 4 * torch.finfo(torch.float32).eps
    shifted = scores.double() + torch.tensor(
        [[500.0], [-500.0], [90.0], [0.0]]
    )  # a number for all of a row changes nothing
    moved = normalizers.DependencyTrees(single_root).normalize(shifted)[0][0, 0]
    torch.testing.assert_close(moved, exact, rtol=1e-8, atol=1e-10)


@single
@pytest.mark.parametrize("above", [-700.0, -40.0, 40.0, 700.0])
def test_roots_far_above_or_below_arcs(single_root, above):
    scores = torch.randn(5, 5, dtype=torch.float64)
    scores = scores + above * torch.eye(5, dtype=torch.float64)
    found = normalizers.DependencyTrees(single_root).normalize(scores[None])[0][0]
    torch.testing.assert_close(found, by_trees(scores, single_root), rtol=1e-9, atol=1e-12)


@single
@pytest.mark.parametrize("token", [0, 2, 4])
@pytest.mark.parametrize("others", [False, True])
def test_any_token_that_attends_to_nothing(single_root, token, others):
    """The first one too; others: whether they attend to it."""
    scores = torch.randn(5, 5, dtype=torch.float64)
    scores[token] = -torch.inf
    if not others:
        scores[:, token] = -torch.inf
    found = normalizers.DependencyTrees(single_root).normalize(scores[None])[0][0]
    torch.testing.assert_close(found, by_trees(scores, single_root), rtol=1e-9, atol=1e-12)


@single
def test_without_any_tree_weights_are_nan(single_root):
    scores = torch.randn(3, 5, 5, dtype=torch.float64)
    scores[0].fill_diagonal_(-torch.inf)  # no root
    scores[1, :3, 3:], scores[1, :3, :3] = -torch.inf, scores[1, :3, :3].fill_diagonal_(-torch.inf)  # a cycle of three
    found = normalizers.DependencyTrees(single_root).normalize(scores)[0]
    assert found[:2].isnan().all()
    torch.testing.assert_close(found[2], by_trees(scores[2], single_root), rtol=1e-9, atol=1e-12)


@single
def test_derivatives_of_a_call(single_root):
    leaves = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    normalizer = normalizers.DependencyTrees(single_root)
    attend = lambda *of: regard.attention(*of, normalizer=normalizer)  # noqa: E731
    assert torch.autograd.gradcheck(attend, leaves)
    assert torch.autograd.gradgradcheck(attend, leaves)


def test_padding_changes_no_tree_and_lenses_and_records_see_it(tmp_path):
    query, key, value = torch.randn(3, 2, 4, 37, 8)
    told: dict[str, Any] = {"normalizer": normalizers.DependencyTrees(), "mask": masks.padding([23, 37])}
    whole = regard.attention(query, key, value, **told)
    alone = regard.attention(*(each[:1, :, :23] for each in (query, key, value)), normalizer=told["normalizer"])
    torch.testing.assert_close(whole[:1, :, :23], alone)
    weights = lenses.Weights()
    seen = regard.observe(query, key, value, weights, **told)
    torch.testing.assert_close(seen[weights] @ value, whole)

    class Layer(torch.nn.Module):
        def forward(self, *tensors: Tensor) -> Tensor:
            return regard.attention(*tensors, **told)

    with record(model := Layer(), dtype="keep") as recording, torch.no_grad():
        model(query, key, value)
    recording.atlas().save(tmp_path / "a.atlas")
    recorded = Atlas.open(tmp_path / "a.atlas").maps[0]
    found = torch.from_numpy(recorded.weights(2, slice(5, 11), slice(0, 37)))
    torch.testing.assert_close(found, seen[weights][0, 2, 5:11].to(found.dtype), atol=1e-5, rtol=1e-4)


def test_what_has_no_meaning_is_refused():
    rows, trees = torch.randn(1, 4, 7, 8), normalizers.DependencyTrees()
    with pytest.raises(ShapeError, match="there are 5 queries and 7 keys: dependency trees need the queries of all"):
        regard.attention(rows[:, :, :5], rows, rows, normalizer=trees)
    with pytest.raises(ConfigurationError, match=r"sinks has no meaning with normalizer=DependencyTrees"):
        regard.attention(rows, rows, rows, sinks=torch.zeros(4), normalizer=trees)
    with pytest.raises(KernelError, match="those of dependency-trees attention depend on all"):
        regard.attention(rows, rows, rows, normalizer=trees, kernel="tiled")


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_a_single_root_is_true_or_false(value):
    with pytest.raises(ConfigurationError, match=f"single_root is {value!r}; it needs True or False"):
        normalizers.DependencyTrees(single_root=value)
