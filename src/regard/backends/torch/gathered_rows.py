"""Attention to listed keys by torch's operators: keys and values are gathered for some lists at a time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ...core.batched_problem import BatchedProblem, Saved
from ...core.problem import Problem
from ...core.score_forms import DotPairs, at_least_float32
from ...masks.chosen import NONE
from ...tiles.key_lists import KeyLists, ListGradients, ListTerms

NUMBERS_AT_ONCE = 2**20
"""The most numbers of gathered keys and values, and of scores, that are in memory at once."""
MOST_ROWS = 64
"""The most queries of a product; a list of more is gathered several times."""


class GatheredByTorch:
    """`index_select` and `bmm` over blocks of lists; heads and queries that share a list are rows of one product."""

    in_tiles = False

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons."""
        return []

    def forward(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> tuple[Tensor, Tensor]:
        """Output (B, H, M, Dv) and log-sum-exp (B, H, M)."""
        gathered = _GatheredLists(batched, lists, terms)
        rows = gathered.query.shape[0]
        output = gathered.query.new_zeros(rows + 1, batched.value.shape[-1])
        lse = gathered.query.new_full((rows + 1,), float("-inf"))
        for part in gathered.parts():
            scores, _ = gathered.scores(part)
            own = scores.logsumexp(-1, keepdim=True)
            weights = torch.exp(scores - own.masked_fill(own == float("-inf"), 0.0))
            if part.factors is not None:
                weights = weights * part.factors
            output[part.into] = torch.bmm(weights, part.value)
            lse[part.into] = own.squeeze(-1)
        shape = batched.shape[:3]
        return output[:-1].unflatten(0, shape), lse[:-1].unflatten(0, shape)

    def backward(
        self, batched: BatchedProblem, saved: Saved, lists: KeyLists, terms: ListTerms, *, of_added: bool
    ) -> ListGradients:
        """The gradients, and that of what is added, (B, H, M, length), if it is asked for."""
        gathered = _GatheredLists(batched, lists, terms)
        above, lse, delta = (
            at_least_float32(tensor).flatten(0, 2) for tensor in (saved.grad_output, saved.lse, saved.delta())
        )
        query, key, value = (torch.zeros_like(t) for t in (gathered.query, gathered.key, gathered.value))
        query = torch.cat([query, query.new_zeros(1, query.shape[-1])])
        added = query.new_zeros(len(query), lists.length) if of_added else None
        for part in gathered.parts():
            scores, slope = gathered.scores(part)
            weights = torch.exp(scores - lse[part.rows].unsqueeze(-1))
            own, factors = above[part.rows], part.factors
            sloped = torch.bmm(own, part.value.mT)
            sloped = weights * ((sloped if factors is None else sloped * factors) - delta[part.rows].unsqueeze(-1))
            if added is not None:
                added[part.into] = sloped
            sloped = sloped * gathered.scale if slope is None else sloped * (slope * gathered.scale)
            weights = weights if factors is None else weights * factors
            query[part.into] = torch.bmm(sloped, part.key)
            columns = part.columns.flatten()
            key.index_add_(0, columns, torch.bmm(sloped.mT, gathered.query[part.rows]).flatten(0, 1))
            value.index_add_(0, columns, torch.bmm(weights.mT, own).flatten(0, 1))
        rows, keys = batched.shape[:3], batched.pairs.key.shape[:3]
        return ListGradients(
            query[:-1].unflatten(0, rows),
            key.unflatten(0, keys),
            value.unflatten(0, keys),
            None if added is None else added[:-1].unflatten(0, rows),
        )


@dataclass(frozen=True, eq=False, slots=True)
class _Part:
    """Some lists, L of them with R rows each, and what they gather.

    Shapes: rows, the number of each row among (B · H · M), some row for one that is none, and into, one more than all
    for those, (L, R); columns, of the listed keys among (B · Hk · N), (L, K); exist, (L, R, K); key and value
    (L, K, ·); added and factors (L, R, K), or None.
    """

    rows: Tensor
    into: Tensor
    columns: Tensor
    exist: Tensor
    key: Tensor
    value: Tensor
    added: Tensor | None
    factors: Tensor | None


class _GatheredLists:
    """The lists of a problem; queries and keys one after the other over batches and heads.

    A list is that of `group` heads and of `rows` queries, in pieces of `height` of them.
    """

    def __init__(self, batched: BatchedProblem, lists: KeyLists, terms: ListTerms) -> None:
        pairs = batched.pairs
        if not isinstance(pairs, DotPairs):
            raise AssertionError("gathered keys of scores that are no dot products")
        self.scale, self.softcap, self.shape = pairs.scale, batched.problem.softcap, batched.shape
        self.query = at_least_float32(pairs.query).flatten(0, 2)
        self.key, self.value = (
            at_least_float32(tensor).contiguous().flatten(0, 2) for tensor in (pairs.key, batched.value)
        )
        self.lists, self.terms, self.key_heads = lists, terms, pairs.key.shape[1]
        self.numbers = lists.distinct_numbers(self.shape[3])
        heads = self.shape[1]
        self.list_heads = heads if lists.indices.shape[1] == heads else self.key_heads
        self.group = heads // max(self.list_heads, 1)
        self.pieces = -(-lists.rows // MOST_ROWS)
        self.height = -(-lists.rows // self.pieces)

    def parts(self) -> Iterator[_Part]:
        """All lists, so many at a time as are to be in memory at once."""
        batches, _, queries, keys = self.shape
        each = self.numbers.shape[-1] * (self.key.shape[-1] + self.value.shape[-1] + 4 * self.group * self.height)
        if not each or not keys or not queries:
            return
        count, most = batches * self.list_heads * self.numbers.shape[2] * self.pieces, max(NUMBERS_AT_ONCE // each, 1)
        for start in range(0, count, most):
            yield self._part(torch.arange(start, min(start + most, count), device=self.query.device))

    def scores(self, part: _Part) -> tuple[Tensor, Tensor | None]:
        """The scores of a part, (L, R, K), -inf where there is no pair, and the slope of a softcap."""
        scores, slope = torch.bmm(self.query[part.rows], part.key.mT) * self.scale, None
        if self.softcap is not None:
            bent = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * bent, 1 - bent * bent
        if part.added is not None:
            scores = scores + part.added
        return scores.masked_fill(~part.exist, float("-inf")), slope

    def _part(self, at: Tensor) -> _Part:
        """The lists of these numbers, counted over batches, heads, blocks of queries and pieces of these."""
        (_, heads, queries, keys), lists, own = self.shape, self.lists, self.numbers
        piece, at = at % self.pieces, at // self.pieces
        block, at = at % own.shape[2], at // own.shape[2]
        head, batch = at % self.list_heads, at // self.list_heads
        numbers = own[_in(batch, own.shape[0]), _in(head, own.shape[1]), block]  # (L, K)
        within = (piece * self.height).unsqueeze(-1) + torch.arange(self.height, device=at.device)  # (L, r)
        query = block.unsqueeze(-1) * lists.rows + within
        there = (within < lists.rows) & (query < queries)
        query = query.clamp(max=queries - 1)
        exist = (numbers != NONE).unsqueeze(1) & there.unsqueeze(-1)  # (L, r, K)
        if lists.spans is not None:
            spans = lists.spans.to(at.device)[_in(batch, len(lists.spans)).unsqueeze(-1), query]
            exist = exist & (numbers.unsqueeze(1) >= spans[..., :1]) & (numbers.unsqueeze(1) < spans[..., 1:])
        of_group = head.unsqueeze(-1) * self.group + torch.arange(self.group, device=at.device)  # (L, group)
        places = batch[:, None, None], of_group.unsqueeze(-1), query.unsqueeze(1)  # (L, group, r)
        rows = ((places[0] * heads + places[1]) * queries + places[2]).flatten(1)
        into = rows.masked_fill(~there.repeat(1, self.group), len(self.query))
        key_head = head * self.key_heads // max(self.list_heads, 1)
        columns = (batch * self.key_heads + key_head).unsqueeze(-1) * keys + numbers.clamp(min=0)
        key, value = (tensor[columns] for tensor in (self.key, self.value))
        added, factors = (None if term is None else _taken(term, *places).flatten(1, 2) for term in self.terms)
        return _Part(rows, into, columns, exist.repeat(1, self.group, 1), key, value, added, factors)


def _in(numbers: Tensor, size: int) -> Tensor:
    """Numbers along an axis; 0 along one of size 1, which all share."""
    return numbers if size != 1 else torch.zeros_like(numbers)


def _taken(term: Tensor, batch: Tensor, head: Tensor, query: Tensor) -> Tensor:
    """Rows of a term (B or 1, H or 1, M, K)."""
    return term[_in(batch, term.shape[0]), _in(head, term.shape[1]), query]
