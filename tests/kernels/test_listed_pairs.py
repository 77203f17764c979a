"""Small calls whose masks list keys: the pairs that are written for a call are those of the mask."""

import pytest
import torch

import regard
from regard import masks, native, normalizers, small_calls
from regard.errors import MaskError
from regard.listed_calls import ListedPairs, PreparedListedCall

COMPARED = native.variant_in_use() in ("off", "plain")
"""Whether times are compared for small calls too, so that some of lists go to other kernels."""

CASES = {
    "a list for each query": ((2, 4, 17, 17), (2, 4, 17, 5), (1, 1)),
    "lists that heads share": ((2, 4, 17, 23), (2, 1, 17, 5), (1, 1)),
    "lists of heads for all batches": ((2, 4, 17, 23), (4, 17, 2), (1, 3)),
    "blocks of both": ((1, 2, 13, 19), (4, 3), (4, 4)),
    "one list": ((1, 3, 19, 19), (1, 3, 1, 4), (19, 2)),
    "lists of key heads": ((2, 4, 17, 17), (2, 2, 17, 3), (1, 1)),
    "no key": ((1, 2, 7, 11), (1, 2, 7, 0), (1, 1)),
}
"""Batch, heads, queries and keys; the shape of the lists; rows and columns of a block."""


def made(case, seed=0):
    (batch, heads, queries, keys), shape, size = CASES[case]
    torch.manual_seed(seed)
    key_heads = shape[1] if case == "lists of key heads" else heads
    query, key, value = (
        torch.randn(batch, h, n, 8) for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys))
    )
    return (query, key, value), torch.randint(-1, -(-keys // size[1]), shape), size


@pytest.fixture
def prepared():
    """The calls that are prepared in the test, which needs native code."""
    if native.why_not() is not None:
        pytest.skip("native code is off")
    small_calls._calls.clear()
    return lambda: [each for each in small_calls._calls.values() if type(each) is PreparedListedCall]


@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
@pytest.mark.parametrize("case", CASES)
def test_the_pairs_are_those_of_the_mask(prepared, case, causal):
    inputs, lists, size = made(case)
    for number in range(3):  # of other lists in each call, of one kind
        mask = masks.blocks(lists.roll(number, -1).clamp(max=number + 1), size)
        mask = masks.causal() & mask if causal else mask
        leaves = [each.clone().requires_grad_() for each in inputs]
        output = regard.attention(*leaves, mask=mask)
        wanted = regard.attention(*leaves, mask=mask, kernel="reference")
        seed = torch.randn_like(output)
        torch.testing.assert_close(regard.attention(*inputs, mask=mask), wanted.detach())
        for own, other in zip(
            torch.autograd.grad(output, leaves, seed), torch.autograd.grad(wanted, leaves, seed), strict=True
        ):
            torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-5)
    assert COMPARED or len(prepared()) == 2  # with gradients and without


def test_what_is_masked_may_be_anything(prepared):
    (query, key, value), _, _ = made("a list for each query")
    key[:, :, 3], value[:, :, 3] = torch.nan, torch.inf
    lists = torch.tensor([0, 1, 2, 4, -1]).expand(2, 4, 17, 5)
    found = [regard.attention(query, key, value, mask=masks.chosen(lists)) for _ in range(2)]
    assert COMPARED or prepared()
    assert all(bool(each.isfinite().all()) for each in found)
    seen = regard.attention(query, key, value, mask=masks.chosen(torch.full((2, 4, 17, 5), 3)))
    assert bool(seen.isnan().all())


def test_a_normalizer_of_other_kernels_reads_the_lists_of_its_call(prepared):
    inputs, lists, _ = made("a list for each query")
    talking = normalizers.TalkingHeads(torch.randn(4, 4), torch.randn(4, 4))
    for number in range(3):
        mask = masks.chosen(lists.roll(number, -2))
        wanted = regard.attention(*inputs, mask=mask, normalizer=talking, kernel="reference")
        torch.testing.assert_close(regard.attention(*inputs, mask=mask, normalizer=talking), wanted)


@pytest.mark.parametrize(
    ("lists", "error", "message"),
    [
        (torch.full((17, 2), 17), MaskError, r"names 17, but the last key is at position 16"),
        (torch.zeros(5, 2, dtype=torch.int64), MaskError, r"5 rows, but there are 17 queries"),
    ],
    ids=["beyond the keys", "of other queries"],
)
def test_lists_that_do_not_fit_are_refused_after_some_that_did(prepared, lists, error, message):
    inputs, right, _ = made("a list for each query")
    regard.attention(*inputs, mask=masks.chosen(right))
    with pytest.raises(error, match=message):
        regard.attention(*inputs, mask=masks.chosen(lists))


def test_other_masks_have_none():
    lists = masks.chosen(torch.zeros(3, 1, dtype=torch.int64))
    for mask in (masks.causal(), masks.window(before=2) & lists, lists | masks.causal(), ~lists):
        assert ListedPairs.from_mask(mask) is None
    found = ListedPairs.from_mask(lists & masks.causal())
    assert found is not None
    assert found.causal
