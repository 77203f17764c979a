"""Projective trees: against the sum over every tree without crossing arcs, written out, and in calls of attention."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import lenses, masks, normalizers
from regard.errors import ConfigurationError, KernelError, ShapeError
from regard.explorer import Atlas, record

single = pytest.mark.parametrize("single_root", [False, True])


def is_projective_tree(parents: tuple[int, ...], single_root: bool) -> bool:
    """Whether all ways lead to roots, their own parents, and no arcs cross; roots have one from before the first."""
    roots = sum(parent == token for token, parent in enumerate(parents))
    arcs = [sorted((token, -1 if parent == token else parent)) for token, parent in enumerate(parents)]
    for token in range(len(parents)):
        for _ in parents:
            token = parents[token]
        if parents[token] != token:
            return False
    crossing = any(a < c < b < d for (a, b), (c, d) in itertools.permutations(arcs, 2))
    return not crossing and (roots == 1 or not single_root)


def by_trees(scores: Tensor, single_root: bool) -> Tensor:
    """The share of all projective trees in which i has the parent j, of scores (N, N); without masked tokens."""
    exists = scores > -math.inf
    size, kept = len(scores), (exists.any(-1) & exists.any(-2)).nonzero().flatten().tolist()
    choices = itertools.product(range(len(kept)), repeat=len(kept))
    trees = torch.tensor([parents for parents in choices if is_projective_tree(parents, single_root)])
    own = scores[kept][:, kept]
    masses = own[torch.arange(len(kept)), trees].sum(-1).softmax(0)
    arcs = torch.nn.functional.one_hot(trees, len(kept)).to(scores.dtype)  # (trees, child, parent)
    weights = torch.zeros(size, size, dtype=scores.dtype)
    return weights.index_put((torch.tensor(kept)[:, None], torch.tensor(kept)), torch.einsum("t,tij->ij", masses, arcs))


@pytest.mark.parametrize(("size", "trees"), [(1, (1, 1)), (2, (3, 2)), (3, (12, 7)), (4, (55, 30)), (5, (273, 143))])
def test_how_many_trees_there_are(size, trees):
    """Binomial(3n, n) / (2n + 1), and binomial(3n - 2, n - 1) / n with one root: all of these are summed over."""
    for single_root, count in zip((False, True), trees, strict=True):
        choices = itertools.product(range(size), repeat=size)
        assert sum(is_projective_tree(parents, single_root) for parents in choices) == count
        found = normalizers.ProjectiveTrees(single_root).normalize(torch.zeros(1, size, size).double())[0]
        torch.testing.assert_close(count * found, (count * found).round())


@single
@pytest.mark.parametrize("size", [1, 2, 3, 5, 6])
def test_weights_and_gradients_are_those_of_every_tree(size, single_root):
    scores = (2 * torch.randn(1, 2, size, size, dtype=torch.float64)).requires_grad_()
    found, sums = normalizers.ProjectiveTrees(single_root).normalize(scores)
    expected = torch.stack([by_trees(each, single_root) for each in scores.flatten(0, 1)]).view_as(scores)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(found.sum(-1), torch.ones_like(sums))
    assert not sums.any()
    above = torch.randn_like(found)
    ours, theirs = (torch.autograd.grad(each, scores, above) for each in (found, expected))
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@single
@pytest.mark.parametrize("left_out", [(0,), (2,), (5,), (0, 1), (2, 3), (1, 4, 5)])
@pytest.mark.parametrize("as_keys", [False, True])
def test_tokens_that_attend_to_nothing_or_are_no_keys_are_left_out(left_out, single_root, as_keys):
    """Whether others attend to them or not, or they are nobody's keys, as padding: arcs lead over them."""
    scores = torch.randn(6, 6, dtype=torch.float64)
    (scores.mT if as_keys else scores)[list(left_out)] = -torch.inf
    leaf = scores[None].clone().requires_grad_()
    found, sums = normalizers.ProjectiveTrees(single_root).normalize(leaf)
    expected = by_trees(scores, single_root)
    torch.testing.assert_close(found[0], expected, rtol=1e-11, atol=1e-13)
    assert [i for i, number in enumerate(sums[0].tolist()) if number == -math.inf] == list(left_out)
    (gradient,) = torch.autograd.grad(found, leaf, torch.randn_like(found))
    assert gradient.isfinite().all()
    assert not gradient[0, list(left_out)].any()
    assert not gradient[0, :, list(left_out)].any()


