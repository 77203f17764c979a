"""Calls whose pairs are one tile: all of them at once, and what the gradient needs is kept.

For normalizers that can store it, and additive scores. There is no loop over tiles, and nothing is planned or checked
again; what is not finite, or is differentiated twice, goes the way of all kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from ..core.finite import all_finite
from ..core.normalizer import Normalizer
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.stored_normalizer import PairMask, Stored, StoredNormalizer
from ..core.torch_modes import mapped_by_autograd, unwrap_if_dead
from ..masks import Mask
from ..tiles.dense_mask import MAX_MEMO_PAIRS, dense_mask
from ..tiles.memo import modified, remembered_state
from ..utils.pytree import tree_tensors
from .custom_op import compute_forward, differentiate

MOST_PAIRS = 2**19
"""The most pairs of all batches and heads that are one tile: some tensors of 2 MiB are kept for the gradient."""


class PreparedTile(ABC):
    """What is known of calls of a kind whose pairs are one tile: how their outputs and gradients are computed.

    The tensors of a call are those of its pair form, the values, and the parameters of its normalizer.

    kernel: the name of the kernel that computes what these calls do not.
    """

    kernel: str

    def run(
        self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None = None, *, learned: bool
    ) -> Tensor | None:
        """The output of such a call, differentiable if `learned`; None where something is not finite."""
        query, key, *_ = tensors
        if not all_finite(query, key):
            return None
        call = self.with_pairs(tensors, mask, normalizer)
        if learned:
            problem = self.problem(tensors, mask, normalizer)
            return _apply_tile(call, problem, *(unwrap_if_dead(each) for each in tensors))
        output, _ = call.attend(tensors, normalizer)
        return output if all_finite(output) else None

    def with_pairs(self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None) -> PreparedTile:
        """This, or what computes the call with the pairs of its mask where these are too many to be kept."""
        return self

    @abstractmethod
    def problem(self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None) -> Problem:
        """The problem that a call is, as all kernels compute it."""

    @abstractmethod
    def attend(self, tensors: Sequence[Tensor], normalizer: Normalizer | None) -> tuple[Tensor, Stored]:
        """The output, and what `differentiate` needs beside the tensors, without autograd."""

    @abstractmethod
    def differentiate(
        self, tensors: Sequence[Tensor], normalizer: Normalizer | None, stored: Stored, grad_output: Tensor
    ) -> tuple[Tensor, ...]:
        """The gradient of each of the tensors."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredTile(PreparedTile):
    """Dot products, and a normalizer that can store its weights: calls of one scale, mask and kind of normalizer.

    kept: whether `mask` has the pairs that exist; if not, each call finds them.
    """

    scale: float
    mask: PairMask | None
    kernel: str
    kept: bool = True

    def with_pairs(self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None) -> PreparedTile:
        if self.kept:
            return self
        return StoredTile(self.scale, _pair_mask(self.problem(tensors, mask, normalizer)), self.kernel)

    def problem(self, tensors: Sequence[Tensor], mask: Mask | None, normalizer: Normalizer | None) -> Problem:
        query, key, value, *_ = tensors
        return Problem(DotPairs(query, key, self.scale), value, mask, normalizer=normalizer)

    def attend(self, tensors: Sequence[Tensor], normalizer: Normalizer | None) -> tuple[Tensor, Stored]:
        query, key, value, *_ = tensors
        scores = torch.matmul(query, key.mT).mul_(self.scale)
        weights, stored = cast(StoredNormalizer, normalizer).weigh(scores, self.mask)
        return weights @ value, (weights, *stored)

    def differentiate(
        self, tensors: Sequence[Tensor], normalizer: Normalizer | None, stored: Stored, grad_output: Tensor
    ) -> tuple[Tensor, ...]:
        query, key, value, *_ = tensors
        weights, *kept = stored
        upstream = grad_output @ value.mT
        of_scores, of_parameters = cast(StoredNormalizer, normalizer).differentiate(tuple(kept), upstream, self.mask)
        of_scores = of_scores.mul_(self.scale)
        return of_scores @ key, of_scores.mT @ query, weights.mT @ grad_output, *of_parameters


