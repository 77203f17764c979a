"""The formula of attention as written, with all weights in memory: its derivatives of any order are autograd's."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from ..core.problem import Problem
from ..core.score_forms import AdditivePairs, DotPairs, at_least_float32, per_head
from .base import Result

INFINITY = float("inf")


def formula(problem: Problem) -> Result:
    """Output = dropout(softmax( softcap(f(Q, K)) + B, where M )) · V and lse = log Σ exp(scores), in float32 at least.

    A row that attends to no key has output 0 and lse -inf; a sink is a logit that takes weight and has no value.
    """
    if problem.normalizer is not None:
        return _normalized(problem)
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
        sinks = problem.sinks.to(dtype)  # [H]; of one head where there is no head axis
        sink = (sinks[:, None, None] if problem.heads else sinks[:, None]).expand_as(sink)  # -> [..., H, M, 1]
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


def _normalized(problem: Problem) -> Result:
    """Output = dropout(w( softcap(f(Q, K)) + B, where M )) · V for another normalizer w, and its numbers of rows."""
    weights, numbers = problem.normalized()  # [..., H, M, N], [..., H, M]
    if problem.dropout is not None:
        dropout_mask = problem.dropout.dropout_mask(*problem.dropout_indices(problem.grid()))  # [B, H, M, N], 0 or 1
        weights = weights * dropout_mask.view(weights.shape).to(weights.dtype) / (1 - problem.dropout.probability)
    value = at_least_float32(problem.value)
    output = per_head(lambda folded: folded @ value, weights, value)  # [..., H, M, Dv]
    return Result(output.to(problem.value.dtype), numbers if problem.wants_lse else None)


def by_operators(problem: Problem) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of `formula`, the output by torch's operator where that says the same.

    For graphs: what is not used of the two is left out there, and ONNX has an operator for torch's.
    """
    result = formula(replace(problem, wants_lse=True))
    if result.lse is None:
        raise AssertionError("a problem that wants the log-sum-exp was computed without it")
    return (_output_of_operator(problem) if _is_operator(problem) else result.output), result.lse


def _is_operator(problem: Problem) -> bool:
    """Whether `scaled_dot_product_attention` has all that the problem asks for, and sums as finely."""
    if problem.normalizer is not None or problem.softcap is not None or problem.sinks is not None:
        return False
    return isinstance(problem.pairs, DotPairs) and problem.dropout is None and problem.value.dtype.itemsize >= 4


def _output_of_operator(problem: Problem) -> Tensor:
    """The output by `scaled_dot_product_attention`, and 0 in the rows that attend to no key."""
    pairs: DotPairs = problem.pairs  # type: ignore[assignment]  # `_is_operator` refuses other forms
    keep, added = problem.keep(), problem.bias_values()
    if added is not None:
        added = added.to(problem.value.dtype)
    if keep is not None:
        added = keep if added is None else torch.where(keep, added, -INFINITY)
    query, key, value = (_as_4d(tensor, problem) for tensor in (pairs.query, pairs.key, problem.value))
    if added is not None:  # whose queries and keys do not broadcast in ONNX Runtime
        leading = (*(1,) * (problem.value.ndim - added.ndim), *added.shape[:-2])
        added = _as_4d(added.expand(*leading, *problem.weights_shape[-2:]), problem)
    grouped = query.shape[1] != key.shape[1]
    output = scaled_dot_product_attention(query, key, value, added, scale=pairs.scale, enable_gqa=grouped)
    output = output.reshape(*problem.weights_shape[:-1], problem.value.shape[-1])
    return output if keep is None else output.masked_fill(~keep.any(-1, keepdim=True), 0.0)


def _as_4d(tensor: Tensor, problem: Problem) -> Tensor:
    """A tensor over queries, keys or pairs, (..., heads, ·, ·) or without heads (..., ·, ·), with one batch axis.

    ONNX's operator takes no others, and grouped heads are all of one axis.
    """
    if not problem.heads:
        tensor = tensor.unsqueeze(-3)
    if len(problem.batch) == 1:
        return tensor
    return tensor.expand(*problem.batch, *tensor.shape[-3:]).reshape(-1, *tensor.shape[-3:])
