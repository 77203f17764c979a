"""The keys that a mask leaves of very many, so that nothing of the size of all of them is in memory."""

from __future__ import annotations

from dataclasses import replace

from ..core.problem import Problem
from .row_spans import attended_columns, first_key_position, has_spans, query_range

MANY = 2**24
"""Of fewer keys, kernels find those that the mask leaves; of more, their positions and tiles alone take long."""


def attended_part(problem: Problem) -> Problem:
    """The problem over the keys from the first to the last that any query attends to, at their positions.

    The problem itself where it has a bias, or a mask whose rows are no spans of keys.
    """
    mask = problem.mask
    if mask is None or problem.bias is not None or not problem.queries or not has_spans(mask, problem):
        return problem
    columns, first = attended_columns(problem), first_key_position(problem)
    return replace(
        problem,
        pairs=replace(problem.pairs, key=problem.pairs.key[..., columns, :]),
        value=problem.value[..., columns, :],
        query_positions=query_range(problem),
        key_positions=range(first + columns.start, first + max(columns.start, columns.stop)),
    )
