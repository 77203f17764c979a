"""Lenses over weights that are there already: what another tool has kept is looked at as `regard.observe` looks."""

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

TILE = 2**21
"""Weights that are looked at at a time."""


def look(
    weights: Tensor,
    *lenses: Lens,
    mask: Mask | Tensor | None = None,
    query_positions: Tensor | None = None,
    key_positions: Tensor | None = None,
) -> Mapping[Lens, Any]:
    """What lenses show of weights (..., heads, M, N) that are given as numbers: `look(weights, lens)[lens]`.

    A row may sum to less than 1, where a sink took a part; one of zeros attends to nothing, one with a NaN to NaN.
    Weights of three axes are the heads of one sequence, those of two are one head: what is shown has no axis that they
    do not have. Of the lenses of `regard.lenses`, a rectangle of `Weights` and `Alignment` have nothing to look at
    here: they compute weights.

    Args:
        weights: numbers of at least 0; what a mask leaves out has 0.
        lenses: what is looked for.
        mask: which pairs existed, for lenses that ask: as `regard.attention` takes it.
        query_positions: (M,) or (*batch, M); without them those of the last M keys.
        key_positions: (N,) or (*batch, N); without them 0..N-1.

    Raises:
        ConfigurationError: what is no lens, or one that looks at no tiles.
        DtypeError, ShapeError: weights that are no tensor of numbers with rows and columns, or are below 0.

    >>> import torch, regard
    >>> from regard.heads import look
    >>> weights, received = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), regard.lenses.Received()
    >>> look(weights, received)[received]
    tensor([1.5000, 0.5000])
    """
    weights = checked(weights)
    if weights.ndim == 3:
        # Attention has three axes as (batch, length, dim), without heads: these have a batch of one.
        weights = weights.unsqueeze(0)
        beside: dict[str, Any] = {"query_positions": query_positions, "key_positions": key_positions}
        seen = look(weights, *lenses, mask=mask, **beside)
        return {lens: _without_batch(shown, weights.shape[:2]) for lens, shown in seen.items()}
    problem = _problem(weights, mask, query_positions, key_positions)
    looks = start_lenses(problem, lenses)
    for lens, eye in looks.items():
        if not eye.reductions:
            raise ConfigurationError(
                f"{lens!r} computes weights and looks at none that are there: look(weights, ...) needs lenses such as "
                "Entropy(), Received() or TopK(8)"
            )
    sums = weights.sum(-1)
    broken = sums.isnan() | sums.isinf()
    lse = torch.zeros_like(sums).masked_fill(sums == 0, -math.inf).masked_fill(broken, math.nan)
    with torch.no_grad():
        reductions = [reduction for eye in looks.values() for reduction in eye.reductions]
        for tile in _tiles(
            problem, weights, broken, terms=any(reduction.needs_entropy_terms for reduction in reductions)
        ):
            for reduction in reductions:
                reduction.add(tile)
        return {lens: eye.finish(problem, lse) for lens, eye in looks.items()}


def checked(weights: Tensor) -> Tensor:
    """Weights in float32 at least, detached.

    Raises:
        DtypeError, ShapeError: they are none.
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


def _without_batch(shown: Any, leading: torch.Size) -> Any:
    """What is shown of a batch of one, (1, heads), without its axis; what has none, such as a sum over it, as it is."""
    if isinstance(shown, Tensor):
        return shown.squeeze(0) if shown.shape[:2] == leading else shown
    if isinstance(shown, tuple) and hasattr(shown, "_fields"):
        return type(shown)(*(_without_batch(part, leading) for part in shown))
    return shown


def _problem(
    weights: Tensor, mask: Mask | Tensor | None, query_positions: Tensor | None, key_positions: Tensor | None
) -> Problem:
    """A call of these sizes, for lenses to read mask and positions from; its scores are not those of the weights."""
    *leading, queries, keys = weights.shape
    number = weights.new_zeros(1)
    query, key = (number.expand(*leading, length, 1) for length in (queries, keys))
    return make_problem(query, key, key, mask=mask, query_positions=query_positions, key_positions=key_positions)


def _tiles(problem: Problem, weights: Tensor, broken: Tensor, *, terms: bool) -> Iterator[WeightTile]:
    """All rows, some of one batch at a time; a row with a NaN shows as zeros."""
    heads = problem.weights_shape[-3] if problem.heads else 1
    queries, keys = weights.shape[-2:]
    sizes = problem.batch.numel(), heads, queries
    weights, broken = weights.reshape(*sizes, keys), broken.reshape(sizes)
    most = max(TILE // max(heads * keys, 1), 1)
    for batch in range(len(weights) if weights.numel() else 0):
        one = slice(batch, batch + 1)
        for start in range(0, queries, most):
            rows = slice(start, min(start + most, queries))
            part = weights[one, :, rows].masked_fill(broken[one, :, rows, None], 0.0)
            # -w · ln w is there as entr; the terms are w · log₂ w.
            logs = torch.special.entr(part).div_(-math.log(2)) if terms else None
            yield WeightTile(part, logs, one, rows, slice(0, keys))
