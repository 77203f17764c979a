"""Masks from attn_bias objects of xformers: stand-ins with the fields of its classes, and their pairs one by one."""

from dataclasses import dataclass, field
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.errors import MaskError

QUERIES, KEYS, LONGER = (3, 0, 5, 2), (4, 3, 1, 7), (3, 2, 7, 6)
ROOM, WINDOW, SIDES = 9, 2, (1, 2)


class AttentionBias:
    """The base class of all in xformers."""


@dataclass
class StandIn(AttentionBias):
    fields: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(name) from None


def stand_in(name: str, **fields: Any) -> Any:
    return type(name, (StandIn,), {})(fields)


def packed(lengths: tuple[int, ...]) -> SimpleNamespace:
    starts = [0, *accumulate(lengths)]
    return SimpleNamespace(seqstart_py=starts, seqstart=torch.tensor(starts))


def padded(lengths: tuple[int, ...]) -> SimpleNamespace:
    return SimpleNamespace(**vars(packed((ROOM,) * len(lengths))), seqlen_py=list(lengths))


def gappy(lengths: tuple[int, ...]) -> SimpleNamespace:
    """Two keys before the first, one behind each."""
    starts = [2 + start for start in (0, *accumulate(length + 1 for length in lengths))]
    return SimpleNamespace(seqstart_py=starts, seqstart=torch.tensor(starts), seqlen_py=list(lengths))


def expected(blocks: list[tuple[range, range]], sizes: tuple[int, int], before: float, after: float, start: bool):
    """Pairs of a block whose distance is between both, counted from the block's start or from its end."""
    keep = torch.zeros(sizes, dtype=torch.bool)
    for rows, columns in blocks:
        shift = 0 if start else len(columns) - len(rows)
        for i, row in enumerate(rows):
            for j, column in enumerate(columns):
                keep[row, column] = -after <= i + shift - j <= before
    return keep


FAR = float("inf")
WHOLE = {
    "LowerTriangularMask": ({}, FAR, 0, True),
    "LowerTriangularFromBottomRightMask": ({}, FAR, 0, False),
    "LowerTriangularFromBottomRightLocalAttentionMask": ({"_window_size": WINDOW}, WINDOW - 1, 0, False),
    "LocalAttentionFromBottomRightMask": ({"window_left": SIDES[0], "window_right": SIDES[1]}, *SIDES, False),
}
BLOCKS = {
    "BlockDiagonalMask": (packed(KEYS), {}, FAR, FAR, True),
    "BlockDiagonalPaddedKeysMask": (padded(KEYS), {}, FAR, FAR, True),
    "BlockDiagonalGappyKeysMask": (gappy(KEYS), {}, FAR, FAR, True),
    "BlockDiagonalCausalMask": (packed(KEYS), {}, FAR, 0, True),
    "BlockDiagonalCausalLocalAttentionMask": (packed(LONGER), {"_window_size": WINDOW}, WINDOW - 1, 0, True),
    "BlockDiagonalCausalFromBottomRightMask": (packed(LONGER), {}, FAR, 0, False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        *(packed(LONGER), {"_window_size": WINDOW}, WINDOW - 1, 0, False),
    ),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (padded(KEYS), {}, FAR, 0, False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (gappy(KEYS), {}, FAR, 0, False),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (padded(KEYS), {"_window_size": WINDOW}, WINDOW - 1, 0, False),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        *(padded(KEYS), {"window_left": SIDES[0], "window_right": SIDES[1]}, *SIDES, False),
    ),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (
        *(gappy(KEYS), {"window_left": SIDES[0], "window_right": SIDES[1]}, *SIDES, False),
    ),
}


def formula(query: Tensor, key: Tensor, value: Tensor, keep: Tensor, bias: Tensor | float = 0.0) -> Tensor:
    scores = query @ key.mT / query.shape[-1] ** 0.5 + bias
    weights = scores.masked_fill(~keep, -torch.inf).softmax(-1).masked_fill(~keep.any(-1, keepdim=True), 0.0)
    return weights @ value


