"""Parts of one softmax put together: what the parts are, and in what order they come, makes no difference."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard import masks
from regard.errors import ShapeError

Part = tuple[torch.Tensor, torch.Tensor]


def parts_of(n: int, cuts: list[int], seed: int, mask: bool = True) -> tuple[Part, list[Part]]:
    """Attention over n keys, whole, and over the keys between the cuts; some rows have no key in some parts."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 3, m, 5, generator=generator).double() for m in (4, n, n))
    keep = torch.rand(2, 3, 4, n, generator=generator) < 0.4
    edges = [0, *sorted(cuts), n]

    def attend(keys: slice) -> Part:
        kept = masks.where(keep=keep[..., keys]) if mask else None
        return regard.attention_with_lse(query, key[..., keys, :], value[..., keys, :], mask=kept)

    return attend(slice(0, n)), [attend(slice(a, b)) for a, b in itertools.pairwise(edges)]


def same(one: Part, other: Part) -> None:
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


lists_of_cuts = st.lists(st.integers(0, 9), min_size=0, max_size=4)


@settings(max_examples=30, deadline=None)
@given(cuts=lists_of_cuts, seed=st.integers(0, 1000), order=st.randoms(use_true_random=False))
def test_merged_parts_are_the_whole_in_any_order(cuts, seed, order):
    whole, parts = parts_of(9, cuts, seed)
    order.shuffle(parts)
    same(regard.merge(parts), whole)


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 9), min_size=2, max_size=2), seed=st.integers(0, 1000))
def test_merging_is_associative(cuts, seed):
    _, (a, b, c) = parts_of(9, cuts, seed)
    same(regard.merge([regard.merge([a, b]), c]), regard.merge([a, regard.merge([b, c])]))
    same(regard.merge([a, b]), regard.merge([b, a]))


def test_one_part_is_itself():
    whole, _ = parts_of(9, [], 1)
    same(regard.merge([whole]), whole)


def test_empty_rows_stay_empty():
    zero = torch.zeros(2, 3), torch.full((2,), -math.inf)
    output, lse = regard.merge([zero, zero])
    assert output.equal(torch.zeros(2, 3))
    assert lse.eq(-math.inf).all()
    same(regard.merge([zero, (torch.ones(2, 3), torch.ones(2))]), (torch.ones(2, 3), torch.ones(2)))


def test_gradients_are_those_of_the_whole():
    generator = torch.Generator().manual_seed(3)
    query, key, value = (torch.randn(m, 5, generator=generator).double().requires_grad_() for m in (4, 7, 7))
    mask = torch.rand(4, 7, generator=generator) < 0.4

    def gradients(output, lse):
        loss = (output * torch.arange(5)).sum() + (lse[lse.isfinite()] ** 2).sum()
        return torch.autograd.grad(loss, (query, key, value))

    pieces = [
        regard.attention_with_lse(query, key[s], value[s], mask=masks.where(keep=mask[:, s]))
        for s in (slice(0, 3), slice(3, 3), slice(3, 7))
    ]
    whole = regard.attention_with_lse(query, key, value, mask=mask)
    for one, other in zip(gradients(*regard.merge(pieces)), gradients(*whole), strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)


def test_large_scores_do_not_overflow():
    one = torch.ones(1, 1), torch.tensor([1000.0])
    other = torch.zeros(1, 1), torch.tensor([1000.0])
    same(regard.merge([one, other]), (torch.full((1, 1), 0.5), torch.tensor([1000.0 + math.log(2)])))


def test_dtype_of_the_first_output():
    part = torch.ones(2, 3, dtype=torch.bfloat16), torch.zeros(2)
    output, lse = regard.merge([part, part])
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)


def test_no_parts():
    with pytest.raises(ShapeError, match=r"merge needs at least one \(output, lse\) pair"):
        regard.merge([])


def test_parts_of_different_shapes():
    first = torch.zeros(2, 3), torch.zeros(2)
    with pytest.raises(
        ShapeError, match=r"part 1 has the output \(2, 4\) and the lse \(2,\); the first output is \(2, 3\)"
    ):
        regard.merge([first, (torch.zeros(2, 4), torch.zeros(2))])
    with pytest.raises(ShapeError, match=r"part 0 has the output \(2, 3\) and the lse \(3,\).*each lse \(2,\)"):
        regard.merge([(torch.zeros(2, 3), torch.zeros(3))])