@single
def test_masked_pairs_are_in_no_tree(single_root):
    scores = torch.randn(5, 5, dtype=torch.float64)
    scores[1, 3] = scores[0, 0] = scores[4, 2] = scores[2, 4] = -torch.inf
    leaf = scores.clone().requires_grad_()
    found = normalizers.ProjectiveTrees(single_root).normalize(leaf[None])[0][0]
    expected = by_trees(leaf, single_root)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-13)
    assert not found[scores == -torch.inf].any()
    (ours,) = torch.autograd.grad(found, leaf, above := torch.randn_like(found))
    exists = scores > -torch.inf
    torch.testing.assert_close(ours[exists], torch.autograd.grad(expected, leaf, above)[0][exists])
    assert not ours[~exists].any()


@single
@pytest.mark.parametrize("above", [-700.0, 700.0])
def test_large_scores_lose_no_digits(single_root, above):
    """Of roots far above or below arcs, and of a number for all of a row, which changes nothing."""
    scores = torch.randn(5, 5, dtype=torch.float64)
    scores = scores + above * torch.eye(5, dtype=torch.float64)
    found = normalizers.ProjectiveTrees(single_root).normalize(scores[None])[0][0]
    torch.testing.assert_close(found, by_trees(scores, single_root), rtol=1e-9, atol=1e-12)
    moved = scores + torch.tensor([[500.0], [-500.0], [90.0], [0.0], [-7.0]])
    moved = normalizers.ProjectiveTrees(single_root).normalize(moved[None])[0][0]
    torch.testing.assert_close(moved, found, rtol=1e-9, atol=1e-12)


@single
def test_without_any_tree_weights_are_nan_and_without_any_token_0(single_root):
    scores = torch.randn(3, 5, 5, dtype=torch.float64)
    scores[0].fill_diagonal_(-torch.inf)  # no root
    scores[1] = -torch.inf
    found = normalizers.ProjectiveTrees(single_root).normalize(scores)[0]
    assert found[0].isnan().all()
    assert not found[1].any()
    torch.testing.assert_close(found[2], by_trees(scores[2], single_root), rtol=1e-11, atol=1e-13)


@single
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_derivatives_of_a_call(single_root):
    leaves = [torch.randn(1, 2, 4, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    normalizer = normalizers.ProjectiveTrees(single_root)
    attend = lambda *of: regard.attention(*of, normalizer=normalizer)  # noqa: E731
    assert torch.autograd.gradcheck(attend, leaves, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(attend, leaves)


@single
@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
def test_transforms_of_torch(single_root):
    scores, tangent = torch.randn(2, 3, 1, 4, 4, dtype=torch.float64)
    weights = lambda each: normalizers.ProjectiveTrees(single_root).normalize(each)[0]  # noqa: E731
    torch.testing.assert_close(torch.vmap(weights)(scores), torch.stack([weights(each) for each in scores]))
    leaf = scores.clone().requires_grad_()
    torch.testing.assert_close(
        torch.func.jvp(weights, (scores,), (tangent,))[1], torch.autograd.grad(weights(leaf), leaf, tangent)[0]
    )


def test_padding_changes_no_tree_and_lenses_and_records_see_it(tmp_path):
    query, key, value = torch.randn(3, 2, 4, 17, 8)
    told: dict[str, Any] = {"normalizer": normalizers.ProjectiveTrees(), "mask": masks.padding([11, 17])}
    whole = regard.attention(query, key, value, **told)
    alone = regard.attention(*(each[:1, :, :11] for each in (query, key, value)), normalizer=told["normalizer"])
    torch.testing.assert_close(whole[:1, :, :11], alone)
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
    found = torch.from_numpy(recorded.weights(2, slice(5, 11), slice(0, 17)))
    torch.testing.assert_close(found, seen[weights][0, 2, 5:11].to(found.dtype), atol=1e-5, rtol=1e-4)


def test_first_derivatives_store_no_splits_of_spans():
    """What autograd keeps is the scores: the sums over spans, N³ numbers, are computed again."""
    sizes: list[int] = []
    scores = torch.randn(1, 29, 29, dtype=torch.float64, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(
        lambda each: (sizes.append(each.numel()), each)[1], lambda each: each
    ):
        normalizers.ProjectiveTrees().normalize(scores)
    assert sum(sizes) < 8 * 29**2


def test_what_has_no_meaning_is_refused():
    rows, trees = torch.randn(1, 4, 7, 8), normalizers.ProjectiveTrees()
    with pytest.raises(ShapeError, match="there are 5 queries and 7 keys: dependency trees need the queries of all"):
        regard.attention(rows[:, :, :5], rows, rows, normalizer=trees)
    with pytest.raises(ConfigurationError, match=r"sinks has no meaning with normalizer=ProjectiveTrees"):
        regard.attention(rows, rows, rows, sinks=torch.zeros(4), normalizer=trees)
    with pytest.raises(KernelError, match="those of projective-trees attention depend on all"):
        regard.attention(rows, rows, rows, normalizer=trees, kernel="tiled")
