"""Conversion between masks and FlexAttention, against torch's own functions."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, create_mask, flex_attention

import regard
from regard import masks
from regard.errors import MaskError, ShapeError
from regard.masks import Mask

BATCH, HEADS, N = 2, 3, 40
anything: Any = masks

drawing = torch.Generator().manual_seed(0)
IDS = torch.randint(3, (BATCH, N), generator=drawing).cumsum(-1) // 3
LAYOUT = torch.rand(HEADS, N // 8, N // 8, generator=drawing) < 0.5
ANCHORS = torch.tensor([3, 17])
CHOSEN = torch.rand(BATCH, 1, 1, N, generator=drawing) < 0.7

# Of these, interval arithmetic tells all that there is to know.
SHARP: list[Mask] = [
    masks.causal(),
    masks.causal() & masks.window(before=7),
    masks.window(before=9, after=2),
    masks.window(),
    masks.padding(lengths=[11, 40]),
    masks.prefix([3, 9]) | masks.causal(),
    masks.causal() & masks.documents(IDS),
    masks.documents(IDS[0]),
    masks.documents(IDS, IDS // 2),
    masks.documents(torch.stack([IDS, IDS // 2, IDS[:1].expand(BATCH, N)], 1)),
    masks.global_tokens([0, 21]),
    masks.random_blocks(N, 8, 2, heads=HEADS),
    masks.where(keep=CHOSEN),
    ~masks.causal(),
    masks.from_mod(lambda b, h, q, k: q >= k),
    masks.from_mod(lambda b, h, q, k: LAYOUT[h, q // 8, k // 8], heads=HEADS),
    masks.from_mod(lambda b, h, q, k: (q >= k) & (IDS[b, q] == IDS[b, k]), batch=BATCH),
]
OTHERS: list[Mask] = [
    masks.strided(5),
    masks.fixed(8, 2) & masks.causal(),
    masks.dilated(3, 2),
    masks.from_mod(lambda b, h, q, k: (q == ANCHORS).any() | (k <= q)),
    masks.from_mod(lambda b, h, q, k: torch.stack([q > 3 * b, k < 9 + h]).all(), batch=BATCH, heads=HEADS),
    masks.where(keep=torch.rand(HEADS, N, N, generator=drawing) < 0.2) & masks.padding(lengths=[7, 40]),
    masks.documents(IDS[0]) & masks.padding(lengths=[30, 38]),
]
every = pytest.mark.parametrize("mask", [*SHARP, *OTHERS], ids=repr)
sharp = pytest.mark.parametrize("mask", SHARP, ids=repr)


def whole(mask: Mask, queries: int, keys: int, **at: Any) -> torch.Tensor:
    return mask.dense(queries, keys, **at).expand(BATCH, HEADS, queries, keys)


def pairs_of(block_mask: Any, shape: tuple[int, ...]) -> torch.Tensor:
    """What a kernel computes: all of the full blocks, of the others what mask_mod keeps; block by block."""
    kept = torch.zeros(shape, dtype=torch.bool)
    inside = create_mask(block_mask.mask_mod, shape[0], shape[1], shape[2], shape[3], "cpu")
    rows, columns = block_mask.BLOCK_SIZE
    for counts, indices, source in (
        (block_mask.full_kv_num_blocks, block_mask.full_kv_indices, torch.ones_like(inside)),
        (block_mask.kv_num_blocks, block_mask.kv_indices, inside),
    ):
        counts, indices = counts.expand(*shape[:2], -1), indices.expand(*shape[:2], -1, -1)
        for batch, head, row in torch.cartesian_prod(*map(torch.arange, counts.shape)).tolist():
            for column in indices[batch, head, row, : counts[batch, head, row]].tolist():
                part = (
                    batch,
                    head,
                    slice(row * rows, (row + 1) * rows),
                    slice(column * columns, (column + 1) * columns),
                )
                kept[part] |= source[part]
    return kept


class TestMaskMod:
    @pytest.mark.parametrize(
        ("mask", "queries"),
        [(mask, N) for mask in [*SHARP, *OTHERS]] + [(mask, queries) for mask in SHARP for queries in (13, 1)],
    )
    def test_torch_maps_it(self, mask, queries):
        mask_mod = masks.to_mask_mod(mask, queries, N)
        assert create_mask(mask_mod, BATCH, HEADS, queries, N, "cpu").equal(whole(mask, queries, N))

    @pytest.mark.parametrize("mask", SHARP, ids=repr)
    def test_indices_that_broadcast(self, mask):
        b, h, q, k = torch.meshgrid(*map(torch.arange, (BATCH, HEADS, N, N)), indexing="ij")
        assert masks.to_mask_mod(mask, N, N)(b, h, q, k).expand(b.shape).equal(whole(mask, N, N))

    def test_positions(self):
        mask = masks.causal() & masks.documents(IDS)
        at: Any = {"query_positions": torch.tensor([[7, 2], [0, 23]]), "key_positions": torch.arange(N).flip(0)}
        mask_mod = masks.to_mask_mod(mask, 2, N, **at)
        assert create_mask(mask_mod, BATCH, HEADS, 2, N, "cpu").equal(whole(mask, 2, N, **at))

    def test_there_and_back(self):
        mask_mod = masks.to_mask_mod(masks.causal() & masks.window(before=3), N, N)
        assert masks.from_mod(mask_mod).dense(N, N).equal((masks.causal() & masks.window(before=3)).dense(N, N))

    def test_two_axes_of_batches(self):
        mask = masks.padding(lengths=torch.ones(2, 2).int())
        with pytest.raises(MaskError, match="FlexAttention makes tensors with one axis for the batch"):
            masks.to_mask_mod(mask, 2, 2)
        with pytest.raises(MaskError, match="FlexAttention makes tensors with one axis for the batch"):
            masks.to_block_mask(mask, 2, 2)


class TestBlockMask:
    @sharp
    @pytest.mark.parametrize("size", [8, 16, (8, 4), 64])
    def test_it_has_the_blocks_that_torch_finds(self, mask, size):
        ours = masks.to_block_mask(mask, N, N, size)
        theirs = create_block_mask(masks.to_mask_mod(mask, N, N), BATCH, HEADS, N, N, "cpu", BLOCK_SIZE=size)
        assert ours.BLOCK_SIZE == theirs.BLOCK_SIZE
        assert ours.seq_lengths == theirs.seq_lengths
        for name in ("kv", "full_kv", "q", "full_q"):
            mine, torchs = (
                dense(getattr(blocks, f"{name}_num_blocks"), getattr(blocks, f"{name}_indices"))
                for blocks in (ours, theirs)
            )
            assert mine.expand_as(torchs).equal(torchs), name
        assert ours.to_dense().expand_as(theirs.to_dense()).equal(theirs.to_dense())

    @every
    def test_its_blocks_hold_every_pair_and_no_other(self, mask):
        block_mask = masks.to_block_mask(mask, N, N, 8)
        assert pairs_of(block_mask, (BATCH, HEADS, N, N)).equal(whole(mask, N, N))

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        masks_=st.lists(st.sampled_from([*SHARP, *OTHERS[:5]]), min_size=1, max_size=3),
        queries=st.integers(1, N),
        size=st.integers(4, 50),
    )
    def test_random_masks(self, masks_, queries, size):
        mask = masks_[0]
        for number, other in enumerate(masks_[1:]):
            mask = mask & ~other if number % 2 else mask | other
        block_mask = masks.to_block_mask(mask, queries, N, size)
        shape = (BATCH, HEADS, queries, N)
        assert pairs_of(block_mask, shape).equal(whole(mask, queries, N))
        assert whole(masks.from_block_mask(block_mask), queries, N).equal(whole(mask, queries, N))

    @pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
    @pytest.mark.parametrize(
        "mask", [SHARP[1], SHARP[6], SHARP[9], OTHERS[3], SHARP[10] & OTHERS[0], SHARP[13]], ids=repr
    )
    def test_flex_attention_takes_it(self, mask):
        query, key, value = (torch.rand(BATCH, HEADS, length, 16) for length in (13, N, N))
        output = flex_attention(query, key, value, block_mask=masks.to_block_mask(mask, 13, N, 8))
        torch.testing.assert_close(output, regard.attention(query, key, value, mask=mask))

    def test_a_long_one_looks_at_no_pair(self):
        length = 131_072
        began = time.perf_counter()
        block_mask: Any = masks.to_block_mask(masks.causal() & masks.window(before=511), length, length)
        assert time.perf_counter() - began < 20  # all pairs would be 17 GB
        assert block_mask.kv_num_blocks.tolist() == [[[1] * 4 + [2] * 1020]]
        assert block_mask.full_kv_num_blocks.tolist() == [[[0, 1, 2] + [3] * 1021]]

    def test_refused_size(self):
        with pytest.raises(ShapeError, match="size is 0; tiles need a whole number"):
            masks.to_block_mask(masks.causal(), 4, 4, 0)


def dense(counts: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    return BlockMask.from_kv_blocks(counts, indices, compute_q_blocks=False).to_dense()


class TestFromBlockMask:
    @every
    def test_there_and_back(self, mask):
        mask_mod = masks.to_mask_mod(mask, N, N)
        block_mask = create_block_mask(mask_mod, BATCH, HEADS, N, N, "cpu", BLOCK_SIZE=8)
        read = masks.from_block_mask(block_mask)
        assert whole(read, N, N).equal(whole(mask, N, N))
        again = masks.to_block_mask(read, N, N, 8)
        assert pairs_of(again, (BATCH, HEADS, N, N)).equal(whole(mask, N, N))

    def test_rows_are_positions_of_the_last_queries(self):
        block_mask = create_block_mask(lambda b, h, q, k: q + 27 >= k, None, None, 13, N, "cpu", BLOCK_SIZE=8)
        assert masks.from_block_mask(block_mask).dense(13, N).equal(masks.causal().dense(13, N))

    def test_blocks_alone(self):
        counts, indices = torch.tensor([[[1, 2]]]), torch.tensor([[[[1, 7, 7], [2, 0, 7]]]])
        block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=2, compute_q_blocks=False)
        read = masks.from_block_mask(block_mask)
        assert read.tiles(4, 6, 2).tolist() == [[0, 2, 0], [2, 0, 2]]
        assert repr(read) == "block_layout(<3 of (1, 1, 2, 3)>) & from_mod(noop_mask)"

    def test_a_mask_mod_that_reads_the_batch_of_one(self):
        block_mask = create_block_mask(lambda b, h, q, k: k <= b + h, None, None, 3, 3, "cpu")
        assert masks.from_block_mask(block_mask).dense(3, 3).expand(1, 1, 3, 3).sum() == 3

    def test_positions_outside(self):
        read = masks.from_block_mask(create_block_mask(lambda b, h, q, k: q >= k, None, None, 4, 4, "cpu"))
        match = "a BlockMask of 4 queries and 4 keys, whose queries have the positions 0 to 3, but one is at 4"
        with pytest.raises(MaskError, match=match):
            read.dense(5, 5)
        with pytest.raises(MaskError, match="whose keys have the positions 0 to 3, but one is at 4"):
            read.dense(4, 5, query_positions=torch.arange(4))

    def test_rows_given_as_positions(self):
        read = masks.from_block_mask(create_block_mask(lambda b, h, q, k: q >= k, None, None, 9, 21, "cpu"))
        query, key = torch.rand(9, 4), torch.rand(21, 4)
        match = "9 queries and 21 keys, whose queries have the positions 12 to 20, but one is at 0: .* leave query"
        with pytest.raises(MaskError, match=match):
            regard.attention(query, key, key, mask=read, query_positions=torch.arange(9))
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, torch.ones(9, 21).bool().tril())
        torch.testing.assert_close(regard.attention(query, key, key, mask=read), expected)

    def test_without_a_head_axis(self):
        block_mask = masks.to_block_mask(SHARP[9], N, N, 8)
        with pytest.raises(MaskError, match="differs between heads, but query, key and value have no head axis"):
            regard.attention(*torch.rand(3, N, 4), mask=masks.from_block_mask(block_mask))

    @pytest.mark.parametrize("other", [lambda b, h, q, k: q >= k, torch.ones(2, 2), None])
    def test_refused(self, other):
        with pytest.raises(MaskError, match="needs a BlockMask of FlexAttention; this is a .*masks.from_mod"):
            anything.from_block_mask(other)


def sliced(*index, mask_mod=None):
    whole = create_block_mask(lambda b, h, q, k: q >= k + b + h, 2, 3, 7, 7, device="cpu", BLOCK_SIZE=2)
    part = whole[index]
    if mask_mod is not None:
        part.mask_mod = mask_mod
    return part


@pytest.mark.parametrize("index", [(0,), (slice(0, 1),), (slice(None), 1), (slice(None), slice(1, 3))], ids=str)
def test_a_slice_has_no_mask_mod(index):
    with pytest.raises(MaskError, match=r"is a slice, which torch leaves without a mask_mod: convert the whole"):
        masks.from_block_mask(sliced(*index))


@pytest.mark.parametrize("mask_mod", [None, lambda b, h, q, k: q + 2 >= k + b + h])
def test_a_slice_of_rows(mask_mod):
    """Refused where torch keeps the lengths of the whole; from 2.14 on it has those of its rows, 4 of the 7 queries."""
    part = sliced(slice(None), slice(None), slice(1, 3), mask_mod=mask_mod)
    if part.seq_lengths[0] == 7:
        with pytest.raises(
            MaskError, match=r"has 2 of the 4 rows of blocks of its 7 queries: it is a slice.*the whole"
        ):
            masks.from_block_mask(part)
    elif mask_mod is None:
        with pytest.raises(MaskError, match=r"is a slice, which torch leaves without a mask_mod: convert the whole"):
            masks.from_block_mask(part)
    else:
        shift = (torch.arange(2)[:, None] + torch.arange(3))[..., None, None]
        expected = torch.arange(4)[:, None] + 2 >= torch.arange(7) + shift
        assert torch.equal(masks.from_block_mask(part).dense(4, 7), expected)


def test_a_slice_of_batches_with_a_mask_mod():
    part = sliced(1, mask_mod=lambda b, h, q, k: q >= k + 1 + h)
    expected = torch.arange(7)[:, None] >= torch.arange(7) + 1 + torch.arange(3)[:, None, None]
    assert torch.equal(masks.from_block_mask(part).dense(7, 7).expand(1, 3, 7, 7), expected[None])
