"""The lightning indexer of DeepSeek Sparse Attention: a small attention that finds the keys of the large one."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from ..core.grid import WHOLE, Grid
from ..core.score_forms import at_least_float32
from ..core.symbolic_positions import Positions
from ..errors import ShapeError
from ..masks import Mask, as_mask, causal
from .causal_blocks import CausalBlocks
from .largest_scores import check_tensors, checked_number, largest_scores


def lightning_indices(
    query: Tensor,
    key: Tensor,
    weights: Tensor,
    *,
    count: int,
    mask: Mask | None = None,
    query_positions: Positions | None = None,
    key_positions: Positions | None = None,
) -> Tensor:
    """The `count` keys of the largest I(t, s) = Σ_h w_th · relu(q_th · k_s) of each query t, among s <= t.

    For `masks.chosen(found.unsqueeze(-3))`, which all heads of the attention share. Queries are at the last positions
    of the keys. With a `mask`, in place of s <= t, it says which keys may be chosen, by the positions of queries and
    keys as in `regard.attention`; what is found are columns nonetheless, the numbers of keys in the order given. Of
    equal scores any may be found. A scale, as of transformers' models, goes into the weights.

    Shapes: the indexer's query (..., index heads, M, D), key (..., N, D), weights (..., M, index heads); the result is
    (..., M, at most count), whole numbers, -1 where there are fewer keys so far. No gradient passes through it: the
    indexer learns from a loss of its own.

    Raises:
        ShapeError: the tensors do not fit; a mask that differs between heads.
        ConfigurationError: count is no whole number of at least 1.

    Source: DeepSeek-V3.2-Exp (2025), Eq. 1 and 2.

    >>> import torch, regard
    >>> query, key = torch.ones(1, 1, 3, 2), torch.tensor([[[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]]])
    >>> regard.selection.lightning_indices(query, key, torch.ones(1, 3, 1), count=2)
    tensor([[[ 0, -1],
             [ 1,  0],
             [ 1,  2]]])
    """
    count = checked_number("lightning_indices", "count", count)
    check_tensors(query=query, key=key, weights=weights)
    heads, queries, dim = query.shape[-3:] if query.ndim > 2 else (0, 0, 0)
    keys = key.shape[-2] if key.ndim > 1 else 0
    if query.ndim < 3 or key.shape[-1] != dim or weights.shape[-2:] != (queries, heads) or queries > keys:
        raise ShapeError(
            f"lightning_indices has query {tuple(query.shape)}, key {tuple(key.shape)} and weights "
            f"{tuple(weights.shape)}; it needs (..., index heads, M, D), (..., N, D) and (..., M, index heads), where "
            "M is at most N"
        )
    wide = at_least_float32(key)
    exists = None
    if mask is not None or query_positions is not None or key_positions is not None:
        grid = Grid.from_lengths(
            queries, keys, query_positions=query_positions, key_positions=key_positions, device=key.device
        )
        exists = partial(_of_all_heads, causal() if mask is None else as_mask(mask), grid)
    earlier = CausalBlocks(queries, keys, 1)

    def score(rows: slice) -> Tensor:
        some, of_heads = (each if rows == WHOLE else each[..., rows, :] for each in (query, weights))
        some = at_least_float32(some)
        products = (some.flatten(-3, -2) @ wide.mT).relu_().unflatten(-2, some.shape[-3:-1])  # [..., index heads, m, N]
        if of_heads.dtype is not products.dtype:
            of_heads = of_heads.to(products.dtype)
        scores = (of_heads.unsqueeze(-2) @ products.transpose(-3, -2)).squeeze(-2)
        return earlier.decide(scores, rows) if exists is None else scores.masked_fill(~exists(rows), float("-inf"))

    return largest_scores(score, queries, keys, count, query.shape[:-2].numel())


def _of_all_heads(mask: Mask, grid: Grid, rows: slice) -> Tensor:
    """Which pairs of some rows exist, (..., m, N), of a mask that is the same for all heads."""
    exists = mask.evaluate(grid.tile(rows, WHOLE))
    if exists.ndim > 2 and exists.shape[-3] != 1:
        raise ShapeError(
            f"lightning_indices has the mask {mask!r}, which differs between {exists.shape[-3]} heads; all heads share "
            "what is chosen, so that it needs one that is the same for all"
        )
    return exists.squeeze(-3) if exists.ndim > 2 else exists
