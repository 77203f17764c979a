"""Whether the rows of a problem look back alone, as those of a text do that is read or written from left to right."""

from __future__ import annotations

import torch

from ...masks import Mask
from ...masks.base import And
from ...masks.causal import Causal
from ...masks.window import Window
from ...problem import Problem

CORNER = 128
"""So many of the last rows and keys are looked at where a mask or a bias has no symbol."""
LEAST = -1e4
"""What models add to the score of a pair that is not to exist is below this, also in half precision."""


def looks_back(problem: Problem) -> bool:
    """Whether no row attends to a key behind its own, where the queries are the last of the keys.

    A mask that says so by its symbol is believed. Of others, and of biases, the corner of the last rows and keys tells.
    """
    if problem.queries > problem.keys:
        return False
    if problem.queries == 1 or any(_is_back(part) for part in conjuncts(problem.mask)):
        return True
    if problem.mask is None and problem.bias is None:
        return False
    side = min(problem.queries, CORNER)
    rows, columns = slice(problem.queries - side, problem.queries), slice(problem.keys - side, problem.keys)
    grid = problem.grid().tile(rows, columns)
    exists = torch.ones(side, side, dtype=torch.bool, device=problem.pairs.key.device)
    if (keep := problem.keep(grid)) is not None:
        exists = exists & keep
    if problem.bias is not None and (added := problem.bias_values(grid)) is not None:
        exists = exists & (added > LEAST)
    return not bool(exists.triu(1).any())


def conjuncts(mask: Mask | None) -> list[Mask]:
    """The masks that a mask asks for together."""
    if mask is None:
        return []
    return [*conjuncts(mask.left), *conjuncts(mask.right)] if isinstance(mask, And) else [mask]


def _is_back(mask: Mask) -> bool:
    return isinstance(mask, Causal) or (isinstance(mask, Window) and mask.after == 0)
