"""Native sparse attention: compressed blocks, selected blocks and a window, joined by gates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from .. import masks
from ..attention import attention
from ..core.score_forms import at_least_float32, per_head
from ..errors import ShapeError
from ..masks import Mask
from ..masks.base import Kept, Pairs
from ..masks.key_spans import KeySpan
from .largest_scores import check_fits, check_tensors, checked_number, largest_scores

FIRST, LOCAL = 1, 2
"""Blocks that are always selected: at the beginning, and up to the query's own."""


@dataclass(frozen=True, repr=False)
class EndedBlocks(Mask):
    """Block k of `length` keys, at every `stride` keys, ends at or before query position q + shift.

    shift: keys that there are more than blocks, as queries have the last positions of what they attend to by default.
    """

    length: int
    stride: int
    shift: int

    def key_span(self) -> KeySpan:
        first, stride = self.shift - self.length + 1, self.stride
        return lambda queries: (
            None,
            (torch.arange(queries.start + first, queries.stop + first, device="cpu") // stride + 1).clamp(min=0),
        )

    def keep(self, grid: Pairs) -> Kept:
        return grid.key * self.stride + (self.length - 1 - self.shift) <= grid.query

    def __repr__(self) -> str:
        return f"blocks of {self.length} keys at every {self.stride} that have ended"


def overlapping_blocks(tensor: Tensor, length: int, stride: int) -> Tensor:
    """Blocks of `length` rows, one at every `stride` rows.

    Shapes: (..., N, D) to (..., ⌊(N - length) / stride⌋ + 1, length, D).

    What a learned map makes of each of them, or their mean, is a compressed key or value.

    >>> import torch, regard
    >>> regard.selection.overlapping_blocks(torch.arange(6.0).view(6, 1), 4, 2).squeeze(-1)
    tensor([[0., 1., 2., 3.],
            [2., 3., 4., 5.]])
    """
    length, stride = (
        checked_number("overlapping_blocks", "length", length),
        checked_number("overlapping_blocks", "stride", stride),
    )
    check_tensors(tensor=tensor)
    if tensor.shape[-2] < length:
        return tensor.new_zeros(*tensor.shape[:-2], 0, length, tensor.shape[-1])
    return tensor.unfold(-2, length, stride).transpose(-1, -2)


def selected_blocks(
    query: Tensor, compressed_key: Tensor, keys: int, *, length: int, stride: int, size: int, count: int
) -> Tensor:
    """The `count` blocks of `size` keys that the heads of a group attend to, by their weights of compressed keys.

    The importance of a block is the sum of the weights softmax(q · compressed keys / √D) of all compressed blocks that
    share keys with it, each as often as the paper's Eq. 9 counts it, over the heads of a group. The first block and
    the last two up to the query's own are always among them.

    Shapes: query (..., heads, M, D) at the last positions of so many keys; compressed_key (..., key heads, C, D), of
    `overlapping_blocks` of this length and stride, which divide `size` and one another; the result is (..., key heads,
    M, count), whole numbers, -1 where there are fewer blocks so far. No gradient passes through it.

    Raises:
        ShapeError: the tensors do not fit, or the sizes do not divide.

    Source: NSA, Yuan et al. 2025, arXiv 2502.11089, Eq. 8 to 12.
    """
    length, stride, size, count = (
        checked_number("selected_blocks", name, value)
        for name, value in (("length", length), ("stride", stride), ("size", size), ("count", count))
    )
    if length % stride or size % stride:
        raise ShapeError(
            f"selected_blocks has stride {stride}, which does not divide both length {length} and size {size}"
        )
    queries, group = query.shape[-2], query.shape[-3] // max(compressed_key.shape[-3], 1)
    blocks, compressed = -(-keys // size), compressed_key.shape[-2]
    wide, scale = at_least_float32(compressed_key), query.shape[-1] ** -0.5
    ends = torch.arange(compressed, device=query.device) * stride + length - 1

    def score(rows: slice) -> Tensor:
        last = torch.arange(queries, device=query.device)[rows].unsqueeze(-1) + keys - queries  # [m, 1]
        scores = per_head(lambda folded: scale * (folded @ wide.mT), at_least_float32(query[..., rows, :]), wide)
        scores = scores.masked_fill(ends > last, float("-inf"))
        weights = scores.softmax(-1).masked_fill(ends > last, 0.0)  # of a row without any, NaN
        weights = weights.unflatten(-3, (-1, group)).sum(-3)  # [..., key heads, m, C]
        importance = _of_blocks(weights, blocks, length // stride, size // stride)
        block, own = torch.arange(blocks, device=query.device), last // size
        always = (block < FIRST) | ((own - LOCAL < block) & (block <= own))
        return importance.masked_fill(always, float("inf")).masked_fill(block > own, float("-inf"))

    return largest_scores(score, queries, blocks, count, query.shape[:-2].numel() * (size // stride))


def _of_blocks(weights: Tensor, blocks: int, length: int, size: int) -> Tensor:
    """Σ_m Σ_n weights[size · j - m - n], m below size and n below length, for each block j; Eq. 9, counted from 0.

    There block j has the compressed blocks from size · j + size - 1 down, as those are the last that begin in it.
    """
    compressed = weights.shape[-1]
    padded = pad(weights, (length - 1, max(blocks * size - compressed, 0)))
    sums = padded.unfold(-1, length, 1).sum(-1)[..., : blocks * size]  # n: those that reach into a stride
    return sums.unflatten(-1, (blocks, size)).sum(-1)


def native_sparse_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    compressed: tuple[Tensor, Tensor],
    gates: Tensor,
    *,
    length: int,
    stride: int,
    size: int,
    count: int,
    window: int,
) -> Tensor:
    """Σ_c g_c · attention(q, K_c, V_c) over three sets c of keys: compressed blocks, selected blocks and a window.

    Compressed are the blocks that end at or before the query; selected the `count` blocks of `size` keys of
    `selected_blocks`, up to the query, which all heads of a group share; the window has the last `window` keys. Each is
    a call of `regard.attention`, in linear memory, with gradients to all tensors but through the selection.

    Shapes: query (..., heads, M, D) at the last positions of key (..., key heads, N, D) and value (..., key heads, N,
    Dv); compressed, keys and values of `overlapping_blocks` of this length and stride, (..., key heads, C, D) and
    (..., key heads, C, Dv); gates (..., heads, M, 3), of the three sets in this order, such as sigmoids of a map of the
    query's token; the result is (..., heads, M, Dv).

    Raises:
        ShapeError: tensors that do not fit; a stride that does not divide length and size.
        ConfigurationError: a number that is no whole number of at least 1.

    Source: NSA, Yuan et al. 2025, arXiv 2502.11089, Eq. 5 to 12.

    >>> import torch, regard
    >>> from regard.selection import native_sparse_attention, overlapping_blocks
    >>> query, key, value = torch.randn(1, 4, 9, 8), torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9, 8)
    >>> compressed = tuple(overlapping_blocks(tensor, 4, 2).mean(-2) for tensor in (key, value))
    >>> gates = torch.rand(1, 4, 9, 3)
    >>> sizes = {"length": 4, "stride": 2, "size": 4, "count": 2, "window": 3}
    >>> native_sparse_attention(query, key, value, compressed, gates, **sizes).shape
    torch.Size([1, 4, 9, 8])
    """
    check_fits("native_sparse_attention", query, key)
    window = checked_number("native_sparse_attention", "window", window)
    keys = key.shape[-2]
    wanted = max((keys - length) // stride + 1, 0)
    has = [tensor.shape[-2] for tensor in compressed]
    if has != [wanted, wanted] or gates.shape != (*query.shape[:-1], 3):
        raise ShapeError(
            f"native_sparse_attention has {has[0]} compressed keys, {has[1]} compressed values and gates "
            f"{tuple(gates.shape)}; {keys} keys in blocks of {length} at every {stride} need {wanted} of them, and "
            f"gates {(*query.shape[:-1], 3)}"
        )
    found = selected_blocks(query, compressed[0], keys, length=length, stride=stride, size=size, count=count)
    branches = (
        attention(query, *compressed, mask=EndedBlocks(length, stride, keys - wanted)),
        attention(query, key, value, mask=masks.causal() & masks.blocks(found, (1, size))),
        attention(query, key, value, mask=masks.causal() & masks.window(before=window - 1)),
    )
    return (gates.movedim(-1, 0).unsqueeze(-1) * torch.stack(branches)).sum(0)
