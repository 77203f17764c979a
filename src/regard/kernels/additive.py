"""The additive kernel: attention with scores weight · tanh(q + k), in memory linear in the lengths."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..backends.base import AdditiveTiles, WholeAdditive
from ..backends.registry import BACKENDS, is_nan_safe, reasons_against
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved
from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, PairForm
from ..masks import Mask
from ..tiles.dense_mask import dense_mask
from ..tiles.tile_size import SCORES_PER_TILE
from .base import EVERY_GRADIENT, Cost, Result
from .custom_op import apply_kernel, register
from .one_tile import MOST_PAIRS, PreparedTile
from .planning.unit_costs import WIDEN, add_feature_cost, tilewise_cost, widened_bytes, widened_numbers
from .planning.unit_prices import price

NATIVE_FEATURE = price("additive.native_feature")
LONGEST_MASKED = 128
"""The most keys of a call with a mask that is one tile: of more, what tiles leave out is worth their steps."""


class AdditiveKernel:
    """Online softmax over the scores weight · tanh(q + k), without storing them.

    tanh(x + y) = 1 - 2 / (1 + e^2x · e^2y): the exponentials are taken once for each token, not for each pair. Scores,
    softmax and the sum of values take one pass, and so do the gradients; tile by tile where mask, bias or dropout have
    a number for each pair.
    """

    def __init__(self, tile: int = SCORES_PER_TILE) -> None:
        self.name = "additive" if tile == SCORES_PER_TILE else f"additive({tile})"
        self.tile = tile
        register(self)

    def why_not(self, problem: Problem) -> list[str]:
        """Dot products, and tensors of which no backend computes additive tiles."""
        reasons = []
        if not isinstance(problem.pairs, AdditivePairs):
            reasons.append("its code computes additive scores; this score is a dot product")
        return reasons + reasons_against([each for each in BACKENDS if each.additive is not None], problem.value)

    def cost(self, problem: Problem) -> Cost:
        """The work over the tiles with unmasked pairs, plus a share of a pass for each feature."""
        cost = add_feature_cost(tilewise_cost(problem, self.tile), problem, NATIVE_FEATURE)
        passes = cost.passes - WIDEN * widened_numbers(problem)  # it widens in registers
        return replace(cost, passes=passes, bytes=cost.bytes - widened_bytes(problem))

    def gradients(self, problem: Problem) -> frozenset[str]:
        """Those of all tensors."""
        return EVERY_GRADIENT

    def is_nan_safe(self, problem: Problem, *, backward: bool) -> bool:
        """Whether the backend that computes a problem is."""
        return is_nan_safe(_maker(problem.value)[0])

    def run(self, problem: Problem) -> Result:
        """Output and log-sum-exp."""
        return apply_kernel(problem, self)

    def prepare_call(self, problem: Problem) -> AdditiveTile | None:
        """What computes a problem and all of its kind at once, where its pairs are few; None of others."""
        pairs = problem.pairs
        if not isinstance(pairs, AdditivePairs) or not self.is_one_tile(problem):
            return None
        with torch.inference_mode(False), torch.no_grad():
            keep = dense_mask(problem)
            absent = None if keep is None else torch.zeros(keep.shape).masked_fill_(~keep, -math.inf)
        if absent is not None:
            absent = absent[(None,) * (4 - absent.ndim)].expand(problem.weights_shape)
        whole = _maker(problem.value)[1].prepare_whole(pairs, problem.value, problem.softcap, absent)
        return None if whole is None else AdditiveTile(whole, problem.softcap, _layout_of(pairs), self.name)

    def is_one_tile(self, problem: Problem) -> bool:
        """Whether its code computes a problem, of few pairs on the CPU, with scores, a mask and a softcap alone."""
        query, value = problem.pairs.query, problem.value
        return (
            value.is_cpu
            and isinstance(problem.pairs, AdditivePairs)
            and problem.bias is problem.sinks is problem.dropout is problem.normalizer is None
            and not problem.wants_lse
            and query.ndim == 4
            and problem.pairs.key.shape[:2] == value.shape[:2]
            and query.shape[0] == value.shape[0]
            and 0 < problem.weights_shape.numel() <= MOST_PAIRS
            and (problem.mask is None or problem.keys <= LONGEST_MASKED)
            and not self.why_not(problem)
        )

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem."""
        return _maker(batched.value)[1].forward(batched, self.tile)

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem."""
        return _maker(batched.value)[1].backward(batched, saved, self.tile)


@dataclass(frozen=True, eq=False, slots=True)
class AdditiveTile(PreparedTile):
    """What is known of calls with the same shapes, strides, dtype, mask and softcap.

    form: the layout of projected queries, keys, and of the weight.
    """

    whole: WholeAdditive
    softcap: float | None
    form: tuple[Any, ...]
    kernel: str

    def takes(self, pairs: PairForm) -> TypeGuard[AdditivePairs]:
        """Whether the pair form that a score gives is of these calls."""
        return type(pairs) is AdditivePairs and _layout_of(pairs) == self.form

    def problem(self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None) -> Problem:
        *pairs, value = tensors
        return Problem(AdditivePairs(*pairs), value, mask, softcap=self.softcap)

    def attend(self, tensors: Sequence[Tensor], normalizer: Normalizer | None) -> tuple[Tensor, tuple[Tensor, ...]]:
        *pairs, value = tensors
        output, lse = self.whole.forward(AdditivePairs(*pairs), value)
        return output, (output, lse)

    def differentiate(
        self, tensors: Sequence[Tensor], normalizer: Normalizer | None, stored: Sequence[Tensor], grad_output: Tensor
    ) -> tuple[Tensor, ...]:
        *pairs, value = tensors
        output, lse = stored
        return self.whole.backward(AdditivePairs(*pairs), value, output, lse, grad_output)


def _layout_of(pairs: AdditivePairs) -> tuple[Any, ...]:
    query, key, weight = pairs.query, pairs.key, pairs.weight
    of_query = query.shape, query.stride(), query.dtype, query.device
    return *of_query, key.shape, key.stride(), key.dtype, key.device, weight.shape, weight.dtype, weight.device


def _maker(value: Tensor) -> tuple[str, AdditiveTiles]:
    """Who computes additive scores of this device and dtype over tiles: the backend's name and its methods."""
    return next((each.name, each.additive) for each in BACKENDS if each.additive is not None and each.runs(value))
