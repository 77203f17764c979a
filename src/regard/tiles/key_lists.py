"""The keys that a mask lists: `masks.chosen` or `masks.blocks`, alone or joined by `&` with other masks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import reduce
from typing import NamedTuple

import torch
from torch import Tensor

from ..biases import RelativeBias
from ..biases.base import add_gradients, leaves
from ..core.batched_problem import BatchedProblem
from ..core.broadcasting import broadcast_shapes
from ..core.grid import WHOLE, Grid
from ..core.problem import Problem
from ..masks import Mask
from ..masks.base import And
from ..masks.chosen import NONE, Chosen, without_duplicates
from .diagonals import bias_along
from .memo import memoize
from .row_spans import device_spans, first_key_position, has_spans

EVALUATED_PAIRS = 2**22
"""The most pairs of the weights of which a mask or a bias has values at once, before those of the lists are taken."""


@dataclass(frozen=True, eq=False, slots=True)
class KeyLists:
    """For each block of queries the keys that it attends to, as far as `spans` have them.

    Shapes: indices (B or 1, heads, ⌈M / rows⌉, K) int32, contiguous, heads 1, Hk or H: numbers of blocks of `columns`
    keys, with duplicates; a block below 0 is none, and keys from N on are none. first: what is subtracted from an
    index times `columns` for the number of the first key of the block. spans: (B or 1, M, 2) int32, as of `key_spans`;
    None for all keys. largest: no index is above it; None: not known.
    """

    indices: Tensor
    rows: int
    columns: int
    first: int
    spans: Tensor | None
    largest: int | None

    @property
    def length(self) -> int:
        """The number of keys of a list, those that are none among them."""
        return self.indices.shape[-1] * self.columns

    def numbers(self, keys: int) -> Tensor:
        """The numbers of the listed keys, (B or 1, heads, ⌈M / rows⌉, length) int64, duplicates too; none is `NONE`."""
        return self._numbers(self.indices, keys)

    def distinct_numbers(self, keys: int) -> Tensor:
        """The same with `NONE` in place of all but one of those that are the same."""
        return self._numbers(without_duplicates(self.indices, self.largest), keys)

    def _numbers(self, indices: Tensor, keys: int) -> Tensor:
        starts = (indices.long() * self.columns - self.first).unsqueeze(-1)
        numbers = starts + torch.arange(self.columns, device=indices.device)
        none = (indices < 0).unsqueeze(-1) | (numbers < 0) | (numbers >= keys)
        return numbers.masked_fill(none, NONE).flatten(-2)

    def per_query(self, listed: Tensor, batched: BatchedProblem) -> Tensor:
        """A tensor over the lists, (B or 1, heads, ⌈M / rows⌉, ·), as one over all queries, (B or 1, H or 1, M, ·)."""
        _, heads, queries, _ = batched.shape
        if listed.shape[1] not in (1, heads):
            listed = listed.repeat_interleave(heads // listed.shape[1], 1)
        if listed.shape[2] != queries:
            listed = listed.repeat_interleave(self.rows, 2)[:, :, :queries]
        return listed


class ListTerms(NamedTuple):
    """What is added to the scores of listed pairs, and factors of their weights.

    Shapes: (B or 1, H or 1, M, length), float32 at least; added is -inf where there is no pair, and a factor is 0 where
    the weight is dropped, else 1 / (1 - probability). None for neither.
    """

    added: Tensor | None
    factors: Tensor | None


class ListGradients(NamedTuple):
    """Gradients of query, key and value in float32 at least, and that of what is added, (B, H, M, length)."""

    query: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None = None


def chosen_keys(mask: Mask | None) -> tuple[Chosen, tuple[Mask, ...]] | None:
    """The shortest lists of a mask, and the other masks that `&` joins to it; None where it has none."""
    joined = _joined(mask) if mask is not None else ()
    lists = [each for each in joined if isinstance(each, Chosen)]
    if not lists:
        return None
    shortest = lists[0]
    for each in lists:  # torch.compile does not trace min with a key
        if each.indices.shape[-1] * each.columns < shortest.indices.shape[-1] * shortest.columns:
            shortest = each
    return shortest, tuple(each for each in joined if each is not shortest)


def _joined(mask: Mask) -> tuple[Mask, ...]:
    return (*_joined(mask.left), *_joined(mask.right)) if isinstance(mask, And) else (mask,)


def key_lists(batched: BatchedProblem) -> KeyLists:
    """The lists of a problem whose mask has some.

    Raises:
        MaskError: the mask does not fit the problem.
    """
    problem = batched.problem
    problem.keep(batched.grid.tile(slice(0, 1), slice(0, 1)))  # says so if it does not fit
    chosen, others = _parted(problem)
    indices = batched.as_4d(chosen.lists_of(problem.queries).to(batched.value.device)).contiguous()
    rows = chosen.rows if indices.shape[2] != 1 else max(problem.queries, 1)
    inside, _ = _spans_and_others(problem, others)
    spans = None if inside is None else device_spans(replace(problem, mask=inside))
    return KeyLists(indices, rows, chosen.columns, first_key_position(problem), spans, chosen.largest)


def list_terms(batched: BatchedProblem, lists: KeyLists) -> ListTerms:
    """Bias, dropout and the masks that are no spans, at the listed pairs."""
    problem = batched.problem
    dtype = torch.promote_types(batched.value.dtype, torch.float32)
    _, outside = _spans_and_others(problem, _parted(problem)[1])
    nothing = outside is None and problem.bias is None and problem.dropout is None
    if nothing or not problem.keys:
        return ListTerms(None, None)
    numbers = lists.per_query(lists.numbers(problem.keys), batched)
    added = None if problem.bias is None else _bias_at(batched, numbers).to(dtype)
    if outside is not None:
        keep = memoize(problem, "listed", lambda: _kept_at(batched, outside, numbers))
        added = torch.where(
            keep, torch.zeros((), dtype=dtype, device=keep.device) if added is None else added, -torch.inf
        )
    factors = None
    if (dropout := problem.dropout) is not None:
        kept = dropout.listed_mask(*problem.dropout_indices(batched.grid, batched.batch), numbers.clamp(min=0))
        factors = kept.to(dtype) / (1 - dropout.probability)
    return ListTerms(added, factors)


def add_bias_gradient(batched: BatchedProblem, lists: KeyLists, upstream: Tensor, into: tuple[Tensor, ...]) -> None:
    """Add the gradient of a bias, from that of its values at the listed pairs, (B, H, M, length)."""
    bias = batched.problem.bias
    if bias is None or not batched.problem.keys:
        return
    numbers = lists.per_query(lists.numbers(batched.problem.keys), batched)
    with torch.enable_grad():
        parameters = leaves(bias, into)
        problem = replace(batched.problem, bias=bias.with_parameters(parameters))
        values = _bias_at(replace(batched, problem=problem), numbers)
    add_gradients(values, upstream.sum_to_size(values.shape), parameters, into)


def _parted(problem: Problem) -> tuple[Chosen, tuple[Mask, ...]]:
    found = chosen_keys(problem.mask)
    if found is None:
        raise AssertionError("a mask without lists was taken for one with lists")
    return found


def _spans_and_others(problem: Problem, masks: tuple[Mask, ...]) -> tuple[Mask | None, Mask | None]:
    """Masks joined by `&`: those of which each row is a span of keys, and all others; None for none."""
    spans = [mask for mask in masks if has_spans(mask, problem)]
    others = [mask for mask in masks if mask not in spans]
    inside, outside = (reduce(And, some) if some else None for some in (spans, others))
    return inside, outside


def _kept_at(batched: BatchedProblem, mask: Mask, numbers: Tensor) -> Tensor:
    problem = replace(batched.problem, mask=mask)
    whole = replace(batched, problem=problem)

    def keep(tile: Grid) -> Tensor:
        kept = problem.keep(tile)
        return torch.ones(1, 1, 1, 1, dtype=torch.bool) if kept is None else whole.as_4d(kept)

    return _at_listed(batched, numbers, keep)


def _bias_at(batched: BatchedProblem, numbers: Tensor) -> Tensor:
    """The bias at the listed pairs, (B or 1, H or 1, M, length): of one by distance the number of the distance."""
    problem, (_, _, queries, keys) = batched.problem, batched.shape
    bias = problem.bias
    if not isinstance(bias, RelativeBias) or not queries or not keys:
        return _at_listed(batched, numbers, lambda tile: batched.as_4d(problem.bias_values(tile)))  # type: ignore[arg-type]
    line = bias_along(problem, bias)  # (1 or H, M + N - 1), from the last query's first key on
    rows = torch.arange(queries - 1, -1, -1, device=numbers.device)[:, None]
    at = (numbers.clamp(min=0) + rows).transpose(0, 1)  # heads first, as a gradient adds to each head's own line
    heads = max(len(line), len(at))
    values = line.expand(heads, -1).gather(-1, at.expand(heads, -1, -1, -1).flatten(1))
    return values.view(heads, *at.shape[1:]).transpose(0, 1)


def _at_listed(batched: BatchedProblem, numbers: Tensor, evaluate: Callable[[Grid], Tensor]) -> Tensor:
    """Values of pairs, (B or 1, H or 1, m, n or 1) of a tile, at those that are listed; some rows at a time."""
    _, _, queries, keys = batched.shape
    if not keys or not numbers.numel():
        return torch.zeros(numbers.shape, dtype=torch.bool, device=numbers.device)
    found, at = [], numbers.clamp(min=0)
    several = evaluate(batched.grid.tile(slice(0, 1), WHOLE)).shape[:2].numel()
    height = max(EVALUATED_PAIRS // (several * keys), 1)
    for start in range(0, queries, height):
        rows = slice(start, min(start + height, queries))
        values, here = evaluate(batched.grid.tile(rows, WHOLE)), at[:, :, rows]
        leading = broadcast_shapes(values.shape[:2], here.shape[:2])
        values = values.expand(*leading, here.shape[2], keys)
        found.append(values.gather(-1, here.expand(*leading, -1, -1)))
    return found[0] if len(found) == 1 else torch.cat(found, 2)
