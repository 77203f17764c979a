"""Sparse Sinkhorn attention: blocks of keys are sorted by a matrix whose rows and columns sum to 1."""

from __future__ import annotations

import torch
from torch import Tensor

from ..attention import attention
from ..core.score_forms import at_least_float32
from ..errors import ShapeError
from .largest_scores import check_fits, check_tensors, checked_number


def sinkhorn(scores: Tensor, *, iterations: int = 8) -> Tensor:
    """e^scores, with its rows and its columns divided by their sums in turn: near 1 in both, a soft permutation.

    Shapes: (..., n, n) to (..., n, n); differentiable. Columns are divided last. Scores over a temperature below 1,
    with the noise of `-torch.empty_like(scores).exponential_().log()`, are those of Gumbel-Sinkhorn.

    Raises:
        ShapeError: scores are not (..., n, n).
        ConfigurationError: iterations is no whole number of at least 1.

    Source: Sinkhorn 1964, in logarithms, as of Tay et al. 2020 (arXiv 2002.11296), section 3.

    >>> import torch, regard
    >>> regard.selection.sinkhorn(torch.tensor([[0.0, 20.0], [20.0, 0.0]])).round()
    tensor([[0., 1.],
            [1., 0.]])
    """
    check_tensors(scores=scores)
    if scores.ndim < 2 or scores.shape[-1] != scores.shape[-2]:
        raise ShapeError(f"sinkhorn has scores {tuple(scores.shape)}; it needs (..., n, n), as many rows as columns")
    logs = at_least_float32(scores)
    for _ in range(checked_number("sinkhorn", "iterations", iterations)):
        logs = logs.log_softmax(-1).log_softmax(-2)
    return logs.exp().to(scores.dtype)


def sinkhorn_attention(
    query: Tensor, key: Tensor, value: Tensor, sorting: Tensor, *, size: int, scale: float | None = None
) -> Tensor:
    """Each block of queries attends to its own block of keys and to the one that `sorting` puts beside it.

    With K_b the keys of block b, of `size` rows, the queries of block a attend to [Σ_b sorting_ab K_b; K_a], 2 · size
    keys, and to values of the same mixture: time and memory are linear in the length. It is not causal.

    Shapes: query (..., heads, N, D), key (..., key heads, N, D), value (..., key heads, N, Dv), where `size` divides N;
    sorting (..., key heads or 1, N / size, N / size), as `sinkhorn` makes it of scores of the blocks, for example of
    the sum of a block's tokens by a learned (dim, N / size) matrix. The output is (..., heads, N, Dv). All is
    differentiable.

    Args:
        query: of the tokens.
        key: of as many tokens.
        value: of these.
        sorting: the matrix of blocks.
        size: rows of a block.
        scale: of the scores, 1/√D by default.

    Raises:
        ShapeError: the tensors do not fit, or size does not divide N.
        ConfigurationError: size is no whole number of at least 1.

    Source: Tay et al. 2020 (arXiv 2002.11296), section 3, which writes the scores of sorted and own keys as one sum;
    here they are keys of one softmax, side by side.

    >>> import torch, regard
    >>> query, key, value, tokens = torch.randn(4, 1, 2, 32, 8)
    >>> sorting = regard.selection.sinkhorn(tokens.unflatten(-2, (8, 4)).sum(-2) @ torch.randn(8, 8))
    >>> regard.selection.sinkhorn_attention(query, key, value, sorting, size=4).shape
    torch.Size([1, 2, 32, 8])
    """
    check_fits("sinkhorn_attention", query, key)
    size, length = checked_number("sinkhorn_attention", "size", size), key.shape[-2]
    if query.shape[-2] != length or length % size or value.shape[:-1] != key.shape[:-1]:
        raise ShapeError(
            f"sinkhorn_attention has query {tuple(query.shape)}, key {tuple(key.shape)} and value "
            f"{tuple(value.shape)}; it needs as many queries, keys and values, a multiple of size={size}: choose a "
            "size that divides them"
        )
    blocks = length // size
    if sorting.ndim < 3 or sorting.shape[-2:] != (blocks, blocks) or sorting.shape[-3] not in (1, key.shape[-3]):
        raise ShapeError(
            f"sorting is {tuple(sorting.shape)}; of {length} keys in blocks of {size} it needs (..., {key.shape[-3]} "
            f"or 1, {blocks}, {blocks}), a row for each block of queries"
        )

    def beside_own(rows: Tensor) -> Tensor:
        own = rows.unflatten(-2, (blocks, size))  # [..., key heads, blocks, size, D]
        there = (sorting.to(own.dtype) @ own.flatten(-2)).unflatten(-1, own.shape[-2:])
        return torch.cat([there, own], -2).transpose(-3, -4)

    own = query.unflatten(-2, (blocks, size)).transpose(-3, -4)  # [..., blocks, heads, size, D]
    output = attention(own, beside_own(key), beside_own(value), scale=scale)
    return output.transpose(-3, -4).flatten(-3, -2)