def prepared_tile(problem: Problem, kernel: str) -> StoredTile | None:
    """What computes a problem with a normalizer, and all of its kind, at once; None where a tile is not all of it."""
    pairs, value = problem.pairs, problem.value
    if not is_one_tile(problem) or value.ndim != 4 or pairs.key.shape[:2] != value.shape[:2]:
        return None
    if pairs.query.shape[:2] != value.shape[:2] or value.dtype not in (torch.float32, torch.float64):
        return None
    kept = problem.queries * problem.keys <= MAX_MEMO_PAIRS or problem.mask is None
    return StoredTile(cast(DotPairs, pairs).scale, _pair_mask(problem) if kept else None, kernel, kept)


def _pair_mask(problem: Problem) -> PairMask | None:
    """Which pairs count for the normalizer of a problem; None for all."""
    normalizer = cast(StoredNormalizer, problem.normalizer)
    with torch.inference_mode(False), torch.no_grad():
        if (keep := dense_mask(problem)) is None:
            return None
        keep = keep[(None,) * (4 - keep.ndim)]
        return PairMask.of(normalizer.existing(keep), problem.value.dtype)


def is_one_tile(problem: Problem) -> bool:
    """Whether all pairs of a problem are few, on the CPU, and have nothing but a normalizer that can store them."""
    return (
        isinstance(problem.normalizer, StoredNormalizer)
        and isinstance(problem.pairs, DotPairs)
        and problem.bias is problem.softcap is problem.sinks is problem.dropout is None
        and not problem.wants_lse
        and problem.value.is_cpu
        and 0 < problem.weights_shape.numel() <= MOST_PAIRS
    )


def parameters_of(normalizer: Normalizer) -> tuple[Tensor, ...]:
    """`Normalizer.parameters` of one whose parts are tensors and numbers, in fewer steps."""
    return tuple(part for part in vars(normalizer).values() if isinstance(part, Tensor))


class _AttendTile(torch.autograd.Function):
    """The output of a problem; its tensors with gradients are those of `PreparedTile`."""

    @staticmethod
    def forward(ctx: Any, call: PreparedTile, problem: Problem, *tensors: Tensor) -> Tensor:
        ctx.call, ctx.problem, ctx.inputs = call, problem, len(tensors)
        ctx.state = None if problem.mask is None else remembered_state(problem.mask)
        output, stored = call.attend(tensors, problem.normalizer)
        ctx.finite = all_finite(output)
        if ctx.finite:
            ctx.save_for_backward(*tensors, *stored)
            return output
        ctx.save_for_backward(*tensors)
        return compute_forward(problem, call.kernel)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, problem, saved = ctx.call, ctx.problem, ctx.saved_tensors
        inputs, stored, needed = saved[: ctx.inputs], saved[ctx.inputs :], ctx.needs_input_grad[2:]
        if ctx.finite and not torch.is_grad_enabled() and not mapped_by_autograd(grad_output):
            found = call.differentiate(inputs, problem.normalizer, stored, grad_output)
            wanted = [gradient if need else None for gradient, need in zip(found, needed, strict=True)]
            if all_finite(grad_output) or all_finite(*(each for each in wanted if each is not None)):
                return None, None, *wanted
        if ctx.state is not None and not ctx.state.is_current():
            raise modified(problem.mask)
        return None, None, *_as_others(call.kernel, problem, inputs, needed, grad_output)


_apply_tile = super(torch.autograd.Function, _AttendTile).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_AttendTile.apply` in fewer steps: callers have excluded transforms of torch.func, for which it would look."""


def _as_others(
    kernel: str, problem: Problem, inputs: Sequence[Tensor], needed: Sequence[bool], grad_output: Tensor
) -> list[Tensor | None]:
    """The gradients of the inputs as for all kernels."""
    output, lse = compute_forward(problem, kernel)
    tensors = tree_tensors(problem)
    first = len(tree_tensors(problem.pairs)) + 1
    last = len(inputs) - first  # the normalizer is the last part
    places = [*range(first), *range(len(tensors) - last, len(tensors))]
    wanted = [False] * len(tensors)
    for place, tensor, need in zip(places, inputs, needed, strict=True):
        tensors[place], wanted[place] = tensor, need
    upstream = grad_output, torch.zeros_like(lse)
    found = differentiate(problem, kernel, tuple(wanted), upstream, (output, lse), tensors)
    return [found[place] for place in places]
