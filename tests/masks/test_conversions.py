"""Conversion of other libraries' masks in both directions, against torch's functions and explicit definitions."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from regard import masks
from regard.errors import MaskError
from regard.masks import Mask

BATCH, HEADS, TOKENS = 2, 3, 24
INFINITY = torch.inf
anything: Any = masks  # whose functions take whatever a user may give them

IDS = torch.randint(3, (BATCH, TOKENS), generator=torch.Generator().manual_seed(0)).cumsum(-1) // 3
PER_HEAD = masks.random_blocks(TOKENS, 4, 2, heads=HEADS)
PER_BATCH = masks.documents(IDS)
CLUSTERS = masks.documents(torch.stack([IDS, IDS % 2, IDS // 3], 1))

few = st.integers(0, 9)
ends = st.lists(st.integers(0, TOKENS), min_size=BATCH, max_size=BATCH)
leaves: st.SearchStrategy[Mask] = st.one_of(
    st.builds(masks.window, few | st.none(), few | st.none()),
    ends.map(lambda lengths: masks.padding(lengths=lengths)),
    few.map(masks.prefix),
    st.integers(1, 9).map(masks.strided),
    st.lists(few, max_size=3).map(masks.global_tokens),
    st.sampled_from([masks.causal(), PER_BATCH, masks.documents(IDS[0]), PER_HEAD, CLUSTERS]),
)


def joined(inner: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    pair = st.tuples(inner, inner)
    return pair.map(lambda two: two[0] & two[1]) | pair.map(lambda two: two[0] | two[1]) | inner.map(lambda one: ~one)


expressions = st.recursive(leaves, joined, max_leaves=3)
sizes = st.tuples(st.integers(1, TOKENS), st.integers(1, TOKENS)).map(sorted)  # no more queries than keys
booleans = st.integers(0, 99).map(lambda seed: torch.Generator().manual_seed(seed))
many = settings(max_examples=100, deadline=None, derandomize=True)


def whole(mask: Mask, queries: int, keys: int) -> torch.Tensor:
    """Over every batch and head."""
    return mask.dense(queries, keys).expand(BATCH, HEADS, queries, keys)


class TestSdpa:
    @many
    @given(mask=expressions, size=sizes)
    def test_there_and_back(self, mask, size):
        pairs = masks.to_sdpa(mask, *size)
        assert pairs.dtype == torch.bool
        added = torch.zeros(pairs.shape, dtype=torch.bfloat16).masked_fill(~pairs, -INFINITY)
        for said in (pairs, added):
            assert masks.from_sdpa(said).dense(*size).equal(mask.dense(*size))

    def test_torch_keeps_what_the_mask_keeps(self):
        mask = masks.causal() & PER_BATCH & PER_HEAD
        query, key = torch.rand(BATCH, HEADS, 5, 7), torch.rand(BATCH, HEADS, TOKENS, 7)
        weights = torch.nn.functional.scaled_dot_product_attention(
            query, key, torch.eye(TOKENS).expand(BATCH, HEADS, -1, -1), attn_mask=masks.to_sdpa(mask, 5, TOKENS)
        )
        assert (weights > 0).equal(whole(mask, 5, TOKENS))

    @pytest.mark.parametrize(
        ("attn_mask", "match"),
        [
            (torch.tensor([[0.0, 0.5]]), r"adds 0.5 to a score, which is neither 0 \(attend\) nor -inf .*it is a bias"),
            (torch.tensor([[0.0, 1.0]]), r"from_sdpa's attn_mask is torch.float32 and adds 1 to a score"),
            (torch.tensor([[-1e9, 0.0]]), "adds -1e.09 to a score.*biases.tensor"),
            (torch.tensor([[torch.finfo(torch.float32).min, 0.0]]), "adds -3.40282e.38 to a score"),
            (torch.tensor([[torch.nan, 0.0]]), "adds nan to a score"),
            (torch.tensor([[0, 1]]), "torch.int64, whose polarity is not clear; it needs bool, where True = attend"),
            (torch.tensor([True]), r"has the shape \(1,\); it needs \(..., M, N\)"),
            ([[True]], r"needs a tensor of the shape \(..., M, N\); it is \[\[True\]\]"),
            (None, "needs a tensor of the shape .*; it is None"),
        ],
    )
    def test_refused(self, attn_mask, match):
        with pytest.raises(MaskError, match=match):
            anything.from_sdpa(attn_mask)

    def test_only_masks_are_written(self):
        for write in (anything.to_sdpa, anything.to_multihead, anything.to_huggingface, anything.to_mask_mod):
            with pytest.raises(MaskError, match="a bool tensor joins a mask through masks.where"):
                write(torch.ones(2, 2, dtype=torch.bool), 2, 2)


class TestMultihead:
    @many
    @given(mask=expressions, size=sizes)
    def test_there_and_back(self, mask, size):
        tensors = masks.to_multihead(mask, *size, batch=BATCH, heads=HEADS)
        assert whole(masks.from_multihead(**tensors, heads=HEADS), *size).equal(whole(mask, *size))
        added = {name: None if tensor is None else negative(tensor) for name, tensor in tensors.items()}
        assert whole(masks.from_multihead(**added, heads=HEADS), *size).equal(whole(mask, *size))

    @pytest.mark.parametrize(
        ("mask", "shapes"),
        [
            (masks.causal(), ((5, 7), None)),
            (masks.padding(lengths=[3, 7]), (None, (2, 7))),
            (masks.causal() & masks.padding(lengths=[3, 7]) & masks.prefix(4), ((5, 7), (2, 7))),
            (masks.causal() | masks.padding(lengths=[3, 7]), ((6, 5, 7), None)),
            (masks.padding(lengths=[3]), ((5, 7), None)),
            (PER_HEAD & masks.padding(lengths=[3, 7]), ((6, 5, 7), (2, 7))),
        ],
        ids=repr,
    )
    def test_keys_that_are_left_out_for_all_are_the_key_padding_mask(self, mask, shapes):
        tensors = masks.to_multihead(mask, 5, 7, batch=BATCH, heads=HEADS)
        assert tuple(tensor if tensor is None else tuple(tensor.shape) for tensor in tensors.values()) == shapes

    @pytest.mark.parametrize(
        "mask", [masks.causal(), masks.causal() & masks.padding(lengths=[4, 9]), PER_BATCH | PER_HEAD], ids=repr
    )
    def test_the_layer_keeps_what_the_mask_keeps(self, mask):
        layer = torch.nn.MultiheadAttention(6, HEADS, batch_first=True)
        x = torch.rand(BATCH, 9, 6)
        tensors = masks.to_multihead(mask, 9, 9, batch=BATCH, heads=HEADS)
        _, weights = layer(x, x, x, average_attn_weights=False, **tensors)
        assert (weights > 0).equal(whole(mask, 9, 9))

    def test_reading(self):
        triangle = torch.nn.Transformer.generate_square_subsequent_mask(4)
        assert masks.from_multihead(triangle).dense(4, 4).equal(masks.causal().dense(4, 4))
        left = torch.tensor([[True, False, False], [False, False, False]])
        assert masks.from_multihead(key_padding_mask=left).dense(2, 3).equal(~left[:, None, None].expand(2, 1, 2, 3))
        assert repr(masks.from_multihead(key_padding_mask=left.flip(-1))) == "padding(lengths=[2, 3])"
        assert masks.from_multihead(key_padding_mask=left[0]).dense(2, 3).equal(~left[:1].expand(2, 3))
        assert masks.from_multihead(torch.zeros(6, 2, 2).bool(), heads=6).dense(2, 2).shape == (6, 2, 2)

    @pytest.mark.parametrize(
        ("tensors", "match"),
        [
            ({}, "needs attn_mask or key_padding_mask, or both; it was given neither"),
            ({"attn_mask": torch.zeros(6, 2, 2).bool()}, r"\(6, 2, 2\), \(batch · heads, M, N\): say how many heads"),
            (
                {"attn_mask": torch.zeros(6, 2, 2).bool(), "heads": 4},
                r"first axis needs to be batch · heads, and is no multiple of 4 heads",
            ),
            (
                {"attn_mask": torch.zeros(6, 2, 2).bool(), "heads": 0},
                "from_multihead's heads is 0; it needs at least 1",
            ),
            (
                {"attn_mask": torch.zeros(2).bool()},
                r"attn_mask has the shape \(2,\); it needs \(M, N\) or \(batch · heads, M, N\)",
            ),
            (
                {"key_padding_mask": torch.zeros(2, 1, 1, 3).bool()},
                r"key_padding_mask has the shape \(2, 1, 1, 3\); it needs \(N,\) or \(batch, N\)",
            ),
            ({"key_padding_mask": torch.ones(2, 3)}, "key_padding_mask is torch.float32 and adds 1 to a score"),
            ({"key_padding_mask": torch.ones(2, 3).int()}, "polarity is not clear; .* True = leave out"),
            ({"attn_mask": torch.full((2, 2), 0.1)}, "it is a bias, not a mask"),
        ],
    )
    def test_refused(self, tensors, match):
        with pytest.raises(MaskError, match=match):
            anything.from_multihead(**tensors)

    @pytest.mark.parametrize(
        ("sizes", "match"),
        [
            ({}, r"\(3, 5, 7\), and the layer needs \(batch · heads, M, N\): say both, .*; batch is missing"),
            ({"batch": 2}, "heads is missing"),
            ({"batch": 2, "heads": 4}, r"heads is 4, but this mask has the shape \(3, 5, 7\)"),
        ],
    )
    def test_writing_needs_the_sizes(self, sizes, match):
        with pytest.raises(MaskError, match=match):
            masks.to_multihead(PER_HEAD, 5, 7, **sizes)


def negative(left_out: torch.Tensor) -> torch.Tensor:
    """What nn.MultiheadAttention adds to the scores for a mask in which True = leave out."""
    return torch.zeros(left_out.shape).masked_fill(left_out, -INFINITY)


class TestHuggingFace:
    @many
    @given(mask=expressions, size=sizes, dtype=st.sampled_from([torch.bool, torch.float32, torch.bfloat16, torch.half]))
    def test_pairs_there_and_back(self, mask, size, dtype):
        pairs = masks.to_huggingface(mask, *size, dtype=dtype)
        assert pairs.dtype == dtype
        assert pairs.ndim == 4
        read = masks.from_huggingface(pairs)
        assert whole(read, *size).equal(whole(mask, *size))
        if dtype != torch.bool:
            assert set(pairs.unique().tolist()) <= {0.0, torch.finfo(dtype).min}
            for same in (pairs.double(), pairs.masked_fill(pairs < 0, -INFINITY), pairs + pairs):
                assert whole(masks.from_huggingface(same), *size).equal(whole(mask, *size))

    @many
    @given(seed=st.integers(0, 99), kind=st.sampled_from(["right", "left", "holes"]), dtype=st.sampled_from("?bil"))
    def test_tokens_there_and_back(self, seed, kind, dtype):
        drawing = torch.Generator().manual_seed(seed)
        exist = torch.rand(BATCH, 7, generator=drawing) < 0.6
        if kind != "holes":
            exist = exist.sort(descending=kind == "right", dim=-1).values
        said = exist.to({"?": torch.bool, "b": torch.int8, "i": torch.int32, "l": torch.int64}[dtype])
        mask = masks.from_huggingface(said)
        assert mask.dense(3, 7).equal(exist[:, None, None].expand(BATCH, 1, 3, 7))
        assert masks.to_padding_mask(mask, 3, 7).equal(exist.long())
        if kind == "right":
            assert repr(mask) == f"padding(lengths={exist.sum(-1).tolist()})"

    def test_tokens_of_any_mask_that_keeps_the_same_keys_for_all(self):
        mask = masks.prefix([2, 5]) & ~masks.where(keep=torch.tensor([True, False, False, False, False, False]))
        assert masks.to_padding_mask(mask, 3, 6).tolist() == [[0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 0]]
        assert masks.to_padding_mask(masks.prefix(1), 3, 3).tolist() == [[1, 0, 0]]
        assert masks.to_padding_mask(masks.window(), 0, 2).tolist() == [[1, 1]]

    @pytest.mark.parametrize(
        ("attention_mask", "match"),
        [
            (torch.ones(2, 3), "of tokens is torch.float32, whose polarity is not clear"),
            (torch.tensor([[1, 2]]), "of tokens has values from 1 to 2; it needs 1 = token, 0 = padding.*documents"),
            (torch.ones(2, 3, 3), r"has the shape \(2, 3, 3\); it needs \(batch, N\) or \(batch, heads or 1, M, N\)"),
            (torch.ones(1, 1, 2, 2), "adds 1 to a score, which is neither 0 .* nor the least number of its type"),
            (torch.full((1, 1, 2, 2), -1e4), "adds -10000 to a score"),
            (torch.ones(1, 1, 2, 2).int(), "is torch.int32, whose polarity is not clear; .* where True = attend"),
            (None, "needs a tensor of the shape .* it is None"),
        ],
    )
    def test_refused(self, attention_mask, match):
        with pytest.raises(MaskError, match=match):
            anything.from_huggingface(attention_mask)

    @pytest.mark.parametrize(
        "mask", [masks.causal(), PER_HEAD, masks.causal() & masks.padding(lengths=[1, 7])], ids=repr
    )
    def test_pairs_are_no_tokens(self, mask):
        with pytest.raises(MaskError, match="does not keep the same keys for every query and head.*to_huggingface"):
            masks.to_padding_mask(mask, 8, 8)

    def test_refused_dtype(self):
        with pytest.raises(MaskError, match="to_huggingface's dtype is torch.int64; it needs bool"):
            masks.to_huggingface(masks.causal(), 2, 2, dtype=torch.int64)

    def test_two_axes_of_batches(self):
        mask = masks.padding(lengths=torch.ones(2, 2).int())
        with pytest.raises(MaskError, match=r"to_huggingface makes tensors with one axis for the batch.*\(2, 2, 1\)"):
            masks.to_huggingface(mask, 2, 2)


class TestPacked:
    @many
    @given(lengths=st.lists(st.integers(0, 6), max_size=6))
    def test_cu_seqlens_there_and_back(self, lengths):
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
        mask = masks.from_cu_seqlens(cu_seqlens)
        total = sum(lengths)
        expected = torch.block_diag(*(torch.ones(length, length) for length in lengths)).bool()
        assert mask.dense(total, total).equal(expected if total else torch.zeros(0, 0, dtype=torch.bool))
        back = masks.to_cu_seqlens(mask)
        assert back.dtype == torch.int32
        assert back.equal(cu_seqlens.unique())  # documents that are empty leave no trace

    @many
    @given(pairs=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6))
    def test_cu_seqlens_of_queries_and_of_keys(self, pairs):
        blocks = [torch.ones(size, dtype=torch.bool) for size in pairs]
        ends = [[0, *accumulate(lengths)] for lengths in zip(*pairs, strict=True)] or [[0], [0]]
        mask = masks.from_cu_seqlens(torch.tensor(ends[0]).int(), torch.tensor(ends[1]).int())
        queries, keys = ends[0][-1], ends[1][-1]
        dense = mask.dense(queries, keys, query_positions=range(queries))
        assert dense.equal(torch.block_diag(*blocks).bool() if pairs else torch.zeros(0, 0, dtype=torch.bool))

    @pytest.mark.parametrize(
        ("cu_seqlens", "match"),
        [
            ([1, 3], "cu_seqlens starts at 1; it needs to start at 0"),
            ([0, 3, 2], r"cu_seqlens decreases from 3 to 2; .* Lengths become ends by \[0\] and their cumsum"),
            ([], r"cu_seqlens of shape \(sequences \+ 1,\).* the shape \(0,\)"),
            ([[0, 1]], r"the shape \(1, 2\)"),
            (torch.tensor([0.0, 1.0]), "whole numbers as cu_seqlens; these are torch.float32"),
        ],
    )
    def test_refused_cu_seqlens(self, cu_seqlens, match):
        with pytest.raises(MaskError, match=match):
            masks.from_cu_seqlens(cu_seqlens)
        with pytest.raises(MaskError, match=match.replace("cu_seqlens", "key_cu_seqlens", 1)):
            masks.from_cu_seqlens([0, 1], cu_seqlens)

    def test_other_numbers_of_sequences(self):
        with pytest.raises(MaskError, match="cu_seqlens has 2 sequences and key_cu_seqlens 1; both need the same numb"):
            masks.from_cu_seqlens([0, 1, 2], [0, 4])

    @pytest.mark.parametrize(
        ("mask", "match"),
        [
            (masks.documents([0, 1, 0]), "document 0 goes on after another began; each has to be one run"),
            (masks.documents(IDS), r"ids of one packed sequence, \(L,\); these have the shape \(2, 24\)"),
            (
                masks.documents([0], [0]),
                r"ids of keys, and to_cu_seqlens returns .* documents\(key_ids\) for cu_seqlens_k",
            ),
            (masks.causal() & masks.documents([0]), r"needs documents\(ids\); this is causal\(\) & documents"),
        ],
    )
    def test_masks_without_cu_seqlens(self, mask, match):
        with pytest.raises(MaskError, match=match):
            masks.to_cu_seqlens(mask)

    @many
    @given(left=st.integers(-1, 9), right=st.integers(-1, 9), size=sizes)
    def test_window_size(self, left, right, size):
        queries, keys = size
        mask = masks.from_window_size((left, right))
        for row, kept in enumerate(mask.dense(queries, keys).tolist()):
            diagonal = row + keys - queries
            first = 0 if left == -1 else diagonal - left
            last = keys if right == -1 else diagonal + right
            assert kept == [first <= key <= last for key in range(keys)]
        assert masks.to_window_size(mask) == (left, right)
        causal = masks.to_window_size(mask & masks.causal() & masks.window(before=4))
        assert causal == (4 if left == -1 else min(left, 4), 0)

    @pytest.mark.parametrize("window_size", [(1,), (1, 2, 3), (-2, 0), 4])
    def test_refused_window_size(self, window_size):
        with pytest.raises(MaskError, match=r"it needs \(left, right\), whole numbers of at least -1"):
            anything.from_window_size(window_size)

    def test_no_window(self):
        with pytest.raises(MaskError, match=r"prefix\(2\) is no window; it needs window\(...\), causal\(\) or both"):
            masks.to_window_size(masks.causal() & masks.prefix(2))
