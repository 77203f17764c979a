"""The reference kernel: the formula of attention as written, with all weights in memory and autograd's derivatives."""

from __future__ import annotations

from dataclasses import replace

import torch

from ..backends.torch.dense_block import LONG_ROW
from ..core.problem import Problem
from ..core.score_forms import AdditivePairs
from ..tiles.mask_tiles import distinct_matrices
from .base import Cost, Result
from .nan_safety import run_nan_safe
from .planning.unit_costs import (
    CAP,
    DROP,
    FEATURE,
    MASK,
    RESULT,
    SELECT,
    WEIGHTS,
    WIDEN,
    bias_passes,
    bytes_read,
    evaluated,
    heads_per_key,
    product_work,
    result_bytes,
    startup_passes,
    widened_bytes,
    widened_numbers,
)
from .planning.unit_prices import price

INFINITY = float("inf")


def formula(problem: Problem) -> Result:
    """Output = dropout(softmax( softcap(f(Q, K)) + B, where M )) · V and lse = log Σ exp(scores), in float32 at least.

    A row that attends to no key has output 0 and lse -inf; a sink is a logit that takes weight and has no value.
    """
    pairs = problem.pairs
    dtype = torch.promote_types(pairs.query.dtype, torch.float32)
    query, key, value = pairs.query.to(dtype), pairs.key.to(dtype), problem.value.to(dtype)
    # Grouped heads: query head h attends to key head h // group. The heads of a group are rows of their key head.
    grouped = problem.heads and query.shape[-3] != key.shape[-3]
    if grouped:
        group = query.shape[-3] // key.shape[-3]
        groups, rows = (key.shape[-3], group), (group, query.shape[-2])
        query = query.unflatten(-3, groups).flatten(-3, -2)  # [..., Hk, group · M, D]

    if isinstance(pairs, AdditivePairs):
        features = torch.tanh(query.unsqueeze(-2) + key.unsqueeze(-3))  # [..., H, M, N, A]
        scores = features @ pairs.weight.to(dtype)  # [..., H, M, N]
    else:
        scores = (pairs.scale * query) @ key.mT  # type: ignore[union-attr]  # [..., H, M, N], of dot products
    if grouped:
        scores = scores.unflatten(-2, rows).flatten(-4, -3)  # [..., Hk, group · M, N] -> [..., H, M, N]
    if problem.softcap is not None:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)  # [..., H, M, N]
    bias = problem.bias_values()  # [..., H or 1, M or 1, N or 1], or None
    keep = problem.keep()  # likewise; bool, True = attend
    if bias is not None:
        scores = scores + bias  # [..., H, M, N]
    if keep is not None:
        scores = scores.masked_fill(~keep, -INFINITY)  # [..., H, M, N]

    # The sink is one more column, -inf without sinks: empty rows and empty sequences are then no special case.
    sink = scores.new_full((*scores.shape[:-1], 1), -INFINITY)  # [..., H, M, 1]
    if problem.sinks is not None:
        sink = problem.sinks.to(dtype)[:, None, None].expand_as(sink)  # [H, 1, 1] -> [..., H, M, 1]
    logits = torch.cat([scores, sink], dim=-1)  # [..., H, M, N + 1]
    peak = logits.detach().amax(-1, keepdim=True)  # [..., H, M, 1]
    peak = peak.masked_fill(peak == -INFINITY, 0.0)
    exponentials = torch.exp(logits - peak)  # [..., H, M, N + 1]
    total = exponentials.sum(-1, keepdim=True)  # [..., H, M, 1]
    empty = total == 0
    total = total.masked_fill(empty, 1.0)  # neither the quotient nor the gradient of the log divides by 0
    lse = (total.log() + peak).masked_fill(empty, -INFINITY).squeeze(-1)  # [..., H, M]
    weights = (exponentials / total)[..., :-1]  # [..., H, M, N]

    if problem.dropout is not None:
        dropout_mask = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid()))  # [B, H, M, N], 0 or 1
        weights = weights * dropout_mask.view(weights.shape).to(dtype) / (1 - problem.dropout.probability)
    if grouped:
        weights = weights.unflatten(-3, groups).flatten(-3, -2)  # [..., Hk, group · M, N]
    output = weights @ value  # [..., H, M, Dv]
    if grouped:
        output = output.unflatten(-2, rows).flatten(-4, -3)  # [..., Hk, group · M, Dv] -> [..., H, M, Dv]
    return Result(output.to(problem.value.dtype), lse if problem.wants_lse else None)


BACKWARD_STORED = price("reference.backward_stored")


LONG_ROW_WIDENED = price("reference.long_row_widened")


class ReferenceKernel:
    """`formula`, for any score, mask, bias, dtype and derivative."""

    name = "reference"

    def why_not(self, problem: Problem) -> list[str]:
        """No reasons: it computes every problem."""
        return []

    def cost(self, problem: Problem) -> Cost:
        """Every pair is computed and stored several times: scores, masked scores, weights."""
        pairs, features = problem.weights_shape.numel(), problem.pairs.query.shape[-1]
        size = max(problem.value.element_size(), 4)
        masks, biases = distinct_matrices(problem)
        additive = isinstance(problem.pairs, AdditivePairs)
        steps = (masks > 0) + (biases > 0) + 3 * (problem.softcap is not None) + 3 * (problem.dropout is not None)
        evaluations = problem.queries * problem.keys * (MASK * masks + bias_passes(problem) * biases)
        width = problem.value.shape[-1] + features * (not additive)
        rows = heads_per_key(problem) * problem.queries
        flops, streamed = product_work(pairs, rows, width)
        return Cost(
            flops=flops,
            streamed=streamed,
            backward=BACKWARD_STORED,
            bytes=size * pairs * (3.0 + steps / 2 + 2.0 * features * additive)
            + widened_bytes(problem)
            + result_bytes(problem),
            passes=startup_passes(rows, problem.weights_shape[:-1].numel() / max(rows, 1))
            + RESULT * problem.weights_shape[:-1].numel() * width
            + pairs * (WEIGHTS + FEATURE * features * additive)
            + pairs
            * (SELECT * bool(masks) + CAP * (problem.softcap is not None) + DROP * (problem.dropout is not None))
            + evaluated(problem, evaluations, times=1, backward=BACKWARD_STORED)
            + WIDEN * widened_numbers(problem) * (LONG_ROW_WIDENED if _is_long_row(problem) else 1.0),
            moved=bytes_read(problem),
            calls=40.0 + 20.0 * bool(masks) + 10.0 * steps,
            note="it computes all pairs, and keeps them in memory",
        )

    def run(self, problem: Problem) -> Result:
        """The output, and the log-sum-exp if it was requested."""
        return run_nan_safe(problem, _formula_of_one_row if _is_long_row(problem) else formula)


def _is_long_row(problem: Problem) -> bool:
    return problem.queries == 1 and problem.keys > LONG_ROW


def _formula_of_one_row(problem: Problem) -> Result:
    """The formula of a single row, computed twice: alone, torch would sum it one key after another."""
    query, positions = problem.pairs.query, problem.grid().query_positions
    result = formula(
        replace(
            problem,
            pairs=replace(problem.pairs, query=query.expand(*query.shape[:-2], 2, -1)),
            query_positions=positions.expand(*positions.shape[:-1], 2),
        )
    )
    return Result(result.output[..., :1, :], None if result.lse is None else result.lse[..., :1])
