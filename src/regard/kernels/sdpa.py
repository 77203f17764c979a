"""The sdpa kernel: torch's own operator, for problems that it supports."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..backends.torch.dense_block import EXPONENTIAL, LONG_ROW, NARROW, Rectangle, without_single_row
from ..core.batched_problem import BatchedProblem, ProblemGradients, Saved, separate_rows
from ..core.finite import all_finite, waits
from ..core.problem import Problem
from ..core.score_forms import DotPairs
from ..core.torch_modes import functorch_active, maps_nothing, under_transform
from ..tiles.dense_mask import dense_mask, dense_mask_added, is_one_causal_query, is_square_causal
from ..tiles.mask_tiles import count_visited_pairs, distinct_matrices
from .base import Cost, Result
from .custom_op import apply_kernel, register
from .nan_safety import run_nan_safe
from .planning.unit_costs import (
    MASK,
    WEIGHTS,
    bias_passes,
    bytes_read,
    evaluated,
    heads_per_key,
    torch_flash_cost,
    torch_flash_work,
)
from .planning.unit_prices import price

BIAS_CALLS = price("sdpa.bias_calls")
BIAS_GRADIENT = price("sdpa.bias_gradient")


class SdpaKernel:
    """`torch.nn.functional.scaled_dot_product_attention`, with NaN safety and a differentiable gradient on the CPU."""

    name = "sdpa"
    exponential = EXPONENTIAL

    def __init__(self) -> None:
        register(self, exact_lse=True)

    def why_not(self, problem: Problem) -> list[str]:
        """Features that torch's operator does not support."""
        reasons = []
        if not isinstance(problem.pairs, DotPairs):
            reasons.append("torch's operator computes dot products; this score is additive")
        if problem.wants_lse:
            reasons.append("torch's operator returns no log-sum-exp")
        if problem.softcap is not None:
            reasons.append("torch's operator has no softcap")
        if problem.sinks is not None:
            reasons.append("torch's operator has no sinks")
        if problem.dropout is not None:
            reasons.append("torch's operator drops weights by a pattern of its own, with all of them in memory")
        if problem.mask is not None and under_transform():
            reasons.append("under a transform of torch's NaN behind the mask cannot be detected")
        return reasons

    def cost(self, problem: Problem) -> Cost:
        """All pairs; any mask but a causal one of as many queries as keys or of one, and any bias, is a dense tensor.

        Where torch's fast path refuses, it takes the formula's, with all weights in memory.
        """
        pairs = problem.weights_shape.numel()
        causal, refusal = is_square_causal(problem) or is_one_causal_query(problem), _slow_path(problem)
        masks, biases = (0, 0) if causal else distinct_matrices(problem)
        one, size = problem.queries * problem.keys, problem.value.element_size()
        flash = torch_flash_cost(problem, causal=causal)
        if problem.queries == 1 and problem.keys > LONG_ROW and (group := heads_per_key(problem)) > 1:
            work = torch_flash_work(problem, pairs, group)  # as `Rectangle` computes a long row
            flash = replace(flash, flash={"torch": work}, moved=bytes_read(problem))
        return replace(
            flash,
            bytes=flash.bytes + one * (9.0 * masks + 2.0 * size * biases) + 3.0 * size * pairs * bool(refusal),
            passes=flash.passes
            + WEIGHTS * pairs * bool(refusal)
            + evaluated(problem, one * (MASK * masks + bias_passes(problem) * biases)),
            calls=10.0 + 10.0 * bool(masks) + BIAS_CALLS * bool(biases) + 10.0 * bool(refusal),
            gradient=flash.gradient + BIAS_GRADIENT * bool(biases),
            note=refusal or _waste(problem, causal),
        )

    def gradients(self, problem: Problem) -> frozenset[str]:
        """None of its own unless asked for by name: torch differentiates its operator."""
        return frozenset()

    def run(self, problem: Problem) -> Result:
        """The output; on the CPU, where torch's gradient has no derivative, with the gradient of `custom_op`."""
        pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `why_not` refuses other forms
        query, key, value = pairs.query, pairs.key, problem.value
        if _is_bare(problem) and (problem.keys >= NARROW or all_finite(query, key)):
            query, scale, grouped = separate_rows(query), pairs.scale, query.shape[1] != key.shape[1]
            output = scaled_dot_product_attention(query, key, value, None, 0.0, False, scale=scale, enable_gqa=grouped)
            return Result(output)
        if _by_operator(problem) or (functorch_active() and any(map(maps_nothing, (query, key, value)))):
            return apply_kernel(problem, self)
        if problem.mask is not None and is_one_causal_query(problem):
            problem = replace(problem, mask=None)
        # An exported program is for all lengths: it compares none. NaN is lost over few keys on the CPU alone.
        propagates_nan = not torch.compiler.is_exporting() and (waits(value) or problem.keys >= NARROW)
        return run_nan_safe(problem, _attend, propagates_nan=propagates_nan)

    def forward(self, batched: BatchedProblem) -> tuple[Tensor, Tensor]:
        """Output and log-sum-exp of a batched problem: one rectangle."""
        return _rectangle(batched).forward()

    def backward(self, batched: BatchedProblem, saved: Saved) -> ProblemGradients:
        """The gradients of a batched problem: those of one rectangle."""
        gradients = _rectangle(batched).backward(
            saved.output, saved.lse, saved.grad_output, saved.grad_lse, has_lse_grad=saved.has_lse_grad
        )
        return ProblemGradients(*gradients)


