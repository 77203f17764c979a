"""Apply lenses to a tensor of weights, for instance from another library."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.problem import Problem
from ..errors import ConfigurationError, DtypeError, ShapeError
from ..kernels.lens_pass import start_lenses
from ..kernels.validation import make_problem
from ..lenses import Lens, WeightTile
from ..masks import Mask

MAX_TILE_WEIGHTS = 2**21
"""The most weights in a tile."""


def observe_weights(
    weights: Tensor,
    *lenses: Lens,
    mask: Mask | Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Mapping[Lens, Any]:
    """The results of lenses for a tensor of weights (..., heads, M, N): `observe_weights(weights, lens)[lens]`.

    Rows may sum to less than 1, where there is a sink; a row of zeros attends to nothing, a row with a NaN to NaN.
    Weights with three axes are the heads of one sequence, with two axes one head, and results lack the same axes.
    Lenses that compute weights from queries and keys are refused: `Alignment`, and a rectangle of `Weights`.

    Args:
        weights: numbers of at least 0; masked pairs have 0.
        lenses: from `regard.lenses` or `regard.heads`, or of one's own.
        mask: which pairs exist, for lenses that count them; as in `regard.attention`.
        query_positions: (M,) or (*batch, M); without them those of the last M keys.
        key_positions: (N,) or (*batch, N); without them 0..N-1.

    Raises:
        ConfigurationError: something else than a lens, or a lens without reductions.
        DtypeError, ShapeError: weights that are no floating-point tensor with rows and columns, or are negative.

    >>> import torch, regard
    >>> from regard.heads import observe_weights
    >>> weights, received = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), regard.lenses.Received()
    >>> observe_weights(weights, received)[received]
    tensor([1.5000, 0.5000])
    """
    weights = checked_weights(weights)
    if weights.ndim == 3:
        # With three axes `make_problem` would read (batch, length, dim), without heads: add a batch of one.
        weights = weights.unsqueeze(0)
        positions: dict[str, Any] = {"query_positions": query_positions, "key_positions": key_positions}
        results = observe_weights(weights, *lenses, mask=mask, **positions)
        return {lens: _without_batch(result, weights.shape[:2]) for lens, result in results.items()}
    problem = _problem(weights, mask, query_positions, key_positions)
    states = start_lenses(problem, lenses)
    for lens, state in states.items():
        if not state.reductions:
            raise ConfigurationError(
                f"{lens!r} computes weights from queries and keys: observe_weights(weights, ...) needs lenses that "
                "reduce weights, such as Entropy(), Received() or TopK(8)"
            )
    sums = weights.sum(-1)
    broken = sums.isnan() | sums.isinf()
    lse = torch.zeros_like(sums).masked_fill(sums == 0, -math.inf).masked_fill(broken, math.nan)
    with torch.no_grad():
        reductions = [reduction for state in states.values() for reduction in state.reductions]
        for tile in _tiles(
            problem, weights, broken, terms=any(reduction.needs_entropy_terms for reduction in reductions)
        ):
            for reduction in reductions:
                reduction.add(tile)
        return {lens: state.finish(problem, lse) for lens, state in states.items()}


def checked_weights(weights: Tensor) -> Tensor:
    """Weights in float32 at least, detached.

    Raises:
        DtypeError, ShapeError: no floating-point tensor with rows and columns, or negative numbers.
    """
    if not isinstance(weights, Tensor) or not weights.is_floating_point():
        has = f"of {weights.dtype}" if isinstance(weights, Tensor) else f"a {type(weights).__name__}"
        raise DtypeError(f"weights need to be a torch.Tensor of floating-point numbers; they are {has}")
    if weights.ndim < 2:
        raise ShapeError(f"weights have the shape {tuple(weights.shape)}; they need (..., heads, queries, keys)")
    weights = weights.detach()
    weights = weights.to(torch.promote_types(weights.dtype, torch.float32))
    if bool((weights < 0).any()):
        raise ShapeError(
            f"weights need numbers of at least 0, as a softmax gives them; the least is {float(weights.min()):.3g}"
        )
    return weights


def _without_batch(result: Any, leading: torch.Size) -> Any:
    """A result without its leading batch axis of one; results that have no such axis stay as they are."""
    if isinstance(result, Tensor):
        return result.squeeze(0) if result.shape[:2] == leading else result
    if isinstance(result, tuple) and hasattr(result, "_fields"):
        return type(result)(*(_without_batch(part, leading) for part in result))
    return result


def _problem(
    weights: Tensor, mask: Mask | Tensor | None, query_positions: Tensor | None, key_positions: Tensor | None
) -> Problem:
    """A problem of these sizes, with the mask and positions that lenses read; its queries and keys are zeros."""
    *leading, queries, keys = weights.shape
    zero = weights.new_zeros(1)
    query, key = (zero.expand(*leading, length, 1) for length in (queries, keys))
    return make_problem(query, key, key, mask=mask, query_positions=query_positions, key_positions=key_positions)


def _tiles(problem: Problem, weights: Tensor, broken: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """Tiles of whole rows of one batch each; rows with a NaN are zeros."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    queries, keys = weights.shape[-2:]
    sizes = problem.batch.numel(), heads, queries
    weights, broken = weights.reshape(*sizes, keys), broken.reshape(sizes)
    most = max(MAX_TILE_WEIGHTS // max(heads * keys, 1), 1)
    for batch in range(len(weights) if weights.numel() else 0):
        one = slice(batch, batch + 1)
        for start in range(0, queries, most):
            rows = slice(start, min(start + most, queries))
            part = weights[one, :, rows].masked_fill(broken[one, :, rows, None], 0.0)
            # entr is -w · ln w; entropy terms are w · log₂ w.
            logs = torch.special.entr(part).div_(-math.log(2)) if terms else None
            yield WeightTile(part, logs, one, rows, slice(0, keys))
