"""torch's own fused attention, where the problem is what torch computes."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..masks.causal import Causal
from ..pairs import DotPairs
from ..problem import Problem
from .base import Cost, Result, shielded


class Fused:
    """`torch.nn.functional.scaled_dot_product_attention`, shaped and masked so that the contract holds."""

    name = "fused"

    def why_not(self, problem: Problem) -> list[str]:
        """What torch's operator has no word for."""
        reasons = []
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("torch's operator computes dot products; this score is additive")
        if problem.wants_lse:
            reasons.append("torch's operator returns no log-sum-exp")
        if problem.softcap is not None:
            reasons.append("torch's operator has no softcap")
        if problem.sinks is not None:
            reasons.append("torch's operator has no sinks")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed; a mask or a bias that is more than `causal()` stands in memory as numbers."""
        pairs = problem.weights_shape.numel()
        width = problem.pairs.query.shape[-1] + problem.value.shape[-1]
        dense = (problem.mask is not None and not _is_torch_causal(problem)) or problem.bias is not None
        return Cost(flops=2.0 * pairs * width, bytes=float(pairs * problem.value.element_size() * dense))

    def run(self, problem: Problem) -> Result:
        """The output."""
        return shielded(problem, _attend)


def _attend(problem: Problem) -> Result:
    pairs = cast(DotPairs, problem.pairs)  # `why_not` lets nothing else through
    causal = _is_torch_causal(problem)
    added = None if causal else _attn_mask(problem)
    grouped = problem.heads and pairs.key.shape[-3] != pairs.query.shape[-3]
    options = {"dropout_p": problem.dropout_p, "is_causal": causal, "scale": pairs.scale, "enable_gqa": grouped}
    if problem.value.ndim == 4:
        return Result(scaled_dot_product_attention(pairs.query, pairs.key, problem.value, added, **options))
    output = scaled_dot_product_attention(*_four_dimensional(problem, added), **options)
    return Result(output.reshape(*problem.weights_shape[:-1], output.shape[-1]))


def _is_torch_causal(problem: Problem) -> bool:
    """Whether the mask is what torch calls causal: aligned to the start, which is the end too where M = N."""
    return (
        isinstance(problem.mask, Causal)
        and problem.bias is None
        and problem.queries == problem.keys
        and problem.query_positions is None
        and problem.key_positions is None
    )


def _attn_mask(problem: Problem) -> Tensor | None:
    """Mask and bias as the one tensor that torch takes: bool, or numbers with -inf where nothing is kept."""
    if problem.mask is None and problem.bias is None:
        return None
    grid = problem.grid()
    keep, bias = problem.keep(grid), problem.bias_values(grid)
    if bias is None:
        return keep
    bias = bias.to(problem.value.dtype)
    return bias if keep is None else torch.where(keep, bias, float("-inf"))


def _four_dimensional(problem: Problem, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Any leading dims as one batch axis: (batch, heads, length, dim), the shape that torch's fast kernels take."""
    pairs, shape = problem.pairs, problem.weights_shape
    batch = shape[: -3 if problem.heads else -2]

    def four(tensor: Tensor) -> Tensor:
        if not problem.heads:
            tensor = tensor.unsqueeze(-3)
        return tensor.expand(*batch, *tensor.shape[-3:]).reshape(batch.numel(), *tensor.shape[-3:])

    if added is not None:
        heads = 1 if added.ndim < 3 else added.shape[-3]
        added = four(added.expand(*batch, heads, *added.shape[-2:]) if problem.heads else added.expand(shape))
    return four(pairs.query), four(pairs.key), four(problem.value), added