def _is_bare(problem: Problem) -> bool:
    """Whether the output is that of one call of torch's operator, whose NaN needs no care: as few steps as can be."""
    value = problem.value
    return (
        (problem.mask is None or is_one_causal_query(problem))
        and problem.bias is None
        and value.ndim == 4
        and value.dtype is torch.float32
        and 0 < value.shape[2] <= LONG_ROW
        and problem.pairs.query.shape[0] == problem.pairs.key.shape[0] == value.shape[0]
        and value.is_cpu
        and not under_transform()
        and not problem.inputs_require_grad()
        and not torch.is_autocast_enabled("cpu")
    )


def _by_operator(problem: Problem) -> bool:
    """Whether `custom_op` replaces torch's gradient; not for the gradient of a bias, which stores all weights."""
    return (
        problem.inputs_require_grad()
        and not problem.bias_requires_grad()
        and problem.value.is_cpu
        and not under_transform()
    )


def _rectangle(batched: BatchedProblem) -> Rectangle:
    pairs = cast(DotPairs, batched.pairs)
    causal = is_square_causal(batched.problem)
    added = None if causal else _added(batched)
    return Rectangle(pairs.query, pairs.key, batched.value, pairs.scale, added, causal)


def _added(batched: BatchedProblem) -> Tensor | None:
    """Mask and bias of all pairs as one additive mask, in float32 at least; None for neither."""
    problem = batched.problem
    if problem.bias is None and (added := dense_mask_added(problem)) is not None:
        added = batched.as_4d(added)
        return added.expand(*added.shape[:2], problem.queries, problem.keys)
    return batched.added(slice(0, problem.queries), slice(0, problem.keys))


def _attend(problem: Problem) -> Result:
    pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `why_not` refuses other forms
    query, key, value = pairs.query, pairs.key, problem.value
    if query.shape[-2] == 1 and key.shape[-2] > LONG_ROW and not under_transform() and not problem.requires_grad():
        batched = BatchedProblem.from_problem(problem)
        return Result(batched.unflatten_batch(_rectangle(batched).forward()[0]).to(value.dtype))
    causal = problem.mask is not None and is_square_causal(problem)
    attn_mask = None if causal or (problem.mask is None and problem.bias is None) else _attn_mask(problem)
    grouped = value.ndim >= 4 and key.shape[-3] != query.shape[-3]
    batched = None
    if value.ndim != 4:
        batched = BatchedProblem.from_problem(problem)
        query, key, value = batched.pairs.query, batched.pairs.key, batched.value
        attn_mask = None if attn_mask is None else batched.as_4d(attn_mask)
    else:
        query, key, value = separate_rows(query), separate_rows(key), separate_rows(value)
        if attn_mask is not None and attn_mask.ndim == 3:  # with which torch would compute all weights
            attn_mask = attn_mask.unsqueeze(0)
    rows, query = query.shape[-2], without_single_row(query)
    output = scaled_dot_product_attention(
        query, key, value, attn_mask, 0.0, causal, scale=pairs.scale, enable_gqa=grouped
    )
    output = output if query.shape[-2] == rows else output[..., :rows, :]
    return Result(output if batched is None else batched.unflatten_batch(output))


def _slow_path(problem: Problem) -> str:
    """Reason why torch would use the formula with all weights in memory; empty if it uses a fast kernel."""
    if problem.bias_requires_grad():
        return "torch keeps all weights in memory for the gradient of a bias"
    if problem.pairs.query.shape[-1] != problem.value.shape[-1]:
        return "torch keeps all weights in memory where key and value dims differ"
    return ""


def _waste(problem: Problem, causal: bool) -> str:
    """The note that most computed pairs are masked; empty without a mask."""
    if problem.mask is None or causal:
        return ""
    kept = count_visited_pairs(problem) / max(problem.batch.numel() * problem.queries * problem.keys, 1)
    return f"the mask keeps {kept:.0%} of {problem.queries:,} × {problem.keys:,} pairs, and this would compute all"


def _attn_mask(problem: Problem) -> Tensor | None:
    """Mask and bias as torch's attn_mask: bool, or numbers with -inf where masked."""
    keep, bias = dense_mask(problem), problem.bias_values()
    if bias is None:
        return keep
    bias = bias.to(problem.value.dtype)
    return bias if keep is None else torch.where(keep, bias, float("-inf"))