def assert_as_the_formula(attn_bias: Any, keep: Tensor, bias: Tensor | float = 0.0) -> None:
    """Output and gradients, with keys of NaN where no query attends."""
    queries, keys = keep.shape
    query = torch.randn(1, 4, queries, 8, dtype=torch.float64, requires_grad=True)
    key, value = (torch.randn(1, 4, keys, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    call = masks.from_xformers(attn_bias, queries, keys)
    expected = formula(query, key, value, keep, bias)
    nowhere = ~keep.any(0)[:, None]
    output = regard.attention(query, *(t.masked_fill(nowhere, torch.nan) for t in (key, value)), **call)
    above = torch.randn_like(output)
    assert torch.allclose(output, expected, atol=1e-12)
    for mine, truth in zip(
        torch.autograd.grad(output, (query, key, value), above),
        torch.autograd.grad(expected, (query, key, value), above),
        strict=True,
    ):
        assert torch.allclose(mine, truth.nan_to_num(), atol=1e-12)


@pytest.mark.parametrize("sizes", [(7, 7), (5, 11), (11, 5)], ids=str)
@pytest.mark.parametrize("name", WHOLE)
def test_causal_and_local_masks(name, sizes):
    fields, before, after, start = WHOLE[name]
    keep = expected([(range(sizes[0]), range(sizes[1]))], sizes, before, after, start)
    assert_as_the_formula(stand_in(name, **fields), keep)


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    k_seqinfo, fields, before, after, start = BLOCKS[name]
    q_seqinfo = packed(QUERIES)
    lengths = getattr(k_seqinfo, "seqlen_py", None) or torch.tensor(k_seqinfo.seqstart_py).diff().tolist()
    blocks = [
        (range(first, first + count), range(key, key + length))
        for first, count, key, length in zip(
            q_seqinfo.seqstart_py[:-1], QUERIES, k_seqinfo.seqstart_py[:-1], lengths, strict=True
        )
    ]
    keep = expected(blocks, (sum(QUERIES), k_seqinfo.seqstart_py[-1]), before, after, start)
    assert_as_the_formula(stand_in(name, q_seqinfo=q_seqinfo, k_seqinfo=k_seqinfo, **fields), keep)


def test_blocks_of_one_length_need_no_positions():
    same = packed(LONGER)
    call = masks.from_xformers(stand_in("BlockDiagonalCausalMask", q_seqinfo=same, k_seqinfo=same), 18, 18)
    assert call["query_positions"] is call["key_positions"] is call["bias"] is None
    assert (
        call["mask"]
        .dense(18, 18)
        .equal((masks.causal() & masks.from_cu_seqlens([0, *accumulate(LONGER)])).dense(18, 18))
    )


def test_a_bias_beside_the_mask():
    bias = torch.randn(1, 4, 5, 11, dtype=torch.float64)
    keep = expected([(range(5), range(11))], (5, 11), FAR, 0, True)
    assert_as_the_formula(stand_in("LowerTriangularMaskWithTensorBias", _bias=bias), keep, bias)


def test_what_is_refused():
    blocks = stand_in("BlockDiagonalMask", q_seqinfo=packed(QUERIES), k_seqinfo=packed(KEYS))
    with pytest.raises(MaskError, match="is for 10 queries and 15 keys in all; there are 11 queries and 15 keys"):
        masks.from_xformers(blocks, 11, 15)
    with pytest.raises(MaskError, match=r"PagedBlockDiagonalPaddedKeysMask has its keys in pages: .*block_tables"):
        masks.from_xformers(stand_in("PagedBlockDiagonalPaddedKeysMask"), 1, 1)
    with pytest.raises(MaskError, match=r"^from_xformers needs an attn_bias object .*; this is a tensor: .* bias="):
        masks.from_xformers(torch.zeros(2, 2), 2, 2)
    with pytest.raises(MaskError, match=r"; this is a Causal$"):
        masks.from_xformers(masks.causal(), 2, 2)
    sharing = SimpleNamespace(seqstart_py=[0, 2, 5], seqstart=torch.tensor([0, 2, 5]), seqlen_py=[3, 3])
    overlapping = stand_in("BlockDiagonalGappyKeysMask", q_seqinfo=packed((1, 1)), k_seqinfo=sharing)
    with pytest.raises(MaskError, match="block 0 of this BlockDiagonalGappyKeysMask has keys of the next one"):
        masks.from_xformers(overlapping, 2, 5)
    q = torch.rand(1, 2, 3, 4)
    with pytest.raises(MaskError, match=r"LowerTriangularMask of xformers: pass \*\*masks\.from_xformers\(mask, quer"):
        regard.attention(q, q, q, mask=stand_in("LowerTriangularMask"))
