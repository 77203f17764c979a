"""The gathered kernel: attention to the keys that `masks.chosen` and `masks.blocks` list, and to no others."""

from __future__ import annotations

from torch import Tensor

from ..backends.base import FlashTiles, GatheredKeys
from ..backends.registry import BACKENDS, is_nan_safe
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..masks.chosen import Chosen
from ..tiles.heads_as_batches import HeadsAsBatches
from ..tiles.key_lists import add_bias_gradient, chosen_keys, key_lists, list_terms
from .base import EVERY_GRADIENT, Cost, FlashWork, Result
from .custom_op import apply_kernel, register
from .planning.unit_costs import OPERATOR, RESULT, bytes_read, heads_per_key, total_width
from .planning.unit_prices import price

PAIR = price("gathered.pair")
BLOCK_PAIR = price("gathered.block_pair")
SHARED_PAIR = price("gathered.shared_pair")
EXTRA = price("gathered.extra")
CALLS = price("gathered.calls")
LONG_BLOCK = 16
"""From so many keys on, a block is read as memory is foreseen to be read."""


class GatheredKernel:
    """Keys and values are read at the listed places, once for all rows that share a list: O(pairs) in time.

    Rows share a list that is given for key heads, or for blocks of queries. Lists of blocks that are whole tiles are
    computed as these, of each head those that it has chosen.
    """

    name = "gathered"

    def __init__(self) -> None:
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Scores that are no dot products, masks without lists, and positions that do not tell the number of a key."""
        reasons = []
        if problem.normalizer is not None:
            reasons.append(f"its code computes softmax attention; this is {problem.normalizer_name}")
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("its code computes dot products; this score is additive")
        if chosen_keys(problem.mask) is None:
            reasons.append("it reads lists of keys: masks.chosen or masks.blocks, alone or joined to others by &")
        elif problem.shift is None or problem.step != 1:
            reasons.append("it reads keys at consecutive positions; these are given as others")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """The listed pairs, each with the numbers of a key and a value; fewer for each row of a list that is shared.

        In tiles the work is that of a flash kernel over so many pairs, which packs each list once.
        """
        lists, (backend, maker) = self._lists(problem), _maker(problem)
        pairs = float(problem.weights_shape[:-1].numel() * lists.indices.shape[-1] * lists.columns)
        rows = lists.rows * (heads_per_key(problem) if self._of_key_heads(problem, lists) else 1)
        width, extras = total_width(problem), sum(each is not None for each in (problem.bias, problem.dropout))
        alone = PAIR if lists.columns < LONG_BLOCK else BLOCK_PAIR
        pair = SHARED_PAIR + (alone - SHARED_PAIR) / max(rows, 1)
        numbers = problem.weights_shape[:-1].numel() * problem.value.shape[-1]
        if maker.in_tiles:
            packed = pairs / max(rows, 1) * width
            return Cost(
                flops=0.0,
                flash={backend: FlashWork(2.0 * pairs * width, pairs, packed=packed)},
                bytes=4.0 * extras * pairs,
                passes=EXTRA * extras * pairs + RESULT * numbers,
                moved=bytes_read(problem),
                calls=OPERATOR + CALLS,
            )
        return Cost(
            flops=0.0,
            bytes=4.0 * extras * pairs,
            passes=(pair * width + EXTRA * extras) * pairs + RESULT * numbers,
            moved=bytes_read(problem),
            calls=OPERATOR + CALLS,
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(_maker(problem)[0])

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        if (folded := _of_tiles(batched)) is not None:
            heads, tiles = folded
            return heads.rows(tiles.forward(heads.batched))
        lists = key_lists(batched)
        return _maker(batched.problem)[1].forward(batched, lists, list_terms(batched, lists))

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        if (folded := _of_tiles(batched)) is not None:
            heads, tiles = folded
            return heads.gradients(tiles.backward(heads.batched, heads.saved(saved)))
        lists = key_lists(batched)
        found = _maker(batched.problem)[1].backward(
            batched, saved, lists, list_terms(batched, lists), of_added=saved.needs_bias_grad
        )
        into = batched.zero_bias_gradients() if saved.needs_bias_grad else ()
        if found.added is not None:
            add_bias_gradient(batched, lists, found.added, into)
        return ProblemGradients(found.query, found.key, found.value, bias=into)

    @staticmethod
    def _lists(problem: Problem) -> Chosen:
        found = chosen_keys(problem.mask)
        if found is None:
            raise AssertionError("the cost of a mask without lists")
        return found[0]

    @staticmethod
    def _of_key_heads(problem: Problem, lists: Chosen) -> bool:
        """Whether the query heads of a group have the same lists."""
        heads = lists.indices.shape[-3] if lists.indices.ndim > 2 else 1
        return problem.heads and (heads == 1 or heads != problem.weights_shape[-3])


def _of_tiles(batched: BatchedProblem) -> tuple[HeadsAsBatches, FlashTiles] | None:
    """Blocks that are whole tiles, head by head, and who computes tiles of them; None where nobody does."""
    flash = next((each.flash for each in BACKENDS if each.flash is not None and each.runs(batched.value)), None)
    heads = None if flash is None else HeadsAsBatches.from_problem(batched)
    if flash is None or heads is None or flash.why_not(heads.batched.problem):
        return None
    return heads, flash


def _maker(problem: Problem) -> tuple[str, GatheredKeys]:
    """Who gathers the keys of a problem: the backend's name and its methods."""
    makers = ((each.name, each.gathered) for each in BACKENDS if each.runs(problem.value))
    return next((name, keys) for name, keys in makers if keys is not None and not keys.why_not(problem))
