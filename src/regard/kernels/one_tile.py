"""Calls whose pairs are one tile: all weights at once, and what the gradient needs of them is kept.

For normalizers that can store it. There is no loop over tiles, and nothing is computed again; what is not finite, or is
differentiated twice, goes the way of all kernels.
"""

from __future__ import annotations

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


@dataclass(frozen=True, eq=False, slots=True)
class PreparedTile:
    """What is known of calls with the same shapes, strides, dtype, mask, scale and kind of normalizer.

    kernel: the name of the kernel that computes what these calls do not.
    """

    scale: float
    mask: PairMask | None
    kernel: str

    def run(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Mask | None,
        normalizer: StoredNormalizer,
        *,
        learned: bool,
    ) -> Tensor | None:
        """The output of such a call, differentiable if `learned`; None where something is not finite."""
        if not all_finite(query, key):
            return None
        if learned:
            problem = Problem(DotPairs(query, key, self.scale), value, mask, normalizer=normalizer)
            inputs = (unwrap_if_dead(each) for each in (query, key, value))
            return _apply_tile(self, problem, *inputs, *parameters_of(normalizer))
        output = self.weights(query, key, normalizer)[0] @ value
        return output if all_finite(output) else None

    def weights(self, query: Tensor, key: Tensor, normalizer: StoredNormalizer) -> tuple[Tensor, Stored]:
        """The weights of all pairs, and what their gradient needs."""
        return normalizer.weigh(torch.matmul(query, key.mT).mul_(self.scale), self.mask)


def prepared_tile(problem: Problem, kernel: str) -> PreparedTile | None:
    """What computes a problem and all of its kind at once; None where a tile is not all of it."""
    pairs, value, normalizer = problem.pairs, problem.value, problem.normalizer
    if not is_one_tile(problem) or value.ndim != 4 or pairs.key.shape[:2] != value.shape[:2]:
        return None
    if pairs.query.shape[:2] != value.shape[:2] or value.dtype not in (torch.float32, torch.float64):
        return None
    if problem.queries * problem.keys > MAX_MEMO_PAIRS and problem.mask is not None:
        return None
    mask = None
    with torch.inference_mode(False), torch.no_grad():
        if (keep := dense_mask(problem)) is not None:
            keep = keep[(None,) * (4 - keep.ndim)]
            mask = PairMask.of(cast(StoredNormalizer, normalizer).existing(keep), value.dtype)
    return PreparedTile(cast(DotPairs, pairs).scale, mask, kernel)


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
    """The output of a problem; its tensors with gradients are query, key, value, and parameters of the normalizer."""

    @staticmethod
    def forward(ctx: Any, call: PreparedTile, problem: Problem, *tensors: Tensor) -> Tensor:
        query, key, value, *_ = tensors
        ctx.call, ctx.problem, ctx.inputs = call, problem, len(tensors)
        ctx.state = None if problem.mask is None else remembered_state(problem.mask)
        weights, stored = call.weights(query, key, cast(StoredNormalizer, problem.normalizer))
        output = weights @ value
        ctx.finite = all_finite(output)
        if ctx.finite:
            ctx.save_for_backward(*tensors, weights, *stored)
            return output
        ctx.save_for_backward(*tensors)
        return compute_forward(problem, call.kernel)[0]

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        call, problem, saved = ctx.call, ctx.problem, ctx.saved_tensors
        inputs, needed = saved[: ctx.inputs], ctx.needs_input_grad[2:]
        if ctx.finite and not torch.is_grad_enabled() and not mapped_by_autograd(grad_output):
            found = _gradients(call, problem, saved, ctx.inputs, grad_output)
            wanted = [gradient if need else None for gradient, need in zip(found, needed, strict=True)]
            if all_finite(grad_output) or all_finite(*(each for each in wanted if each is not None)):
                return None, None, *wanted
        if ctx.state is not None and not ctx.state.is_current():
            raise modified(problem.mask)
        return None, None, *_as_others(call.kernel, problem, inputs, needed, grad_output)


_apply_tile = super(torch.autograd.Function, _AttendTile).apply  # pyright: ignore[reportAttributeAccessIssue]
"""`_AttendTile.apply` in fewer steps: callers have excluded transforms of torch.func, for which it would look."""


def _gradients(
    call: PreparedTile, problem: Problem, saved: Sequence[Tensor], inputs: int, grad_output: Tensor
) -> tuple[Tensor, ...]:
    """Those of query, key, value, and the normalizer's parameters."""
    query, key, value = saved[:3]
    weights, *stored = saved[inputs:]
    normalizer = cast(StoredNormalizer, problem.normalizer)
    upstream = grad_output @ value.mT
    of_scores, of_parameters = normalizer.differentiate(tuple(stored), upstream, call.mask)
    of_scores = of_scores.mul_(call.scale)
    return of_scores @ key, of_scores.mT @ query, weights.mT @ grad_output, *of_parameters


def _as_others(
    kernel: str, problem: Problem, inputs: Sequence[Tensor], needed: Sequence[bool], grad_output: Tensor
) -> list[Tensor | None]:
    """The gradients of query, key, value and the normalizer's parameters, as for all kernels."""
    output, lse = compute_forward(problem, kernel)
    tensors = tree_tensors(problem)
    places = [0, 1, 2, *range(len(tensors) - len(inputs) + 3, len(tensors))]  # the normalizer is the last part
    wanted = [False] * len(tensors)
    for place, tensor, need in zip(places, inputs, needed, strict=True):
        tensors[place], wanted[place] = tensor, need
    upstream = grad_output, torch.zeros_like(lse)
    found = differentiate(problem, kernel, tuple(wanted), upstream, (output, lse), tensors)
    return [found[place] for place in places]
