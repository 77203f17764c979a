"""Small calls whose masks have other numbers each time: the pairs that are written for a call are those of the mask."""

import pytest
import torch

import regard
from regard import masks, native, normalizers, small_calls
from regard.errors import MaskError
from regard.kernels.hooks import attention_hook
from regard.tiles.memo import MOST_WRITTEN, memo_of
from regard.written_pairs import EqualIds, ListedPairs, PreparedWritingCall, written_pairs

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
    return lambda: [each for each in small_calls._calls.values() if type(each) is PreparedWritingCall]


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
        assert written_pairs(mask) is None
    found = written_pairs(lists & masks.causal())
    assert type(found) is ListedPairs
    assert found.causal


IDS = {
    "ids of each head": ((2, 4, 4, 17, 17), (2, 4, 17), None),
    "ids of each sequence": ((3, 2, 2, 13, 19), (3, 19), None),
    "heads of all sequences": ((2, 4, 4, 13, 19), (1, 4, 23), None),
    "ids of key heads": ((2, 4, 2, 11, 17), (2, 2, 17), None),
    "one row, of heads": ((2, 3, 3, 11, 11), (2, 1, 11), None),
    "clusters": ((2, 4, 4, 17, 17), (2, 4, 17), (2, 4, 17)),
    "fewer queries": ((2, 4, 4, 7, 19), (2, 4, 19), (1, 4, 29)),
    "heads against one row": ((2, 4, 4, 17, 17), (2, 4, 17), (17,)),
    "one query": ((2, 4, 4, 1, 19), (2, 19), None),
}
"""Batch, heads, key heads, queries and keys; the shape of the ids, and of those of keys where they are others."""


def with_ids(case, seed=0):
    """Query, key and value, and ids from -1 on: of so many that rows have few keys, or none."""
    (batch, heads, key_heads, queries, keys), *shapes = IDS[case]
    torch.manual_seed(seed)
    sizes = (heads, queries), (key_heads, keys), (key_heads, keys)
    ids = [torch.randint(-1, 6, shape) for shape in shapes if shape is not None]
    return [torch.randn(batch, count, length, 8) for count, length in sizes], ids


def masked_by(ids, causal):
    return masks.causal() & masks.documents(*ids) if causal else masks.documents(*ids)


@pytest.mark.parametrize("causal", [False, True], ids=["alone", "causal"])
@pytest.mark.parametrize("case", IDS)
def test_the_pairs_are_those_of_equal_ids(prepared, case, causal):
    """Of other ids in each call, also where a row has no key; of int32, and where rows are not contiguous."""
    for number in range(3):
        inputs, ids = with_ids(case, number)
        if number:
            ids = [each.int() if number == 1 else each.mT.contiguous().mT if each.ndim > 1 else each for each in ids]
        mask, leaves = masked_by(ids, causal), [each.clone().requires_grad_() for each in inputs]
        exact = [each.double().requires_grad_() for each in inputs]
        wanted = regard.attention(*exact, mask=mask, kernel="reference")
        output, seed = regard.attention(*leaves, mask=mask), torch.randn_like(inputs[0])
        for found in (output, regard.attention(*inputs, mask=mask)):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        found, expected = torch.autograd.grad(output, leaves, seed), torch.autograd.grad(wanted, exact, seed.double())
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own.double(), other, rtol=1e-5, atol=1e-5)
    assert COMPARED or case == "one query" or len(prepared()) == 2  # with gradients and without


@pytest.mark.parametrize("case", ["ids of each head", "clusters"])
def test_a_hook_changes_no_bit_of_equal_ids(prepared, case):
    inputs, ids = with_ids(case)
    for positions in (None, range(17)):  # which says the same
        options = {"mask": masked_by(ids, True), "query_positions": positions}
        plain = [regard.attention(*inputs, **options) for _ in range(2)]
        with attention_hook(lambda problem, lse: None):
            assert all(torch.equal(regard.attention(*inputs, **options), each) for each in plain)
    assert COMPARED or len(prepared()) == 1


