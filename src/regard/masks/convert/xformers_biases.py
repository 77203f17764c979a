"""Conversion from the attn_bias objects of xformers' memory_efficient_attention, which need not be installed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ...errors import MaskError
from ..base import Mask
from ..causal import causal
from ..documents import documents
from ..index_checks import checked_count
from ..window import window

SHAPES: dict[str, tuple[tuple[str, ...], bool]] = {
    "LowerTriangularMask": (("causal",), True),
    "LowerTriangularMaskWithTensorBias": (("causal",), True),
    "LowerTriangularFromBottomRightMask": (("causal",), False),
    "LowerTriangularFromBottomRightLocalAttentionMask": (("causal", "local"), False),
    "LocalAttentionFromBottomRightMask": (("window",), False),
    "BlockDiagonalMask": ((), True),
    "BlockDiagonalPaddedKeysMask": ((), True),
    "BlockDiagonalGappyKeysMask": ((), True),
    "BlockDiagonalCausalMask": (("causal",), True),
    "BlockDiagonalCausalLocalAttentionMask": (("causal", "local"), True),
    "BlockDiagonalCausalFromBottomRightMask": (("causal",), False),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (("causal", "local"), False),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (("causal",), False),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (("causal",), False),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (("causal", "local"), False),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (("window",), False),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (("window",), False),
}
"""By the name of the class: which pairs of a block exist, and whether its first query sits at its first key; else its
last query sits at its last key."""


def from_xformers(attn_bias: Any, queries: int, keys: int) -> dict[str, Any]:
    """The arguments of `attention` that say what an `attn_bias` object of xformers says, for M queries and N keys.

    They are "mask", "bias", "query_positions" and "key_positions": `attention(q, k, v, **from_xformers(bias, M, N))`.
    xformers' tensors are (batch, length, heads, dim): transpose(1, 2) makes them regard's. Read are the classes of
    causal and local masks and the block-diagonal ones, also with padded or gappy keys, by their names and fields. Where
    the blocks have as many queries as keys there are no positions; else the positions of a block leave room for the
    longer of both. Queries without a key have output 0 here, and NaN there.

    Raises:
        MaskError: another object; one for other lengths; keys in pages.

    >>> from regard import masks
    >>> class LowerTriangularFromBottomRightLocalAttentionMask:   # in place of that of xformers
    ...     _window_size = 512
    >>> masks.from_xformers(LowerTriangularFromBottomRightLocalAttentionMask(), 100, 4000)["mask"]
    causal() & window(before=511)
    """
    name = type(attn_bias).__name__
    if name.startswith("Paged"):
        raise MaskError(
            f"{name} has its keys in pages: gather them by its block_tables, and pass the bias that it was made from"
        )
    if name not in SHAPES:
        has = "a tensor: pass it as bias=" if isinstance(attn_bias, Tensor) else f"a {name}"
        raise MaskError(f"from_xformers needs an attn_bias object of xformers.ops.fmha; this is {has}")
    queries, keys = (
        checked_count(f"from_xformers's {name}", count) for name, count in (("queries", queries), ("keys", keys))
    )
    parts, from_start = SHAPES[name]
    mask, placed = _within_block(parts, attn_bias), dict[str, Any](query_positions=None, key_positions=None)
    if name.startswith("BlockDiagonal"):
        blocks = _packed_blocks(attn_bias, queries, keys)
        ids, placed = _place(blocks, keys, from_start=from_start)
        device = attn_bias.q_seqinfo.seqstart.device
        placed = {side: positions if positions is None else positions.to(device) for side, positions in placed.items()}
        mask = ids if mask is None else mask & ids
    elif from_start and queries != keys:
        placed["query_positions"] = range(queries)
    return {"mask": mask, "bias": getattr(attn_bias, "_bias", None), **placed}


def _within_block(parts: tuple[str, ...], attn_bias: Any) -> Mask | None:
    """The mask of the pairs of one block, None where all exist."""
    if not parts:
        return None
    if parts == ("window",):
        return window(attn_bias.window_left, attn_bias.window_right)
    return causal() & window(before=attn_bias._window_size - 1) if "local" in parts else causal()


def _packed_blocks(attn_bias: Any, queries: int, keys: int) -> list[tuple[int, range]]:
    """How many queries each block has, and which of the packed keys.

    Raises:
        MaskError: the blocks are of other lengths, or share keys.
    """
    name, starts, key_starts = (
        type(attn_bias).__name__,
        attn_bias.q_seqinfo.seqstart_py,
        attn_bias.k_seqinfo.seqstart_py,
    )
    if (starts[-1], key_starts[-1]) != (queries, keys):
        raise MaskError(
            f"this {name} is for {starts[-1]} queries and {key_starts[-1]} keys in all; there are {queries} queries "
            f"and {keys} keys"
        )
    used = getattr(attn_bias.k_seqinfo, "seqlen_py", [end - start for start, end in pairwise(key_starts)])
    own = [range(start, start + length) for start, length in zip(key_starts[:-1], used, strict=True)]
    for number, (one, other) in enumerate(pairwise([*own, range(keys, keys)])):
        if one.stop > other.start:
            raise MaskError(f"block {number} of this {name} has keys of the next one: each key needs one block at most")
    return list(zip((end - start for start, end in pairwise(starts)), own, strict=True))


def _place(blocks: list[tuple[int, range]], keys: int, *, from_start: bool) -> tuple[Mask, dict[str, Tensor | None]]:
    """The mask that parts the blocks, and the positions at which one mask by distance holds in all of them.

    A block has room for its queries or its keys, whichever are more. Keys of no block come behind those before them,
    with an id that no query has, so that positions and ids grow from key to key.
    """
    ids, query_positions, key_positions = [], [], []
    for number, (count, own) in enumerate([*blocks, (0, range(keys, keys))]):
        unused, room = own.start - len(key_positions), max(count, len(own))
        key_positions += range(len(ids), len(ids) + unused)
        ids += [2 * number] * unused
        for positions, length in ((query_positions, count), (key_positions, len(own))):
            begin = len(ids) if from_start else len(ids) + room - length
            positions += range(begin, begin + length)
        ids += [2 * number + 1] * room
    if query_positions == key_positions == list(range(keys)):
        return documents(ids), {"query_positions": None, "key_positions": None}
    return documents(ids), {
        "query_positions": torch.tensor(query_positions, dtype=torch.int64),
        "key_positions": torch.tensor(key_positions, dtype=torch.int64),
    }
