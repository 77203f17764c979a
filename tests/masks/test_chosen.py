"""Masks of chosen keys and blocks: their pairs and tiles against plain loops, and what is refused."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import MaskError
from regard.masks.chosen import without_duplicates

SIZES = [(1, 1), (3, 1), (1, 4), (4, 3), (64, 64)]
QUERIES, KEYS = 13, 17


def drawn(rows: int, columns: int, *leading: int, one: bool = False) -> Tensor:
    """Indices with duplicates and with some that are none; the first list is empty."""
    generator = torch.Generator().manual_seed(rows * 100 + columns)
    lists = 1 if one else -(-QUERIES // rows)
    indices = torch.randint(-1, -(-KEYS // columns), (*leading, lists, 5), generator=generator)
    indices[..., :1, :2] = -1
    return indices


def pairs(indices: Tensor, rows: int, columns: int) -> Tensor:
    """Which pairs exist, one after another."""
    lists = indices.expand(*indices.shape[:-2], -(-QUERIES // rows), -1)
    kept = torch.zeros(*indices.shape[:-2], QUERIES, KEYS, dtype=torch.bool)
    for query in range(QUERIES):
        for key in range(KEYS):
            kept[..., query, key] = (lists[..., query // rows, :] == key // columns).any(-1)
    return kept


def mask_of(indices: Tensor, rows: int, columns: int) -> masks.Mask:
    return masks.chosen(indices, block=rows) if columns == 1 else masks.blocks(indices, (rows, columns))


@pytest.mark.parametrize("one", [False, True])
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_pairs(size, one):
    indices = drawn(*size, 2, 3, one=one)
    mask, kept = mask_of(indices, *size), pairs(indices, *size)
    assert mask.dense(QUERIES, KEYS).equal(kept)
    assert (~mask).dense(QUERIES, KEYS).equal(~kept)
    assert (mask | masks.causal()).dense(QUERIES, KEYS).equal(kept | masks.causal().dense(QUERIES, KEYS))
    assert mask.density(QUERIES, KEYS) == pytest.approx(float(kept.double().mean()))


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_indices_are_positions_of_keys(size):
    indices = drawn(*size, 2, 3)
    order = torch.randperm(KEYS, generator=torch.Generator().manual_seed(0))
    kept = mask_of(indices, *size).dense(
        QUERIES, KEYS, query_positions=torch.arange(QUERIES) + 100, key_positions=order
    )
    assert kept.equal(pairs(indices, *size)[..., order])
    later = mask_of(indices, *size).dense(QUERIES, 6, query_positions=range(QUERIES), key_positions=range(11, 17))
    assert later.equal(pairs(indices, *size)[..., 11:])


@pytest.mark.parametrize("tile", [1, 4, (3, 5), (8, 2), (2, 8), 6, 128], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_tiles_are_counted_exactly(size, tile):
    indices = drawn(*size, 2, 3)
    kept, verdicts = pairs(indices, *size), mask_of(indices, *size).tiles(QUERIES, KEYS, tile)
    rows, columns = tile if isinstance(tile, tuple) else (tile, tile)
    for row in range(verdicts.shape[-2]):
        for column in range(verdicts.shape[-1]):
            here = kept[..., row * rows : (row + 1) * rows, column * columns : (column + 1) * columns].flatten(-2)
            assert verdicts[..., row, column].equal(here.any(-1).to(torch.int8) + here.all(-1).to(torch.int8))


def test_tiles_where_the_first_key_is_no_multiple_of_a_block():
    mask = masks.blocks(torch.tensor([[1]]), (1, 4))
    verdicts = mask.tiles(1, 8, (1, 3), query_positions=range(1), key_positions=range(2, 10))
    assert verdicts.tolist() == [[1, 2, 0]]  # the keys 4, 5, 6 and 7 are the third to the sixth


@pytest.mark.parametrize("length", [3, 2**20])
def test_duplicates(length):
    indices = torch.tensor([[1, 1, -1, 2], [0, 2, 0, 0], [-1, -1, -1, -1]], dtype=torch.int32)
    distinct = without_duplicates(indices, length - 1)
    assert distinct.sort(-1).values.tolist() == [[-1, -1, 1, 2], [-1, -1, 0, 2], [-1, -1, -1, -1]]


def test_a_copy_is_made():
    indices = torch.zeros(4, 1, dtype=torch.int32)
    mask = masks.chosen(indices)
    indices.fill_(3)
    assert mask.dense(4, 4)[:, 0].all()


def test_a_mask_mod_has_the_same_pairs():
    indices = drawn(1, 1, 2, 3)
    mod = masks.to_mask_mod(masks.causal() & masks.chosen(indices), QUERIES, KEYS)
    batch, head, row, column = (
        torch.arange(size).view([-1 if axis == own else 1 for axis in range(4)])
        for own, size in enumerate((2, 3, QUERIES, KEYS))
    )
    assert mod(batch, head, row, column).equal((masks.causal() & masks.chosen(indices)).dense(QUERIES, KEYS))


def test_key_heads_stand_for_the_heads_of_their_groups():
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    kept = torch.rand(2, 3, 5, 7) < 0.5
    wide = masks.where(keep=kept.repeat_interleave(2, 1))
    for kernel in ("reference", "tiled", None):
        expected = regard.attention(query, key, key, mask=wide, kernel=kernel)
        assert regard.attention(query, key, key, mask=masks.where(keep=kept), kernel=kernel).equal(expected)
    with pytest.raises(MaskError, match=r"has the shape \(2, 2, 5, 7\), which does not broadcast"):
        regard.attention(query, key, key, mask=masks.where(keep=kept[:, :2]))


def test_what_is_shown():
    indices = torch.zeros(4, 2, dtype=torch.int64)
    assert repr(masks.causal() & masks.chosen(indices)) == "causal() & chosen(<(4, 2)>)"
    assert repr(masks.chosen(indices, block=3)) == "chosen(<(4, 2)>, block=3)"
    assert repr(masks.blocks(indices, 64)) == "blocks(<(4, 2)>, 64)"
    assert repr(masks.blocks(indices, (1, 64))) == "blocks(<(4, 2)>, (1, 64))"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.chosen(torch.zeros(4, 2)), "chosen needs whole numbers as indices; these are torch.float32"),
        (lambda: masks.chosen(torch.zeros(4, 2, dtype=torch.bool)), "whole numbers as indices; these are torch.bool"),
        (lambda: masks.chosen(torch.tensor([0, 1])), r"needs indices of shape \(..., M, K\); it has the shape \(2,\)"),
        (lambda: masks.chosen(torch.tensor([[0, -2]])), "the last key's number, and -1 for none; the smallest is -2"),
        (lambda: masks.blocks(torch.tensor([[2**30]]), 64), "the largest is 1073741824, of blocks of 64"),
        (lambda: masks.chosen(torch.tensor([[0]]), block=0), "chosen's block is 0"),
        (lambda: masks.blocks(torch.tensor([[0]]), cast(Any, (1, 2, 3))), "rows and columns, or one number for both"),
        (lambda: masks.blocks(torch.tensor([[0]]), cast(Any, 1.5)), "blocks' size"),
    ],
)
def test_what_cannot_be_made(make, message):
    with pytest.raises(MaskError, match=message):
        make()


@pytest.mark.parametrize("kernel", [None, "gathered", "reference", "tiled"])
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (lambda: masks.chosen(torch.full((5, 2), 7)), r"names 7, but the last key is at position 6: indices needs num"),
        (
            lambda: masks.blocks(torch.full((5, 2), 2), (1, 4)),
            "names 2, but the last key is at position 6 in blocks of",
        ),
        (
            lambda: masks.chosen(torch.zeros(4, 2).long()),
            r"indices has the shape \(4, 2\), 4 rows, but there are 5 que",
        ),
        (lambda: masks.chosen(torch.zeros(5, 2).long(), block=2), "5 queries in blocks of 2: the axis before the last"),
        (lambda: masks.chosen(torch.zeros(4, 5, 2).long()), r"has the shape \(4, 5, 7\), which does not broadcast"),
    ],
)
def test_what_does_not_fit_a_call(kernel, mask, message):
    query, key = torch.randn(2, 6, 5, 4), torch.randn(2, 3, 7, 4)
    with pytest.raises(MaskError, match=message):
        regard.attention(query, key, key, mask=mask(), kernel=kernel)