def test_queries_elsewhere_are_not_those_at_the_last_keys(prepared):
    (query, key, value), ids = with_ids("fewer queries")
    for positions in (range(12, 19), range(7), torch.arange(12, 19), range(3, 10)):
        options = {"mask": masked_by(ids, True), "query_positions": positions}
        found = [regard.attention(query, key, value, **options) for _ in range(2)]
        wanted = regard.attention(query, key, value, **options, kernel="reference")
        for each in found:
            torch.testing.assert_close(each, wanted)
    assert COMPARED or len(prepared()) == 1


def test_what_is_behind_other_ids_may_be_anything(prepared):
    (query, key, value), (ids,) = with_ids("ids of each head")
    ids[:, :, 3] = 9
    key[:, :, 3], value[:, :, 3] = torch.nan, torch.inf
    for _ in range(2):
        leaves = [each.clone().requires_grad_() for each in (query, key, value)]
        output = regard.attention(*leaves, mask=masks.documents(ids))
        others = [row for row in range(17) if row != 3]
        assert bool(output[:, :, others].isfinite().all())
        assert bool(output[:, :, 3].isnan().all())
        for gradient in torch.autograd.grad(output[:, :, others].sum(), leaves):
            assert bool(gradient.isfinite().all())
    assert COMPARED or prepared()


def test_writes_to_ids_are_seen_by_later_calls_alone(prepared):
    """Gradients, of second order as well, are of the pairs of the forward pass."""
    inputs, (ids,) = with_ids("ids of each head")
    mask, before = masked_by([ids], True), ids.clone()
    for _ in range(2):
        ids.copy_(before)
        found = []
        for each in (mask, masked_by([before], True)):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            output = regard.attention(*leaves, mask=each)
            if each is mask:
                ids.add_(torch.arange(17))  # no two are equal any more
                assert not torch.equal(regard.attention(*inputs, mask=mask), output)
            first = torch.autograd.grad(output.square().sum(), leaves, create_graph=True)
            second = torch.autograd.grad(torch.stack([each.square().sum() for each in first]).sum(), leaves)
            found.append([*first, *second])
        for own, other in zip(*found, strict=True):
            torch.testing.assert_close(own, other)
    assert COMPARED or prepared()


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(2, 4, 16).long(), r"is for 16 positions, from 0, but queries or keys sit at 0 to 16"),
        (torch.zeros(2, 3, 17).long(), r"does not broadcast to the weights' shape \(2, 4, 17, 17\)"),
        (torch.zeros(3, 4, 17).long(), r"does not broadcast to the weights' shape \(2, 4, 17, 17\)"),
    ],
    ids=["too few", "of other heads", "of other sequences"],
)
def test_ids_that_do_not_fit_are_refused_after_some_that_did(prepared, ids, message):
    inputs, right = with_ids("ids of each head")
    for _ in range(2):
        regard.attention(*inputs, mask=masked_by(right, False))
        with pytest.raises(MaskError, match=message):
            regard.attention(*inputs, mask=masked_by([ids], False))


def test_ids_of_one_row_are_spans_or_memoized():
    ids = torch.arange(17) // 5
    assert written_pairs(masks.documents(ids)) is None
    assert written_pairs(masks.documents(ids, ids)) is None
    assert type(written_pairs(masks.documents(ids, ids.expand(2, 17)) & masks.causal())) is EqualIds


@pytest.mark.parametrize("shared", [False, True], ids=["torch's memory", "NumPy's memory"])
def test_a_mask_that_comes_again_and_again_has_a_memo(prepared, shared):
    """For its first calls its pairs are written; later ones find what is memoized of them, until a write.

    Those of memory that NumPy may write to, which torch does not count, go on to be written.
    """
    inputs, (ids,) = with_ids("ids of each head")
    ids = torch.from_numpy(ids.numpy()) if shared else ids
    mask = masked_by([ids], True)
    for number in range(MOST_WRITTEN + 4):
        if number == MOST_WRITTEN + 2:
            ids.add_(torch.arange(17) % 2)
        found = regard.attention(*inputs, mask=mask)
        wanted = regard.attention(*inputs, mask=masked_by([ids.clone()], True), kernel="reference")
        torch.testing.assert_close(found, wanted)
        assert COMPARED or bool(memo_of(mask).calls) == (number >= MOST_WRITTEN and not shared)
    assert COMPARED or len(prepared()) == 1
