"""Masks of which each row is one span of keys: the first key and the one after the last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ..core.problem import Problem
from ..core.tensor_memo import copy_on
from ..masks import Mask
from ..masks.base import And
from ..masks.key_spans import Limit, earliest, latest
from ..masks.padding import Padding
from ..utils.pytree import tree_tensors
from .dense_mask import is_one_causal_query
from .memo import memoize


def has_spans(mask: Mask, problem: Problem) -> bool:
    """Whether each row of a mask is a span of keys that its symbols tell, over consecutive positions."""
    if problem.shift is None or problem.step != 1:
        return False
    if isinstance(mask, And):
        return has_spans(mask.left, problem) and has_spans(mask.right, problem)
    if isinstance(mask, Padding):
        lengths, batch = mask.lengths.shape, problem.batch
        return len(lengths) <= len(batch) and all(
            size in (1, own) for size, own in zip(reversed(lengths), reversed(batch), strict=False)
        )
    return mask.key_span() is not None


CPU = torch.device("cpu")
UNLIMITED = 2**62
"""More keys than there are positions."""


def last_keys(mask: Mask) -> int | None:
    """How many keys a query attends to, its own and those before it, under a mask that leaves it these for certain.

    A mask by distance, whose rows are spans, says the same of each position. None of any other mask.

    >>> from regard import masks
    >>> last_keys(masks.causal() & masks.window(before=8)), last_keys(masks.prefix(3))
    (9, None)
    """
    if isinstance(mask, And):
        counts = last_keys(mask.left), last_keys(mask.right)
        return None if counts[0] is None or counts[1] is None else min(counts[0], counts[1])
    if not mask.by_distance or (span := mask.key_span()) is None:
        return None
    start, stop = span(range(1))
    if stop is not None and int(stop) < 1:  # not even its own
        return None
    return UNLIMITED if start is None else max(1 - int(start), 0)


def last_keys_of_step(problem: Problem) -> int | None:
    """`last_keys` of a problem of one query, at the position of the last key; None of any other, and without a mask."""
    if problem.mask is None or problem.queries != 1 or problem.shift != 0:
        return None
    return last_keys(problem.mask)


def over_last_keys(problem: Problem, most: int) -> Problem:
    """The problem of one query, at the position of the last key, over so many last keys, all of which it attends to."""
    first = max(problem.keys - most, 0)
    pairs = replace(problem.pairs, key=problem.pairs.key[..., first:, :])
    return replace(problem, pairs=pairs, value=problem.value[..., first:, :], mask=None, key_positions=None)


def key_spans(problem: Problem, device: torch.device = CPU) -> Tensor | None:
    """The first key that each row attends to, and the one after its last, (B or 1, M, 2) int32; None for all keys.

    None as well where rows are no spans. Made on `device`: nothing is read back from it.
    """
    mask = problem.mask
    if mask is None or is_one_causal_query(problem) or not has_spans(mask, problem):
        return None
    return memoize(problem, ("spans", device), lambda: _key_spans(mask, problem, device))


def device_spans(problem: Problem) -> Tensor | None:
    """`key_spans` on the device of the problem's tensors."""
    return key_spans(problem, problem.value.device)


def _key_spans(mask: Mask, problem: Problem, device: torch.device) -> Tensor:
    """Positions as numbers of keys: the M queries come last, unless they have positions of their own."""
    first_key = first_key_position(problem)
    with torch.inference_mode(False):
        start, stop = _bounds(mask, problem, device)
        batches = (limit.shape[0] for limit in (start, stop) if isinstance(limit, Tensor) and limit.ndim > 1)
        batch = next((size for size in batches if size != 1), 1)
        spans = torch.empty((batch, problem.queries, 2), dtype=torch.int32, device=device)
        for side, limit in enumerate((start, stop)):
            if isinstance(limit, Tensor):
                spans[..., side] = (limit - first_key if first_key else limit).clamp(0, problem.keys)
            else:
                spans[..., side] = min(max(limit - first_key, 0), problem.keys)
    return spans


def attended_columns(problem: Problem) -> slice:
    """The keys from the first to the last that any row of a mask that `has_spans` attends to, and no fewer."""
    if problem.mask is None:
        return slice(0, problem.keys)
    first_key, (start, stop) = first_key_position(problem), _bounds(problem.mask, problem)
    first = int(start.min()) if isinstance(start, Tensor) else start
    last = int(stop.max()) if isinstance(stop, Tensor) else stop
    return slice(min(max(first - first_key, 0), problem.keys), max(min(last - first_key, problem.keys), 0))


def first_key_position(problem: Problem) -> int:
    """The position of the first key, of consecutive ones."""
    return problem.key_positions.start if isinstance(problem.key_positions, range) else 0


def query_range(problem: Problem) -> range:
    """The positions of the queries, of consecutive ones."""
    first = first_key_position(problem) + problem.keys - problem.queries - (problem.shift or 0)
    return range(first, first + problem.queries)


def _bounds(mask: Mask, problem: Problem, device: torch.device = CPU) -> tuple[Tensor | int, Tensor | int]:
    """The first key position of each row and the one after its last, of all masks that are joined; on `device`."""
    first_key = first_key_position(problem)
    limits = list(_limits(mask, problem, query_range(problem), device))
    start = latest(first_key, [start for start, _ in limits])
    return start, earliest(first_key + problem.keys, [stop for _, stop in limits])


def _limits(mask: Mask, problem: Problem, queries: range, device: torch.device) -> Iterator[tuple[Limit, Limit]]:
    """The first key position of each row and the one after its last, (M,) or (B, 1), of each mask that is joined."""
    if isinstance(mask, And):
        yield from _limits(mask.left, problem, queries, device)
        yield from _limits(mask.right, problem, queries, device)
    elif isinstance(mask, Padding):
        lengths = copy_on(mask.lengths, device)
        yield None, lengths.long().expand(problem.batch).reshape(-1, 1) if lengths.ndim else lengths
    else:
        if tree_tensors(mask):  # of positions: raises what the mask's formula would where it has none for some of them
            grid = problem.grid()
            mask.evaluate(grid.tile(slice(0, problem.queries), slice(0, 1)))
            mask.evaluate(grid.tile(slice(0, 1), slice(0, problem.keys)))
        span = mask.key_span()
        if span is None:
            raise AssertionError(f"{mask!r} was taken for one whose rows are spans")
        start, stop = (
            limit.to(device, non_blocking=True) if isinstance(limit, Tensor) else limit for limit in span(queries)
        )
        yield start, stop
