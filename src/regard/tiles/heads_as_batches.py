"""Blocks of keys that differ between heads, as blocks that differ between batches, which have tiles of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from torch import Tensor

from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.score_forms import DotPairs
from ..masks import Mask
from ..masks.base import And
from ..masks.chosen import Chosen
from .key_lists import chosen_keys
from .memo import memoize
from .row_spans import first_key_position
from .tile_bits import BLOCK


@dataclass(frozen=True, eq=False, slots=True)
class HeadsAsBatches:
    """A problem whose batches are the heads that have lists, each with the query heads of its group.

    batched: with query (B · lists, group, M, D), key and value (B · lists, 1, N, ·). whole: what it was made of.
    """

    batched: BatchedProblem
    whole: BatchedProblem

    @classmethod
    def from_problem(cls, whole: BatchedProblem) -> HeadsAsBatches | None:
        """The problem of a mask whose blocks are whole tiles, joined to others that are the same for all; else None."""
        problem, pairs = whole.problem, whole.pairs
        if problem.bias is not None or not isinstance(pairs, DotPairs) or not problem.queries or not problem.keys:
            return None
        mask = memoize(problem, "heads as batches", lambda: _mask(whole))
        if mask is None:
            return None
        batches, heads, queries, dim = pairs.query.shape
        lists = _list_heads(whole, mask)
        own = [pairs.key, whole.value]
        if lists != pairs.key.shape[1]:
            own = [tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in own]
        key, value = (tensor.reshape(batches * lists, 1, *tensor.shape[2:]) for tensor in own)
        query = pairs.query.reshape(batches * lists, heads // lists, queries, dim)
        folded = replace(problem, pairs=DotPairs(query, key, pairs.scale), value=value, mask=mask)
        return cls(BatchedProblem.from_problem(folded), whole)

    def saved(self, saved: Saved) -> Saved:
        """The same of the folded problem."""
        shape = self.batched.shape[:2]
        output, lse, grad_output, grad_lse = (
            tensor.reshape(*shape, *tensor.shape[2:])
            for tensor in (saved.output, saved.lse, saved.grad_output, saved.grad_lse)
        )
        return Saved(output, lse, grad_output, grad_lse)

    def rows(self, rows: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp with the heads of the whole."""
        output, lse = (tensor.reshape(*self.whole.shape[:2], *tensor.shape[2:]) for tensor in rows)
        return output, lse

    def gradients(self, found: ProblemGradients) -> ProblemGradients:
        """Those of the whole: of a key and a value the sum over the heads of its group."""
        batches, heads, *_ = self.whole.shape
        key_heads = self.whole.pairs.key.shape[1]

        def per_key_head(gradient: Tensor) -> Tensor:
            gradient = gradient.reshape(batches, -1, *gradient.shape[2:])
            return gradient if gradient.shape[1] == key_heads else gradient.unflatten(1, (key_heads, -1)).sum(2)

        query = found.query.reshape(batches, heads, *found.query.shape[2:])
        return ProblemGradients(query, per_key_head(found.key), per_key_head(found.value))


def _list_heads(whole: BatchedProblem, mask: Mask) -> int:
    found = chosen_keys(mask)
    return 0 if found is None else found[0].indices.shape[0] // max(whole.shape[0], 1)


def _mask(whole: BatchedProblem) -> Mask | None:
    """The mask with its lists (B · lists, 1, ·, K); None where other masks differ, or blocks are no whole tiles."""
    found = chosen_keys(whole.problem.mask)
    if found is None:
        return None
    chosen, others = found
    if any(size % BLOCK for size in (chosen.rows, chosen.columns, first_key_position(whole.problem))):
        return None
    one = whole.grid.tile(slice(0, 1), slice(0, 1))
    if not all(other.is_of_library and other.evaluate(one).shape[:-2].numel() == 1 for other in others):
        return None
    indices = whole.as_4d(chosen.lists_of(whole.problem.queries))
    batches, heads, *_ = whole.shape
    lists = heads if indices.shape[1] == heads else whole.pairs.key.shape[1]
    indices = indices.expand(batches, lists, -1, -1).reshape(batches * lists, 1, *indices.shape[2:])
    return reduce(And, (Chosen(indices.contiguous(), chosen.rows, chosen.columns, chosen.largest), *others))
