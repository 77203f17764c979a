"""Blocks of keys by one key that stands for each: their mean, as in mixture of block attention, or a landmark."""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.score_forms import at_least_float32, per_head
from .causal_blocks import CausalBlocks
from .largest_scores import check_fits, checked_number, largest_scores


def gated_blocks(query: Tensor, key: Tensor, *, size: int, count: int) -> Tensor:
    """The `count` blocks of `size` keys that each query attends to: its own, and those of the largest q · mean(K_b).

    For `masks.causal() & masks.blocks(found, (1, size))`: earlier blocks are seen as a whole, the own one up to the
    query. Queries are at the last positions of the keys, so that a step of decoding finds what the whole text does.

    Shapes: query (..., heads, M, D), key (..., key heads, N, D); the result is (..., heads, M, count), whole numbers,
    -1 where there are fewer blocks so far. No gradient passes through it.

    Raises:
        ShapeError: query and key do not fit.
        ConfigurationError: size or count is no whole number of at least 1.

    Source: MoBA, Lu et al. 2025, arXiv 2502.13189, Eq. 5 and 6, and causality as of its section 2.2.

    >>> import torch, regard
    >>> from regard import masks
    >>> query, key = torch.eye(4)[None, None], torch.eye(4)[None, None]
    >>> found = regard.selection.gated_blocks(query, key, size=2, count=1)
    >>> found.squeeze(-1)
    tensor([[[0, 0, 1, 1]]])
    >>> output = regard.attention(query, key, key, mask=masks.causal() & masks.blocks(found, (1, 2)))
    """
    check_fits("gated_blocks", query, key)
    size, count = checked_number("gated_blocks", "size", size), checked_number("gated_blocks", "count", count)
    with torch.no_grad():
        means = _block_means(at_least_float32(key), size)
    return _nearest_blocks(query, means, key.shape[-2], size, count)


def landmark_blocks(query: Tensor, key: Tensor, *, size: int, count: int) -> Tensor:
    """The `count` blocks that each query of landmark attention sees: its own, and those of the largest q · landmark.

    The last key of each block of `size` is its landmark. For `biases.landmarks(size)` and `masks.causal() &
    masks.blocks(found, (1, size))`: the softmax is over the own block and the landmarks of the found ones. Queries are
    at the last positions of the keys, so that a step of decoding finds what the whole text does.

    Shapes: query (..., heads, M, D), key (..., key heads, N, D), with positions as rotary embeddings already applied;
    the result is (..., heads, M, count), whole numbers, -1 where there are fewer blocks so far. No gradient passes
    through it.

    Raises:
        ShapeError: query and key do not fit.
        ConfigurationError: size or count is no whole number of at least 1.

    Source: Mohtashami and Jaggi 2023 (arXiv 2305.16300), section 3.2, the blocks retrieved for each token and head.

    >>> import torch, regard
    >>> from regard import biases, masks
    >>> query = key = torch.eye(6)[None, None]
    >>> found = regard.selection.landmark_blocks(query, key, size=2, count=2)
    >>> found[0, 0, 4:]
    tensor([[2, 0],
            [2, 0]])
    >>> options = {"mask": masks.causal() & masks.blocks(found, (1, 2)), "bias": biases.landmarks(2)}
    >>> output = regard.attention(query, key, key, **options)
    """
    check_fits("landmark_blocks", query, key)
    size, count = checked_number("landmark_blocks", "size", size), checked_number("landmark_blocks", "count", count)
    keys = key.shape[-2]
    # The last block may have no landmark yet; it is the last query's own, or later than a query's own.
    last = torch.arange(size - 1, -(-keys // size) * size, size, device=key.device).clamp(max=keys - 1)
    return _nearest_blocks(query, at_least_float32(key[..., last, :]), keys, size, count)


def _block_means(key: Tensor, size: int) -> Tensor:
    """The mean of each block of `size` keys, of which the last may have fewer: (..., N, D) to (..., ⌈N / size⌉, D)."""
    whole = key.shape[-2] // size
    rest = key.shape[-2] - whole * size
    means = (key[..., : whole * size, :] if rest else key).unflatten(-2, (whole, size)).mean(-2)
    return torch.cat([means, key[..., whole * size :, :].mean(-2, keepdim=True)], -2) if rest else means


def _nearest_blocks(query: Tensor, of_blocks: Tensor, keys: int, size: int, count: int) -> Tensor:
    """The own block of each query, and the earlier ones of the largest products: (..., heads, M, count)."""
    queries, count_of = query.shape[-2], of_blocks.shape[-2]
    blocks = CausalBlocks(queries, keys, size, local=1)

    def score(rows: slice) -> Tensor:
        scores = per_head(lambda folded: folded @ of_blocks.mT, at_least_float32(query[..., rows, :]), of_blocks)
        return blocks.decide(scores, rows)

    return largest_scores(score, queries, count_of, count, query.shape[:-2].numel())
