"""A search for blocks of keys: halves of the best chunks, again and again, as in hierarchically pruned attention."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.score_forms import at_least_float32
from .largest_scores import SCORES_AT_ONCE, check_fits, checked_number

INFINITY = float("inf")


def hierarchical_blocks(query: Tensor, key: Tensor, *, size: int, count: int) -> Tensor:
    """The `count` blocks of `size` keys that each block of queries attends to, found without a look at most keys.

    The keys up to a block of queries are divided into 2 · count chunks of whole blocks. The key in the middle of a
    chunk stands for it: its score is the largest product with a query of the block that sees it. The best `count`
    chunks are cut in halves, and so on until chunks are single blocks: log₂(N / (2 · count · size)) + 1 rounds of
    2 · count products for each query, in place of N. Nothing is trained.

    For `masks.causal() & masks.blocks(found, size)`, or with what is near beside it, `masks.causal() &
    (masks.blocks(found, size) | masks.window(before=size))`. Queries are at the last positions of the keys.

    Shapes: query (..., heads, M, D), key (..., key heads, N, D), with positions as rotary embeddings already applied;
    the result is (..., heads, ⌈M / size⌉, count), whole numbers, the best first, -1 where there are fewer blocks so
    far. No gradient passes through it.

    Raises:
        ShapeError: query and key do not fit.
        ConfigurationError: size or count is no whole number of at least 1.

    Source: HiP, Lee et al. 2024 (arXiv 2406.09827), whose search for single keys by the middle of each chunk is here
    one for blocks of queries and keys.

    >>> import torch, regard
    >>> from regard import masks
    >>> key = torch.randn(1, 1, 64, 8, generator=torch.Generator().manual_seed(0))
    >>> key[..., 16:24, :] = 4.0   # what every query looks for, blocks 4 and 5
    >>> query = torch.ones(1, 1, 64, 8)
    >>> found = regard.selection.hierarchical_blocks(query, key, size=4, count=4)
    >>> {4, 5} <= set(found[0, 0, -1].tolist())
    True
    >>> output = regard.attention(query, key, key, mask=masks.causal() & masks.blocks(found, 4))
    """
    check_fits("hierarchical_blocks", query, key)
    size, count = (
        checked_number("hierarchical_blocks", "size", size),
        checked_number("hierarchical_blocks", "count", count),
    )
    with torch.no_grad():
        search = _HalvingSearch(at_least_float32(query), at_least_float32(key), size, count)
        rows = -(-query.shape[-2] // size)
        per_row = query.shape[:-2].numel() * 2 * count * max(size, query.shape[-1])
        height = max(SCORES_AT_ONCE // max(per_row, 1), 1)
        found = [search.best(range(start, min(start + height, rows))) for start in range(0, rows, height)]
    if not found:
        return torch.empty(*query.shape[:-2], 0, count, dtype=torch.int64, device=query.device)
    return torch.cat(found, -2)


class _HalvingSearch:
    """The chunks of some blocks of queries, and the scores of the keys in their middle."""

    def __init__(self, query: Tensor, key: Tensor, size: int, count: int) -> None:
        self.query, self.key, self.size, self.count = query, key, size, count
        self.queries, self.keys = query.shape[-2], key.shape[-2]

    def best(self, rows: range) -> Tensor:
        """The blocks of some blocks of queries, (..., heads, rows, count)."""
        queries = self.query[..., rows.start * self.size : rows.stop * self.size, :]
        queries = pad(queries, (0, 0, 0, len(rows) * self.size - queries.shape[-2])).unflatten(-2, (-1, self.size))
        number = torch.arange(rows.start * self.size, rows.stop * self.size, device=queries.device).view(-1, self.size)
        position = (number + self.keys - self.queries).masked_fill(number >= self.queries, -1)  # none sees nothing
        ends = position.amax(-1, keepdim=True) + 1  # of the keys that a block of queries sees
        blocks = -(-ends // self.size)
        edges = torch.arange(2 * self.count + 1, device=queries.device) * blocks // (2 * self.count)
        chunks = torch.stack([edges[:, :-1], edges[:, 1:]], -1).expand(*self.query.shape[:-2], -1, -1, -1)
        longest = -(-self.keys // self.size) / (2 * self.count)
        while True:
            chunks, scores = self._kept(chunks, queries, position, ends)
            if longest <= 1:
                return chunks[..., 0].masked_fill(scores == -INFINITY, -1)
            middle = chunks.sum(-1) // 2
            halves = torch.stack([chunks[..., 0], middle, middle, chunks[..., 1]], -1).unflatten(-1, (2, 2))
            chunks, longest = halves.flatten(-3, -2), longest / 2

    def _kept(self, chunks: Tensor, queries: Tensor, position: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        """The best `count` of the chunks [start, stop), (..., heads, rows, 2 · count, 2), and their scores."""
        start, stop = chunks.unbind(-1)
        middle = (start * self.size + torch.minimum(stop * self.size, ends) - 1).div(2, rounding_mode="floor")
        middle = middle.clamp(min=0)
        *leading, key_heads = self.key.shape[:-2]
        index = middle.reshape(*leading, key_heads, -1, 1).expand(*leading, key_heads, -1, self.key.shape[-1])
        central = self.key.gather(-2, index).view(*middle.shape, -1)  # [..., heads, rows, chunks, D]
        scores = queries @ central.mT  # [..., heads, rows, size, chunks]
        scores = scores.masked_fill(position.unsqueeze(-1) < middle.unsqueeze(-2), -INFINITY).amax(-2)
        scores = scores.masked_fill(start >= stop, -INFINITY)
        best = scores.topk(self.count, -1)
        return chunks.gather(-2, best.indices.unsqueeze(-1).expand(*best.indices.shape, 2)), best.values
